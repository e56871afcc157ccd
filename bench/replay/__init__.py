"""How fast updates are replayed, and what that costs the step beside it."""
