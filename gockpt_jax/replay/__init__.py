"""Updates repeated on the host."""
