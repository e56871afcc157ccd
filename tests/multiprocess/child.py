"""One process of a job. Prints what it has seen; what must hold, it asserts itself."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from pathlib import Path

import jax


def main() -> None:
    """Runs the scenarios that the command line names."""
    scenarios_, directory, address, processes, index = sys.argv[1:]
    faulthandler.dump_traceback_later(400, exit=True)
    jax.distributed.initialize(
        address, num_processes=int(processes), process_id=int(index), heartbeat_timeout_seconds=60
    )
    from . import life, newest, scenarios

    try:
        for name in scenarios_.split(","):
            (Path(directory) / name).mkdir(exist_ok=True)
            (vars(scenarios) | vars(newest) | vars(life))[name](Path(directory) / name)
            print("done", name, flush=True)
    except BaseException:
        traceback.print_exc()
        print("failed", flush=True)
        os._exit(1)  # without waiting for the others


if __name__ == "__main__":
    main()
