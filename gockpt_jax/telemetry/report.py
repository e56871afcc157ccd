"""What became of a save."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import jax

from gockpt_jax.telemetry import events

_log = logging.getLogger("gockpt_jax")

SaveKind = Literal["window", "snapshot", "skipped", "superseded"]
_EVENTS: dict[SaveKind, str] = {
    "window": events.SAVE_WINDOW,
    "snapshot": events.SAVE_SNAPSHOT,
    "skipped": events.SAVE_SKIPPED,
    "superseded": events.SAVE_SUPERSEDED,
}
_DONE: dict[SaveKind, str] = {
    "window": "saved", "snapshot": "saved", "skipped": "not saved", "superseded": "not saved",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditFigures:
    """What a comparison of replayed chunks with the device's own has shown.

    The same figures are in the checkpoint's custom metadata, under `gockpt_jax`, `audit`.

    Attributes:
      chunks: Boxes that were compared.
      compared_bytes: Their bytes.
      max_ulps: Largest difference of an element, in units in the last place.
      max_relative_error: Largest absolute difference over the largest magnitude of its leaf (of the
        shard in which it was found).
      worst_leaf: Path of the leaf with the largest difference; `None` if there was none.
    """

    chunks: int = 0
    compared_bytes: int = 0
    max_ulps: int = 0
    max_relative_error: float = 0.0
    worst_leaf: str | None = None

    def plus(self, other: "AuditFigures | None") -> "AuditFigures":
        """The figures of both."""
        if other is None:
            return self
        worse = other if other.max_ulps > self.max_ulps else self
        return AuditFigures(
            chunks=self.chunks + other.chunks,
            compared_bytes=self.compared_bytes + other.compared_bytes,
            max_ulps=worse.max_ulps,
            max_relative_error=max(self.max_relative_error, other.max_relative_error),
            worst_leaf=worse.worst_leaf,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveReport:
    """One save, after its commit.

    Attributes:
      step: The label passed to `save`.
      kind: `"window"`: parts left over several steps. `"snapshot"`: all left at the save step.
        `"skipped"`: there is no such checkpoint, as `on_busy="skip"` asks for. `"superseded"`: nor
        is there, for a newer save came while its state waited, as `on_busy="newest"` asks for.
      reason: Why it was that kind, in words.
      window_steps: K; 1 for a snapshot.
      deferred_steps: Steps for which its window found no room in the host budget, and did not open.
      state_bytes: Bytes that this process wrote or replayed of the state.
      early_bytes: Those of them that left before the save step and were replayed.
      gradient_bytes: Bytes of retained values that followed them.
      late_leaves: Paths of leaves that were planned early and became late, with the reason.
      stall_secs: Time the trainer's thread spent in our hooks during the window and in `save`,
        waits for budgets, barriers and the previous save included. Device contention is not in it:
        step-time inflation, which a benchmark measures, is the whole cost.
      barrier_secs: The part of it in `save` before the state was looked at: waiting for the
        previous save and for the other processes.
      waiting_secs: From there until the save was handed to Orbax, where it had to wait for the
        previous one (`on_busy="newest"`).
      drain_secs: From the seal until the last chunk was final on the host.
      write_secs: From the first chunk's hand-over to the last one's end of writing.
      commit_secs: From there until the checkpoint was visible.
      written_bytes: Bytes handed to TensorStore.
      peak_host_bytes: Most bytes that saves held on the host at once, from this one's beginning to
        its end: chunks, retained values, and what replay, audit and writer take beside them. Other
        saves' bytes are in it.
      host_budget_bytes: What they were allowed when the state was taken.
      peak_device_bytes: Most bytes staged and retained on one device at once, by our accounting.
      audit: What was compared with the device; `None` if nothing was replayed, or without audit.
      error: What failed, in words; `None` for a committed checkpoint.

    Example:
      >>> print(SaveReport(step=7, kind="snapshot", reason="forced", window_steps=1))
      step 7 saved: snapshot, K=1 (forced), 0.0 MB, stall 0.0 ms, drain 0.00 s, write 0.00 s
    """

    step: int
    kind: SaveKind
    reason: str
    window_steps: int
    deferred_steps: int = 0
    state_bytes: int = 0
    early_bytes: int = 0
    gradient_bytes: int = 0
    late_leaves: tuple[str, ...] = ()
    stall_secs: float = 0.0
    barrier_secs: float = 0.0
    waiting_secs: float = 0.0
    drain_secs: float = 0.0
    write_secs: float = 0.0
    commit_secs: float = 0.0
    written_bytes: int = 0
    peak_host_bytes: int = 0
    host_budget_bytes: int | None = None
    peak_device_bytes: int = 0
    audit: AuditFigures | None = None
    error: str | None = None

    def __str__(self) -> str:
        """One line of it, as it is logged; its `repr` has everything."""
        became = _DONE[self.kind] if self.error is None else f"failed with {self.error}"
        return (
            f"step {self.step} {became}: {self.kind}, K={self.window_steps} ({self.reason}), "
            f"{self.state_bytes / 1e6:.1f} MB, stall {self.stall_secs * 1e3:.1f} ms, "
            f"drain {self.drain_secs:.2f} s, write {self.write_secs:.2f} s"
        )


@dataclasses.dataclass(kw_only=True)
class SaveRecord:
    """A report in the making; times are `time.perf_counter()` of this process."""

    kind: SaveKind
    reason: str
    window_steps: int = 1
    deferred_steps: int = 0
    step: int = -1
    state_bytes: int = 0
    early_bytes: int = 0
    early_leaves: int = 0  # of which this process may own nothing
    gradient_bytes: int = 0
    late_leaves: tuple[str, ...] = ()
    stall_secs: float = 0.0
    barrier_secs: float = 0.0
    waiting_secs: float = 0.0
    sealed_at: float = 0.0
    drained_at: float = 0.0
    write_secs: float = 0.0
    written_at: float = 0.0
    committed_at: float = 0.0
    written_bytes: int = 0
    peak_host_bytes: int = 0
    host_budget_bytes: int | None = None
    peak_device_bytes: int = 0
    audit: AuditFigures | None = None
    error: str | None = None
    peaks: Callable[[], tuple[int, int]] = lambda: (0, 0)  # on the host, on one device

    def drained(self) -> None:
        """The last chunk is on the host."""
        self.drained_at = time.perf_counter()
        self.measure()

    def measure(self) -> None:
        """Takes note of the peaks so far; another save's window may measure anew from then on."""
        host_bytes, device_bytes = self.peaks()
        self.peak_host_bytes = max(self.peak_host_bytes, host_bytes)
        self.peak_device_bytes = max(self.peak_device_bytes, device_bytes)

    def nothing_left_early(self) -> None:
        """The save asked for nothing that the window had taken: it was a snapshot after all."""
        self.kind, self.window_steps = "snapshot", 1
        self.reason = "; ".join(self.late_leaves) or (
            "nothing given to `save` had left early: it is not the state that the last wrapped step"
            " returned, or a part that leaves at the save"
        )

    def report(self) -> SaveReport:
        """The finished report."""
        told: dict[str, Any] = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(SaveReport)
            if hasattr(self, f.name)
        }
        told["drain_secs"] = max(0.0, self.drained_at - self.sealed_at)
        if self.written_at:
            told["commit_secs"] = max(0.0, self.committed_at - self.written_at)
        return SaveReport(**told)


