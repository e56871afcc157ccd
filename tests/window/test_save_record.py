"""One report of each save, whichever thread hears of its end first; nobody waits for another."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from window.training_loop import WAIT_SECS

from gockpt_jax.telemetry import save_record
from gockpt_jax.telemetry.save_record import PendingReport, ReportLog, SaveRecord


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


def test_both_ends_at_once_are_told_once(log, pending, pool, monkeypatch):
    """Each finds that the other has come: of the two, one line is logged."""
    told: list[Any] = []
    put = ReportLog.put
    monkeypatch.setattr(ReportLog, "put", lambda *args: (told.append(args), put(*args)))
    held = Held(monkeypatch, PendingReport, "_comes")
    first = pool.submit(pending.returned, 0.0)
    assert held.has_come.wait(WAIT_SECS)
    pool.submit(pending.committed).result(WAIT_SECS)
    held.goes_on.set()
    first.result(WAIT_SECS)
    assert len(told) == len(log.all()) == 1
    assert pending.is_finished


@pytest.mark.parametrize("late", [(), ("a: it was edited", "b: it was edited")])
def test_a_window_of_which_the_save_took_nothing_was_a_snapshot(late):
    """Whenever it is told: the items may not all have been taken by then."""
    record = SaveRecord(kind="window", reason="as planned", window_steps=3, late_leaves=late)
    told = record.report()
    assert (told.kind, told.window_steps) == ("snapshot", 1)
    assert told.reason.startswith(late[0] if late else "nothing given to `save` had left early")
    record = dataclasses.replace(record, kind="window", early_leaves=1)
    assert record.report().kind == "window"


def test_one_that_is_superseded_says_so_too(log, pending):
    pending.record.kind, pending.record.window_steps = "window", 3
    pending.superseded(9, None)
    (told,) = log.all()
    assert (told.kind, told.window_steps) == ("superseded", 1)
    assert "(nothing given to `save` had left early" in told.reason
