"""Benchmarks: `python -m bench NAME [--quick] [--out FILE]`."""

import sys
from pathlib import Path

# What is trained here is the example: its model, its optimizer, its text (`lm`, `train_lm`).
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
