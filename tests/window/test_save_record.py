"""One report of each save, whichever thread hears of its end first; nobody waits for another."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from window.training_loop import WAIT_SECS

from gockpt_jax import SaveReport, WindowOptions
from gockpt_jax.telemetry import events, save_record
from gockpt_jax.telemetry.report import AuditFigures
from gockpt_jax.telemetry.save_record import PendingReport, ReportLog, SaveRecord
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.resources import Resources


@pytest.fixture
def log() -> ReportLog:
    return ReportLog()


@pytest.fixture
def pending(log: ReportLog) -> PendingReport:
    return PendingReport(SaveRecord(kind="snapshot", reason="a test"), 7, 0.0, log)


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor() as threads:
        yield threads


class Held:
    """A function that is held in its first call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str):
        self.has_come, self.goes_on = threading.Event(), threading.Event()
        real: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any) -> Any:
            result = real(*args)
            if not self.has_come.is_set():
                self.has_come.set()
                assert self.goes_on.wait(WAIT_SECS)
            return result

        monkeypatch.setattr(owner, name, call)


def test_two_threads_hear_of_a_failure(log, pending, pool, monkeypatch):
    held = Held(monkeypatch, save_record, "_in_words")
    first = pool.submit(pending.failed, OSError("the first"))
    assert held.has_come.wait(WAIT_SECS)
    pool.submit(pending.failed, OSError("the second")).result(WAIT_SECS)
    held.goes_on.set()
    first.result(WAIT_SECS)
    assert [report.error for report in log.all()] == ["OSError: the second"]


@pytest.mark.parametrize("last", ["returned", "committed"])
def test_it_fails_while_it_is_told_that_it_has_not(log, pending, pool, monkeypatch, last):
    """Also what has been made by then is not what is told in the end."""
    held = Held(monkeypatch, SaveRecord, "report")
    ends: dict[str, Callable[[], None]] = {
        "returned": lambda: pending.returned(0.0), "committed": pending.committed,
    }  # fmt: skip
    for name in ends:
        if name != last:
            ends[name]()
    assert not pending.is_finished
    told = pool.submit(ends[last])
    assert held.has_come.wait(WAIT_SECS)
    pool.submit(pending.failed, OSError("at the rename")).result(WAIT_SECS)
    held.goes_on.set()
    told.result(WAIT_SECS)
    assert [report.error for report in log.all()] == ["OSError: at the rename"]


@pytest.mark.parametrize("call", ["committed", "failed", "read"])
def test_nobody_waits_for_a_thread_that_is_interrupted(log, pending, pool, monkeypatch, call):
    """A signal handler in the middle of one of these may wait for the others."""
    pending.committed()
    held = Held(monkeypatch, SaveRecord, "report")
    interrupted = pool.submit(pending.returned, 0.0)
    assert held.has_come.wait(WAIT_SECS)
    calls: dict[str, Callable[[], Any]] = {
        "committed": pending.committed,
        "failed": lambda: pending.failed(OSError()),
        "read": log.all,
    }
    try:
        pool.submit(calls[call]).result(WAIT_SECS)
    finally:
        held.goes_on.set()
    interrupted.result(WAIT_SECS)
    assert len(log.all()) == 1


@pytest.mark.parametrize("other", ["committed", "failed"])
def test_both_ends_at_once_are_told_once(log, pending, pool, monkeypatch, other):
    """Each finds that the other has come: of the two, one line is logged."""
    told: list[Any] = []
    put = ReportLog.put
    monkeypatch.setattr(ReportLog, "put", lambda *args: (told.append(args), put(*args)))
    held = Held(monkeypatch, PendingReport, "_comes")
    first = pool.submit(pending.returned, 0.0)
    assert held.has_come.wait(WAIT_SECS)
    ends = {"committed": pending.committed, "failed": lambda: pending.failed(OSError())}
    pool.submit(ends[other]).result(WAIT_SECS)
    held.goes_on.set()
    first.result(WAIT_SECS)
    assert len(told) == len(log.all()) == 1
    assert pending.is_finished


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        ((), "nothing given to `save` had left early: none of it is"),
        (("a: it was edited",), "a: it was edited"),
        (("a: it was edited", "b: it was edited"), "a: it was edited; and 1 more"),
    ],
)
def test_a_window_of_which_the_save_took_nothing_was_a_snapshot(late, reason):
    """Whenever it is told: the items may not all have been taken by then."""
    record = SaveRecord(kind="window", reason="as planned", window_steps=3, late_leaves=late)
    told = record.report()
    assert (told.kind, told.window_steps) == ("snapshot", 1)
    assert told.reason == reason if late else told.reason.startswith(reason)
    record = dataclasses.replace(record, kind="window", early_leaves=1)
    assert record.report().kind == "window"


