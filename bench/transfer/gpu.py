"""The transfer's questions to an accelerator: each a function, each caught on its own.

How fast each way to the host is, cold and warm; whether a pull runs beside a busy step and what it
costs that step; what a pull of a donated buffer does (the negative test: the step must wait for
it); whether the way from pinned memory to the replay's backend copies anything.

    record = Record("gpu")
    answer(record, quick=True, limit_secs=120)

A question that fails leaves a note and the others go on. On the CPU backend all of them run at toy
size, which shows that they run and nothing else.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from bench.record import Record
from bench.transfer.asked import Asked, Scale
from bench.transfer.steps import ask_donated, ask_overlap, ask_pinning
from bench.transfer.ways import ask_dispatch, ask_pointers, ask_raw_link, ask_ways

QUESTIONS: Mapping[str, Callable[[Asked], None]] = {
    "pinning": ask_pinning,  # while there is none
    "pointers": ask_pointers,
    "raw_link": ask_raw_link,
    "overlap": ask_overlap,
    "donated": ask_donated,
    "ways": ask_ways,
    "dispatch": ask_dispatch,
}
"""In the order in which they are asked: few seconds and much to learn first."""


def answer(
    record: Record, *, quick: bool, limit_secs: float = math.inf,
    questions: Sequence[str] | None = None, saved: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Asks every question, in order of worth, until the time is over.

    Args:
      record: Takes samples and notes.
      quick: Fewer sizes and repeats.
      limit_secs: No measurement begins after this; the one that runs is finished.
      questions: Names of `QUESTIONS`; all if `None`.
      saved: Called after each.
    """
    device = jax.local_devices()[0]
    scale = Scale.of(device.platform, quick=quick)
    asked = Asked(record, device, scale, time.perf_counter() + limit_secs)
    for name in questions or QUESTIONS:
        if asked.is_over:
            asked.note(f"{name}: not asked, the time was over.")
            continue
        try:
            QUESTIONS[name](asked)
        except Exception as error:  # one answer less, not all of them
            asked.note(f"{name}: failed: {type(error).__name__}: {str(error)[:300]}")
        saved()
    if questions is None:
        _conclude(asked)


def _conclude(asked: Asked) -> None:
    """`pull_link_ratio`: the library's warm pull of the largest size, over the raw link's."""
    figures = asked.record.figures
    mib = max(asked.scale.sizes_mib)
    raw = figures.get(f"raw_link_gbps/{mib:g}MiB")
    ours = asked.record.samples.get(f"pull_gbps/library/{mib:g}MiB/warm")
    if raw and ours:
        asked.add("pull_link_ratio", *(gbps / raw for gbps in ours))
    else:
        asked.note("pull_link_ratio: not measured, the link or the pull has no figure.")
