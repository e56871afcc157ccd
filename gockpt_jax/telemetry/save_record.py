"""What is known of a save while it is under way."""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import jax

from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.report import AuditFigures, SaveKind, SaveReport

_log = logging.getLogger("gockpt_jax")

_EVENTS: dict[SaveKind, str] = {
    "window": events.SAVE_WINDOW,
    "snapshot": events.SAVE_SNAPSHOT,
    "skipped": events.SAVE_SKIPPED,
    "superseded": events.SAVE_SUPERSEDED,
}

_NOTHING_LEFT_EARLY = (
    "nothing given to `save` had left early: it is not the state that the last wrapped step"
    " returned, or a part that leaves at the save"
)
_NOTHING_ON_DEVICES = (
    "nothing given to `save` had left early: none of it is a `jax.Array`; give what the last"
    " wrapped step returned, without `np.asarray` or `device_get`"
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
    taken_bytes: int = 0  # of it on the host: an array that lies in several places is there once
    num_arrays: int = 0  # that were given, on devices
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

    def measure(self) -> None:
        """Takes note of the peaks so far: at its end, and before anybody measures anew."""
        host_bytes, device_bytes = self.peaks()
        self.peak_host_bytes = max(self.peak_host_bytes, host_bytes)
        self.peak_device_bytes = max(self.peak_device_bytes, device_bytes)

    @property
    def drain_secs(self) -> float:
        """From the seal until the last chunk was final on the host."""
        return max(0.0, self.drained_at - self.sealed_at)

    @property
    def commit_secs(self) -> float:
        """From the last write until the checkpoint was visible."""
        return max(0.0, self.committed_at - self.written_at) if self.written_at else 0.0

    def report(self) -> SaveReport:
        """What is known by now, for the user: what a report tells, a record has by that name."""
        self.look_back()
        return SaveReport(**{f.name: getattr(self, f.name) for f in dataclasses.fields(SaveReport)})

    def look_back(self) -> None:
        """A window of which the save has taken nothing was a snapshot after all."""
        if self.kind == "window" and not self.early_leaves:
            self.kind, self.window_steps = "snapshot", 1
            nothing = _NOTHING_LEFT_EARLY if self.num_arrays else _NOTHING_ON_DEVICES
            self.reason = _in_short(self.late_leaves) or nothing


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _in_short(reasons: Sequence[str]) -> str:
    """The first of them, and how many more there are: they may be hundreds."""
    more = len(reasons) - 1
    return "; ".join([*reasons[:1], *([f"and {more} more"] if more > 0 else [])])


class PendingReport:
    """A save whose report is not complete: `save` must have returned and the commit be done.

    Either may come first: the trainer's thread returns, a thread of Orbax's commits. Neither holds
    a lock: a signal handler that has interrupted the one may wait for the other.

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
        self._place = object()  # in the log
        # What has not come yet: of several threads one takes each of them out.
        self._to_come = {"return", "commit", "report", "failure"}
        record.step = step

    @property
    def step(self) -> int:
        """The save's label."""
        return self.record.step

    @property
    def is_finished(self) -> bool:
        """Whether all has come that is in the report, or there will be no more."""
        return self._to_come.isdisjoint(("return", "commit"))

    def returned(self, started_at: float) -> None:
        """`save`, called at `started_at`, returns to the trainer."""
        self.add_stall(started_at)
        self._done("return")

    def add_stall(self, started_at: float) -> None:
        """A call that began at `started_at` returns to the trainer, who has waited for the save."""
        self.record.barrier_secs += max(0.0, self._entered_at - started_at)
        self.record.stall_secs += time.perf_counter() - started_at

    def committed(self) -> None:
        """The checkpoint is visible."""
        self.record.committed_at = time.perf_counter()
        self.record.measure()
        self._done("commit")

    def superseded(self, step: int, error: BaseException | None) -> None:
        """There will be no checkpoint: a newer save, of this label, has taken its place.

        Also where it had failed by then: of several processes only this one knows of that.
        """
        if error is not None:
            self._note(error)
        self.record.measure()
        self.record.look_back()
        self.record.kind = "superseded"
        self.record.reason = f"superseded by step {step} while it waited ({self.record.reason})"
        self._tell()

    def failed(self, error: BaseException) -> None:
        """There will be no checkpoint; also after `committed`, which comes before the rename."""
        if self._note(error):
            self.record.measure()
            self._tell()

    def _note(self, error: BaseException) -> bool:
        """Notes why there will be no checkpoint; whether that is new."""
        words = _in_words(error)
        # Before it is known to be noted: whoever is interrupted here may not come back.
        self.record.error = self.record.error or words
        return self._comes("failure")

    def _done(self, part: str) -> None:
        if self._comes(part) and self.is_finished and self._comes("report"):
            self._tell()

    def _comes(self, what: str) -> bool:
        """Whether it has not come before."""
        try:
            self._to_come.remove(what)
        except KeyError:
            return False
        return True

    def _tell(self) -> None:
        """Makes the report, in the place of one that has turned out to be wrong."""
        report = self.record.report()
        self._log.put(self._place, report)
        if report.error != self.record.error:  # it has failed meanwhile, and was told of before
            self._log.put(self._place, self.record.report())
        self._to_come.difference_update(("return", "commit", "report"))


class ReportLog:
    """The reports of a manager, oldest first; written by the commit thread, read by the trainer.

    Attributes:
      pending: That of the save that began last, which may not be complete.
    """

    def __init__(self) -> None:
        self.pending: PendingReport | None = None
        self._reports: dict[object, SaveReport] = {}

    def add(self, report: SaveReport) -> None:
        """Keeps the report of a save that is over."""
        self.put(object(), report)

    def put(self, place: object, report: SaveReport) -> None:
        """Keeps the report in a place, and tells `jax.monitoring`; one INFO line on process 0.

        What goes wrong with that is printed: whoever ends a save would take it for the save's.
        """
        self._reports[place] = report
        has_failed = report.error is not None and report.kind != "superseded"
        name = events.SAVE_FAILED if has_failed else _EVENTS[report.kind]
        events.tell(jax.monitoring.record_event, name)
        for name, secs in (
            (events.SAVE_STALL_SECS, report.stall_secs),
            (events.SAVE_BARRIER_SECS, report.barrier_secs),
            (events.SAVE_DRAIN_SECS, report.drain_secs),
            (events.SAVE_WRITE_SECS, report.write_secs),
            (events.SAVE_COMMIT_SECS, report.commit_secs),
        ):
            events.tell(jax.monitoring.record_event_duration_secs, name, secs)
        if jax.process_index() == 0:
            events.tell(_log.info, "%s", report)

    def all(self) -> tuple[SaveReport, ...]:
        """Every report so far."""
        return tuple(self._reports.copy().values())  # another thread may add one to its own
