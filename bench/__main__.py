"""The command line of the benchmarks."""

import argparse
import importlib
import sys
import time
from pathlib import Path

from bench.record import OptionError

# Each module has `run(quick: bool) -> Record`; its docstring is its help. One that has options of
# its own has `add_arguments(parser)`, and `run(quick, **options)`, `out` among them.
BENCHMARKS = {
    "analysis": "bench.analysis",
    "aot": "bench.aot.benchmark",
    "around": "bench.around.benchmark",
    "compiled": "bench.compiled.benchmark",
    "cut": "bench.cut.benchmark",
    "cut_growth": "bench.cut.growth",
    "gpu": "bench.gpu.benchmark",
    "replay": "bench.replay.benchmark",
    "replay_beside_training": "bench.replay.beside_training",
    "storage": "bench.storage.benchmark",
    "storage_save": "bench.storage.save",
    "memory": "bench.memory.benchmark",
    "timeline": "bench.timeline.benchmark",
    "train": "bench.train.benchmark",
    "transfer": "bench.transfer.benchmark",
}
# What works on result files. Each module has `main(arguments) -> exit status`.
COMMANDS = {
    "compare": "bench.compare",
    "figures": "bench.figures.make",
}


def main() -> None:
    """Runs one benchmark, writes its record if asked to, and prints its table."""
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        sys.exit(importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:]))
    name = next((word for word in sys.argv[1:] if word in BENCHMARKS), None)
    module = importlib.import_module(BENCHMARKS[name]) if name else None
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=module.__doc__ if module else __doc__,
        epilog=None if module else "`python -m bench NAME --help` tells what one measures, and its "
        "own options.", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("name", choices=BENCHMARKS, help=f"or {' or '.join(COMMANDS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute or two at most")
    parser.add_argument("--out", type=Path, help="a file for the record, as JSON")
    own = hasattr(module, "add_arguments")
    if own:
        module.add_arguments(parser)
    arguments = parser.parse_args()
    options = {key: value for key, value in vars(arguments).items() if key not in ("name", "quick")}
    start = time.perf_counter()
    try:
        record = module.run(arguments.quick, **(options if own else {}))
    except OptionError as error:
        parser.error(str(error))
    record.show()  # first: what cannot be written is seen all the same
    if arguments.out:
        record.write(arguments.out)
    print(f"bench {arguments.name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
