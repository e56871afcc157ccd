"""What compilers of accelerators that are not here make of a cut: worked out on the host."""
