"""Benchmarks: `python -m bench NAME [--quick] [--out FILE]` (ARCHITECTURE, section 9)."""
