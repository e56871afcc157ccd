"""Where the time of a save goes: before its first write, while it writes, after its last one.

Seen from outside: every call of this process that writes or syncs, of whoever's code, is timed. So
the same is said of raw writes and of the library's.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

_LARGE_BYTES = 2**20  # smaller writes are metadata
NOTE = (
    "first_write_secs, writing_secs, tail_secs: from the call to the first write of 1 MiB or more, "
    "from there to the end of the last one, and from there to the end of the save; for raw and "
    "where the library writes by itself. writing_raw_ratio: raw's writing_secs over ours. Raw has "
    "64 MiB in flight at one time; ours 64 MiB too, but 32 MiB of what is copied. Of the writing, "
    "idle_secs: nothing was in flight. Of the tail, sync_secs: until the last sync of the data; "
    "rename_secs: from there until Orbax had renamed the save. The rest of it is our checksums and "
    "the syncs of small files, which come before the renaming where `GoCkptManager` saves."
)
_RENAMES = ("rename", "replace")


class Call(NamedTuple):
    """One call of a function of `os`.

    Attributes:
      name: The function.
      began_at: By `time.perf_counter`.
      ended_at: Likewise.
      nbytes: What was written.
    """

    name: str
    began_at: float
    ended_at: float
    nbytes: int


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """Records what this process, on any thread, has the disk do meanwhile."""
    calls: list[Call] = []

    def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began_at = time.perf_counter()
            result = run(*args, **options)
            nbytes = result if name == "pwrite" else 0
            calls.append(Call(name, began_at, time.perf_counter(), nbytes))
            return result

        return call

    with contextlib.ExitStack() as patches:
        for name in ("pwrite", "fsync", *_RENAMES):
            patches.enter_context(mock.patch.object(os, name, timed(name, getattr(os, name))))
        yield calls


def phases(calls: Sequence[Call], began_at: float, ended_at: float) -> dict[str, float]:
    """Cuts the time of a save at its first and last large write, its last sync and its renaming.

    Args:
      calls: Of the save.
      began_at: When it was called for, by `time.perf_counter`.
      ended_at: When its files were visible and durable.

    Returns:
      `first_write_secs`; `writing_secs`, and of it `idle_secs`, in which nothing was on its way to
      the disk; `tail_secs`, and of it `sync_secs` until the last sync of the data and
      `rename_secs` from there until the save was visible. Nothing where others write: TensorStore
      calls no function of `os`.
    """
    spans = sorted((c.began_at, c.ended_at) for c in calls if c.nbytes >= _LARGE_BYTES)
    if not spans:
        return {}
    first_at, idle_secs, last_at = spans[0][0], 0.0, spans[0][0]
    for began, ended in spans:
        idle_secs += max(0.0, began - last_at)
        last_at = max(last_at, ended)
    found = {
        "first_write_secs": first_at - began_at,
        "writing_secs": last_at - first_at,
        "idle_secs": idle_secs,
        "tail_secs": ended_at - last_at,
    }
    renamed = [c.ended_at for c in calls if c.name in _RENAMES and c.ended_at > last_at]
    visible_at = min(renamed, default=ended_at)
    syncs = [c.ended_at for c in calls if c.name == "fsync" and last_at < c.ended_at < visible_at]
    synced_at = max(syncs, default=last_at)
    return found | {"sync_secs": synced_at - last_at, "rename_secs": visible_at - synced_at}
