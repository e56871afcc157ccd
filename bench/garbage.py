"""What Python's garbage collector takes of a run: while it looks at objects, no thread goes on."""

import contextlib
import gc
import time
from collections.abc import Iterator


@contextlib.contextmanager
def full_collections() -> Iterator[list[float]]:
    """Gives the seconds of each collection of all generations, as they come, until it is left."""
    secs: list[float] = []
    started = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        if info["generation"] == 2 and phase == "start":
            started = time.perf_counter()
        elif info["generation"] == 2:
            secs.append(time.perf_counter() - started)

    gc.callbacks.append(note)
    try:
        yield secs
    finally:
        gc.callbacks.remove(note)


@contextlib.contextmanager
def grown_old() -> Iterator[list[int]]:
    """Gives how many objects came to the oldest generation, at each time that some did.

    When they are a quarter of those that were there, that generation is collected. Counting takes a
    while.
    """
    counts: list[int] = []
    before = 0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal before
        if info["generation"] == 1:
            there = len(gc.get_objects(generation=2))
            if phase == "start":
                before = there
            else:
                counts.append(there - before)

    gc.callbacks.append(note)
    try:
        yield counts
    finally:
        gc.callbacks.remove(note)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """What is there by now is not looked at while inside."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
