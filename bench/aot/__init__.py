"""What arming and windows cost on accelerators that are not here, from their compilers."""