def test_one_that_is_superseded_says_so_too(log, pending):
    pending.record.kind, pending.record.window_steps = "window", 3
    pending.superseded(9, None)
    (told,) = log.all()
    assert (told.kind, told.window_steps) == ("superseded", 1)
    assert "(nothing given to `save` had left early" in told.reason


def resources(replicas: Any = None) -> Resources:
    options = WindowOptions(device_budget_bytes=100, host_budget_bytes=100)
    return Resources.of(options, Processes(), replicas)


def test_peaks_are_of_all_the_time_of_a_save(log):
    """The next one's window may open before it has drained, and measures anew."""
    shared = resources()
    records = [SaveRecord(kind="window", reason="a test") for _ in range(2)]
    shared.measure_from_now(records[0])
    for budget, num_bytes in ((shared.host, 30), (shared.device, 20)):
        budget.acquire(num_bytes)
        budget.release(num_bytes - 10)
    shared.measure_from_now(records[1])
    shared.device.acquire(5)
    for label, record in enumerate(records):
        PendingReport(record, label, 0.0, log).failed(OSError())
    assert [(r.peak_host_bytes, r.peak_device_bytes) for r in log.all()] == [(30, 20), (10, 15)]


def test_what_a_save_has_cost_adds_up(pending):
    """Of a window it has begun to before `save`; and a later call may wait for the save, too."""
    record = pending.record
    record.stall_secs = 1e9
    pending.returned(-3.0)  # the state was looked at at 0
    pending.add_stall(5.0)
    assert record.barrier_secs == 3.0
    assert record.stall_secs > 1e9
    record.committed_at = 7.0
    assert record.commit_secs == 0, "nothing was written"
    record.written_at = 4.0
    assert record.commit_secs == 3.0


