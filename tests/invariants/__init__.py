"""Invariants 1, 2 and 3 of docs/design.md, over the whole table of training programs."""
