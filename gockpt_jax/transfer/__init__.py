"""From device to host: staging copies, pulls, byte budgets."""
