"""From a profile to lanes: what ran where and when, in a window."""

import dataclasses
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ORIGIN = "bench/origin"
"""A span that the benchmark enters to tie the profiler's clock to its own."""

# The library's spans (`gockpt_jax/telemetry/events.py`) and the programs that it runs, by lane.
LANES = {
    "device": {"jit_train_step": "step", "jit_armed": "armed step", "jit__copy": "staging copy"},
    "trainer": {
        "gockpt/stage": "stage", "gockpt/pull": "start pulls", "gockpt/seal": "seal",
        "gockpt/audit": "audit",
    },
    "pulls": {"gockpt/land": "land"},
    "replay": {"gockpt/replay": "replay"},
    "write": {"gockpt/write": "write"},
}  # fmt: skip


@dataclasses.dataclass(frozen=True, order=True)
class Span:
    """One box of the timeline; seconds since `ORIGIN`."""

    start_secs: float
    end_secs: float
    lane: str
    name: str


def read_spans(directory: Path) -> list[Span]:
    """The spans of a profile, in order; read on the CPU backend so far.

    Args:
      directory: As given to `jax.profiler.start_trace`.

    Raises:
      ValueError: if a lane has none: the profile is not one of a window, or names have changed.
    """
    # Not `jax.profiler.ProfileData`: reading its statistics aborts the process on jaxlib 0.11.2.
    (path,) = directory.rglob("*.trace.json.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    found: dict[str, list[tuple[float, float]]] = {}
    for name, start, end in _named(events):
        found.setdefault(name, []).append((start, end))
    ((origin, _),) = found[ORIGIN]
    spans = [
        Span((start - origin) / 1e6, (end - origin) / 1e6, lane, label)
        for lane, names in LANES.items()
        for name, label in names.items()
        for start, end in found.get(name, ())
    ]
    missing = LANES.keys() - {span.lane for span in spans}
    if missing:
        raise ValueError(f"the profile has nothing for the lanes {sorted(missing)}: {path.name}")
    return sorted(spans)


def _named(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Host spans as they are; of each run of a program, from its first operation to its last."""
    runs: dict[tuple[str, Any], tuple[float, float]] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        found = event.get("args", {})
        if event["name"].startswith(("gockpt/", "bench/")):
            yield event["name"], start, end
        elif "hlo_module" in found:
            run = (found["hlo_module"], found.get("run_id"))
            first, last = runs.get(run, (start, end))
            runs[run] = (min(first, start), max(last, end))
    for (module, _), (start, end) in runs.items():
        yield module, start, end


def busy_secs(spans: list[Span], lane: str) -> float:
    """Seconds during which a lane has at least one span.

    Example:
      >>> spans = [Span(0.0, 2.0, "write", "a"), Span(1.0, 3.0, "write", "b")]
      >>> busy_secs(spans, "write")
      3.0
    """
    total, until = 0.0, float("-inf")
    for span in sorted(s for s in spans if s.lane == lane):
        total += max(0.0, span.end_secs - max(span.start_secs, until))
        until = max(until, span.end_secs)
    return total
