"""Training loops in the shape of programs that people run, at toy size."""