class PendingReport:
    """A save whose report is not complete: `save` must have returned and the commit be done.

    Either may come first: the trainer's thread returns, a thread of Orbax's commits.

    Args:
      record: What is known of the save so far.
      step: Its label.
      entered_at: When the state was looked at, after barriers and the previous save.
      log: Where the report goes.
    """

    def __init__(self, record: SaveRecord, step: int, entered_at: float, log: "ReportLog"):
        self.record = record
        self._entered_at = entered_at
        self._log = log
        self._waiting_for = {"return", "commit"}
        self._lock = threading.Lock()
        record.step = step

    @property
    def step(self) -> int:
        """The save's label."""
        return self.record.step

    @property
    def is_finished(self) -> bool:
        """Whether the report has been made."""
        return not self._waiting_for

    def returned(self, started_at: float) -> None:
        """`save`, called at `started_at`, returns to the trainer."""
        self.waits(started_at)
        self._done("return")

    def waits(self, started_at: float) -> None:
        """`save`, called at `started_at`, returns; Orbax hears of the save later."""
        self.record.barrier_secs += max(0.0, self._entered_at - started_at)
        self.record.stall_secs += time.perf_counter() - started_at

    def committed(self) -> None:
        """The checkpoint is visible."""
        self.record.committed_at = time.perf_counter()
        self.record.measure()
        self._done("commit")

    def superseded(self, step: int) -> None:
        """There will be no checkpoint: a newer save, of this label, has taken its place."""
        with self._lock:
            self.record.kind = "superseded"
            self.record.reason = f"superseded by step {step} while it waited ({self.record.reason})"
            self._waiting_for.clear()
        self._log.add(self.record.report())

    def failed(self, error: BaseException) -> None:
        """There will be no checkpoint; also after `committed`, which comes before the rename."""
        with self._lock:
            finished = not self._waiting_for
            if finished and self.record.error is not None:
                return
            told = self.record.report()
            self.record.error = f"{type(error).__name__}: {error}"
            self._waiting_for.clear()
        if finished:
            self._log.forget(told)
        self._log.add(self.record.report())

    def _done(self, part: str) -> None:
        with self._lock:
            if part not in self._waiting_for:
                return
            self._waiting_for.remove(part)
            if self._waiting_for:
                return
        self._log.add(self.record.report())


class ReportLog:
    """The reports of a manager, oldest first; written by the commit thread, read by the trainer."""

    def __init__(self) -> None:
        self._reports: list[SaveReport] = []
        self._lock = threading.Lock()

    def add(self, report: SaveReport) -> None:
        """Keeps a report and tells `jax.monitoring`; one INFO line on process 0."""
        with self._lock:
            self._reports.append(report)
        events.record_event(_EVENTS[report.kind])
        events.record_durations(
            {
                events.SAVE_STALL_SECS: report.stall_secs,
                events.SAVE_BARRIER_SECS: report.barrier_secs,
                events.SAVE_DRAIN_SECS: report.drain_secs,
                events.SAVE_WRITE_SECS: report.write_secs,
                events.SAVE_COMMIT_SECS: report.commit_secs,
            }
        )
        if jax.process_index() == 0:
            _log.info("%s", report)

    def forget(self, report: SaveReport) -> None:
        """Takes a report back that has turned out to be wrong."""
        with self._lock:
            self._reports = [kept for kept in self._reports if kept != report]

    def all(self) -> tuple[SaveReport, ...]:
        """Every report so far."""
        with self._lock:
            return tuple(self._reports)
