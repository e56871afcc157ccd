"""Storage: host arrays and their way into an ordinary Orbax checkpoint."""
