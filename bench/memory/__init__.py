"""What saves take of the memory of the host."""
