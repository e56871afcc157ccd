"""The command line of the benchmarks."""

import argparse
import importlib
from pathlib import Path

# Each module has `run(quick: bool) -> Record`; its first line is its help.
BENCHMARKS = {
    "aot": "bench.aot",
    "cut": "bench.cut",
    "replay": "bench.replay",
    "replay_beside_training": "bench.replay_beside_training",
    "timeline": "bench.timeline",
}


def main() -> None:
    """Runs one benchmark, writes its record if asked to, and prints its table last."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--out", type=Path, help="a file for the record, as JSON")
    arguments = parser.parse_args()
    record = importlib.import_module(BENCHMARKS[arguments.name]).run(arguments.quick)
    if arguments.out:
        record.write(arguments.out)
    record.show()


if __name__ == "__main__":
    main()
