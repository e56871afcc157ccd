"""What checkpointing costs a training run."""
