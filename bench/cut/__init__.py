"""Where steps are cut: what is retained, and whether any bit differs for it."""
