"""Invariants 1, 2 and 3 of ARCHITECTURE.md, over the whole table of training programs."""
