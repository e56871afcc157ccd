"""Every name under which gockpt_jax reports: `jax.monitoring` events and profiler spans."""

import contextlib
import traceback
from collections.abc import Callable

import jax

PREFIX = "/gockpt/"
SAVE_STALL_SECS = PREFIX + "save/stall_secs"
SAVE_BARRIER_SECS = PREFIX + "save/barrier_secs"
SAVE_DRAIN_SECS = PREFIX + "save/drain_secs"
SAVE_WRITE_SECS = PREFIX + "save/write_secs"
SAVE_COMMIT_SECS = PREFIX + "save/commit_secs"
SAVE_WINDOW = PREFIX + "save/window"
SAVE_SNAPSHOT = PREFIX + "save/snapshot"
SAVE_SKIPPED = PREFIX + "save/skipped"
SAVE_SUPERSEDED = PREFIX + "save/superseded"
SAVE_FAILED = PREFIX + "save/failed"  # in the place of the kind that it was
WINDOW_ABANDONED = PREFIX + "window/abandoned"

SPAN_STAGE = "gockpt/stage"
SPAN_PULL = "gockpt/pull"  # starting transfers
SPAN_LAND = "gockpt/land"  # waiting for one to end
SPAN_REPLAY = "gockpt/replay"
SPAN_AUDIT = "gockpt/audit"
SPAN_SEAL = "gockpt/seal"
SPAN_WRITE = "gockpt/write"  # at least one chunk is being written


def tell(how: Callable[..., object], *told: object) -> None:
    """Calls what calls the user's own code: a listener of `jax.monitoring`, a handler of a log.

    On a thread that commits, an error of theirs would cost the save. It is printed, as the log
    prints those of its handlers.
    """
    try:
        how(*told)
    except Exception:
        with contextlib.suppress(Exception):  # there may be nowhere to print
            traceback.print_exc()


def span(name: str) -> jax.profiler.TraceAnnotation:
    """A span in the profiler's timeline, on whichever thread it is entered."""
    return jax.profiler.TraceAnnotation(name)
