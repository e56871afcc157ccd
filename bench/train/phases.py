"""One phase of training under one mode, and what was seen meanwhile."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from bench.garbage import full_collections
from bench.record import resident_bytes, sampled
from bench.train.model import Job
from bench.train.modes import Mode

_SAMPLE_SECS = 0.01


@dataclasses.dataclass
class Peaks:
    """The most that was in use during a phase, in bytes; 0 where the platform does not tell.

    Attributes:
      device: Sampled, so a step's scratch memory may lie between two samples.
      resident: Of this process, sampled.
      system: Of this machine, sampled.
      device_ever: The allocator's own peak since the process began; kept and not judged, because
        it has no way back, and compilers try kernels out in that memory, too.
    """

    device: int = 0
    resident: int = 0
    system: int = 0
    device_ever: int = 0

    def plus(self, other: "Peaks") -> "Peaks":
        """The most of both."""
        return Peaks(
            max(self.device, other.device), max(self.resident, other.resident),
            max(self.system, other.system), max(self.device_ever, other.device_ever),
        )  # fmt: skip


@dataclasses.dataclass
class Phase:
    """Steps under one mode.

    Attributes:
      mode: Its name.
      steps: How many.
      wall_secs: Until the last step's state was there; the end of background work not waited for.
      drain_secs: From there until the last save was visible.
      saves: Accepted saves.
      step_secs: Of each step, from the loop's side: it waits for the loss of the step before.
      hook_secs: Of each step, spent in calls of the step and of `save`.
      visible_secs: Of each save, from its acceptance until the loop saw that it was visible: after
        a step, behind the call of the next save that had to wait for it, or at the end.
      peaks: Memory.
      reports: What the library said of the saves of this phase.
      saved_at: Which steps had an accepted save.
      collected_secs: Of each step, spent in collections of all of Python's objects.
    """

    mode: str
    steps: int
    wall_secs: float
    drain_secs: float
    saves: int
    step_secs: list[float]
    hook_secs: list[float]
    visible_secs: list[float]
    peaks: Peaks
    reports: list[dict[str, Any]]
    saved_at: list[int] = dataclasses.field(default_factory=list)
    collected_secs: list[float] = dataclasses.field(default_factory=list)

    @property
    def secs(self) -> float:
        """All of it."""
        return self.wall_secs + self.drain_secs

    def plus(self, other: "Phase") -> "Phase":
        """Both as one phase of the same mode."""
        return Phase(
            self.mode, self.steps + other.steps, self.wall_secs + other.wall_secs,
            self.drain_secs + other.drain_secs, self.saves + other.saves,
            self.step_secs + other.step_secs, self.hook_secs + other.hook_secs,
            self.visible_secs + other.visible_secs, self.peaks.plus(other.peaks),
            self.reports + other.reports,
            self.saved_at + [self.steps + n for n in other.saved_at],
            self.collected_secs + other.collected_secs,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The raw samples, with as many digits as they are worth."""
        found = dataclasses.asdict(self)
        for name in ("step_secs", "hook_secs", "visible_secs", "collected_secs"):
            found[name] = [round(value, 6) for value in found[name]]
        return found


class Loop:
    """A training loop whose mode changes from phase to phase, while its state goes on.

    Args:
      state: To begin with.
      job: Has the batches, taken in turns, and the step outside phases.
      interval: Steps between saves.
      lead: Steps before the first save of a phase.
    """

    def __init__(self, state: Any, job: Job, *, interval: int, lead: int):
        self.state = state
        self._job = job
        self._interval = interval
        self._lead = lead
        self._next_label = 0

    def run(self, name: str, mode: Mode, steps: int) -> Phase:
        """Trains for some steps; the first save comes after `lead` of them, then every interval.

        Args:
          name: Of the mode.
          mode: What `save` is called of after every step, as in any loop.
          steps: How many.
        """
        # A multiple of the interval comes after `lead` steps; labels only ever grow.
        first = (self._next_label // self._interval + 2) * self._interval - self._lead
        self._next_label = first + steps
        seen = len(mode.reports())
        watch = _Watch(mode)
        step_secs, hook_secs, saved_at, collected_secs = [], [], [], []
        batches = self._job.batches
        # The mode before may still hold the state that it returned; donated, it is gone for all.
        self.state, _ = self._job.donating(self.state, batches[0])
        jax.block_until_ready(self.state)
        with _sampled() as peaks, full_collections() as collected:
            start = last = time.perf_counter()
            before = None
            for n in range(steps):
                self.state, loss = mode.step(self.state, batches[n % len(batches)])
                if mode.save(first + n, self.state):
                    saved_at.append(n)
                    watch.saved()
                hook_secs.append(time.perf_counter() - last)
                if before is not None:
                    before.block_until_ready()
                before = loss
                watch.look()
                now = time.perf_counter()
                step_secs.append(now - last)
                collected_secs.append(sum(collected))
                collected.clear()
                last = now
            jax.block_until_ready(self.state)
            trained = time.perf_counter()
            mode.finish()
            end = time.perf_counter()
            watch.look()
        return Phase(
            name, steps, trained - start, end - trained, len(saved_at), step_secs, hook_secs,
            watch.visible_secs, peaks, mode.reports()[seen:], saved_at, collected_secs,
        )  # fmt: skip


class _Watch:
    """Sees when saves become visible, once per step."""

    def __init__(self, mode: Mode):
        self.visible_secs: list[float] = []
        self._mode = mode
        self._since: float | None = None

    def saved(self) -> None:
        """A save was accepted, so the one before it is visible, now if it has not been seen."""
        now = time.perf_counter()
        if self._since is not None:  # it was waited for: those that take longest count, too
            self.visible_secs.append(now - self._since)
        self._since = now

    def look(self) -> None:
        """Whether it is visible now."""
        if self._since is not None and not self._mode.is_saving():
            self.visible_secs.append(time.perf_counter() - self._since)
            self._since = None


@contextlib.contextmanager
def _sampled() -> Iterator[Peaks]:
    """Samples memory: allocators' peaks have no way back."""
    peaks = Peaks()

    def look() -> None:
        peaks.device = max(peaks.device, device_bytes())
        peaks.resident = max(peaks.resident, resident_bytes())
        peaks.system = max(peaks.system, system_bytes())

    with sampled(look, _SAMPLE_SECS):
        yield peaks
    peaks.device_ever = device_bytes("peak_bytes_in_use")


def device_bytes(figure: str = "bytes_in_use") -> int:
    """Bytes in use on the first device, or another of its figures; 0 where it does not tell."""
    return int((jax.local_devices()[0].memory_stats() or {}).get(figure, 0))


def system_bytes() -> int:
    """Memory in use on this machine: pinned memory too, which may not count as resident."""
    amounts = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        amounts[name] = int(rest.split()[0]) * 1024
    return amounts["MemTotal"] - amounts.get("MemAvailable", amounts["MemFree"])
