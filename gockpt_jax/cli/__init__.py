"""The command line: what a user asks before training and about checkpoints on disk."""
