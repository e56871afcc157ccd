"""What touches the user's step: the trace, the cut, the armed step, the markers."""
