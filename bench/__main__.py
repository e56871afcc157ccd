"""The command line of the benchmarks."""

import argparse
import importlib
import sys
from pathlib import Path

# Each module has `run(quick: bool) -> Record`; its first line is its help.
BENCHMARKS = {
    "aot": "bench.aot",
    "cut": "bench.cut",
    "replay": "bench.replay",
    "replay_beside_training": "bench.replay_beside_training",
    "storage": "bench.storage",