def test_a_failure_is_told_once_and_the_first_is_kept(log, pending, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(jax.monitoring, "record_event", lambda name, **_: told.append(name))
    for error in (OSError("the first"), RuntimeError("of what followed from it")):
        pending.failed(error)
        assert pending.is_finished
    pending.committed()
    pending.returned(0.0)
    assert told == [events.SAVE_FAILED]
    assert pending.record.error == "OSError: the first"
    pending.superseded(9, OSError("the last"))
    (report,) = log.all()
    assert (report.kind, report.error) == ("superseded", "OSError: the first")


def test_one_that_fails_as_it_is_superseded_says_so(log, pending):
    pending.superseded(9, OSError("here"))
    (report,) = log.all()
    assert (report.kind, report.error) == ("superseded", "OSError: here")


def test_of_a_save_that_is_over_no_peaks_are_measured():
    shared = resources()
    shared.measure_from_now(SaveRecord(kind="window", reason="a test"))
    shared.measure_from_now(record := SaveRecord(kind="window", reason="a test"))
    assert [ref() for ref in shared._measured] == [record]


@pytest.mark.parametrize("end", ["committed", "failed", "superseded"])
def test_peaks_are_measured_whichever_way_a_save_ends(log, pending, end):
    """It may end before anything of it has drained."""
    pending.record.peaks = lambda: (3, 2)
    if end == "failed":
        pending.failed(OSError())
    elif end == "committed":
        pending.committed()
        pending.returned(0.0)
    else:
        pending.superseded(9, None)
    (told,) = log.all()
    assert (told.peak_host_bytes, told.peak_device_bytes) == (3, 2)


@pytest.mark.parametrize(
    ("error", "kind", "event"),
    [
        (None, "window", events.SAVE_WINDOW), ("no", "window", events.SAVE_FAILED),
        (None, "snapshot", events.SAVE_SNAPSHOT), (None, "skipped", events.SAVE_SKIPPED),
        (None, "superseded", events.SAVE_SUPERSEDED),
        ("no", "snapshot", events.SAVE_FAILED), ("no", "superseded", events.SAVE_SUPERSEDED),
    ],
)  # fmt: skip
def test_what_has_failed_is_counted_as_that(log, monkeypatch, error, kind, event):
    told: list[str] = []
    monkeypatch.setattr(jax.monitoring, "record_event", lambda name, **_: told.append(name))
    log.add(SaveReport(step=1, kind=kind, reason="a test", window_steps=1, error=error))
    assert told == [event]


def test_each_duration_is_told_under_its_own_name(log, monkeypatch):
    told: dict[str, float] = {}
    monkeypatch.setattr(jax.monitoring, "record_event_duration_secs", told.__setitem__)
    log.add(
        SaveReport(
            step=1, kind="window", reason="a test", window_steps=1, stall_secs=1.0,
            barrier_secs=2.0, drain_secs=3.0, write_secs=4.0, commit_secs=5.0,
        )
    )  # fmt: skip
    assert told == {
        events.SAVE_STALL_SECS: 1.0, events.SAVE_BARRIER_SECS: 2.0, events.SAVE_DRAIN_SECS: 3.0,
        events.SAVE_WRITE_SECS: 4.0, events.SAVE_COMMIT_SECS: 5.0,
    }  # fmt: skip


def test_what_has_never_come_took_no_time():
    """A save that failed was not drained, or not committed."""
    record = SaveRecord(kind="snapshot", reason="a test", sealed_at=5.0, written_at=7.0)
    assert (record.drain_secs, record.commit_secs) == (0, 0)


def test_figures_of_two_items_are_of_both():
    small = AuditFigures(
        chunks=1, compared_bytes=4, max_ulps=2, max_relative_error=3.0, worst_leaf="a"
    )
    large = AuditFigures(chunks=2, compared_bytes=8, max_ulps=7, worst_leaf="b")
    expected = AuditFigures(
        chunks=3, compared_bytes=12, max_ulps=7, max_relative_error=3.0, worst_leaf="b"
    )
    assert small.plus(large) == large.plus(small) == expected
    assert small.plus(None) is small


def test_each_figure_in_the_line_is_its_own():
    report = SaveReport(
        step=3, kind="window", reason="planned", window_steps=4, state_bytes=5_000_000,
        written_bytes=1, stall_secs=0.006, drain_secs=7.0, write_secs=8.0, commit_secs=9.0,
    )  # fmt: skip
    told = "K=4 (planned), 5.0 MB, stall 6.0 ms, drain 7.00 s, write 8.00 s"
    assert str(report) == f"step 3 saved: window, {told}"
    for kind in ("skipped", "superseded"):
        assert str(dataclasses.replace(report, kind=kind)) == f"step 3 not saved: {kind}, {told}"


def test_a_report_is_told_in_a_line(log, pending, caplog):
    """Some errors have a line for each leaf; all of it is in the report."""
    with caplog.at_level(logging.INFO, logger="gockpt_jax"):
        pending.failed(ValueError("no room:\n  a: of 3 B\n  b: of 5 B"))
    (told,) = log.all()
    assert told.error == "ValueError: no room:\n  a: of 3 B\n  b: of 5 B"
    assert caplog.messages == [str(told)]
    assert str(told).startswith("step 7 failed with ValueError: no room: a: of 3 B b: of 5 B: snap")
    assert "\n" not in str(told)


def test_one_process_logs(log, pending, caplog, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with caplog.at_level(logging.INFO, logger="gockpt_jax"):
        pending.failed(OSError())
    assert (len(log.all()), caplog.messages) == (1, [])
