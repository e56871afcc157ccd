"""What became of a save: reports, events, spans."""
