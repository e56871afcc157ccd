"""What transfers cost the trainer, and what the way to the host can do."""
