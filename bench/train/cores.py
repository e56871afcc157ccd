"""Cores that are the device, for machines without one: training runs on them, and nothing else.

Where training has all cores, what a checkpoint costs the host is taken from training's arithmetic.
Beside an accelerator it is not, and a benchmark would show how many cores the machine has.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax


@contextlib.contextmanager
def device_cores() -> Iterator[tuple[list[int], list[int]] | None]:
    """Starts JAX's CPU backend on half of the cores, and has the others do all else meanwhile.

    A thread runs where the one ran that started it. So the backend's own threads stay where this
    one is at its start, and those to come, of all libraries, go to the other half.

    Yields:
      The cores of the device and those of the host; `None` where they are not told apart: there is
      only one core, or the backend was there before, on all of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    device, host = cores[:half], cores[half:]
    try:
        if device:
            os.sched_setaffinity(0, device)
            jax.devices()
            os.sched_setaffinity(0, host)
        yield (device, host) if _threads_on(device) else None
    finally:
        os.sched_setaffinity(0, cores)


def _threads_on(cores: list[int]) -> int:
    """Threads of this process that may run on these cores and on no other."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found += os.sched_getaffinity(int(task.name)) == set(cores)
    return found
