"""Invariants 5, 6 and 7: what happens to checkpoints when something goes wrong, or just ends."""
