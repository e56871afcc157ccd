"""Benchmarks of gockpt_jax: `python -m bench NAME [--quick] [--out FILE]`."""
