"""What a save costs the steps around it."""
