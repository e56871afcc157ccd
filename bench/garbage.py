"""What Python's garbage collector takes of a run: while it looks at objects, no thread goes on."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

_T = TypeVar("_T", int, float)


def full_collections() -> contextlib.AbstractContextManager[list[float]]:
    """Gives the seconds of each collection of all generations, as they come, until it is left."""
    return _grown(2, time.perf_counter)


def grown_old() -> contextlib.AbstractContextManager[list[int]]:
    """Gives how many objects came to the oldest generation, at each time that some did.

    When they are a quarter of those that were there, that generation is collected. Counting takes a
    while.
    """
    return _grown(1, lambda: len(gc.get_objects(generation=2)))


@contextlib.contextmanager
def _grown(generation: int, measure: Callable[[], _T]) -> Iterator[list[_T]]:
    """Gives by how much `measure` grew in each collection of up to a generation."""
    found: list[_T] = []
    before = measure()

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal before
        if info["generation"] == generation and phase == "start":
            before = measure()
        elif info["generation"] == generation:
            found.append(measure() - before)

    gc.callbacks.append(note)
    try:
        yield found
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
