"""The parts of `train_lm.py` that have nothing to do with checkpoints."""
