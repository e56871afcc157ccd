"""Listeners and handlers of a log are the user's own: what they do costs no save, and no step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from window.training_loop import WAIT_SECS, Loop

from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.save_record import PendingReport

_HOOKS = ["record_event", "record_event_duration_secs", "handler"]
_TOLD = ("step ", "window for version ")  # how the lines of reports begin, and of windows given up


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Has one of ours that the library tells call a function of the user's."""
    log, handler = logging.getLogger("gockpt_jax"), logging.Handler()
    level = log.level

    def hook(name: str, users: Callable[[], object]) -> None:
        if name != "handler":
            real = getattr(jax.monitoring, name)

            def told(event: str, *rest: Any, **more: Any) -> None:
                real(event, *rest, **more)
                if event.startswith(events.PREFIX):
                    users()

            monkeypatch.setattr(jax.monitoring, name, told)
            return
        log.setLevel(logging.DEBUG)
        handler.emit = lambda record: record.getMessage().startswith(_TOLD) and users()
        log.addHandler(handler)

    yield hook
    log.removeHandler(handler)
    log.setLevel(level)


def broken() -> None:
    raise KeyError("a listener's own")


def test_an_error_that_cannot_be_printed_is_nobody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal may be gone. An interrupt is no error."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(events.traceback, "print_exc", broken)
    events.tell(broken)
    with pytest.raises(KeyboardInterrupt):
        events.tell(interrupted)


@pytest.mark.parametrize("name", _HOOKS)
def test_an_error_of_a_listener_costs_no_save(tmp_path, hooked, capfd, name):
    hooked(name, broken)
    loop = Loop(tmp_path, window={"steps": 3})
    with loop.manager:
        loop.train(8)
        loop.manager.wait_until_finished()
        loop.assert_saved(0, 4, 8)
        assert loop.kinds[8] == "window"
        assert [report.error for report in loop.manager.reports] == [None] * 3
    assert "a listener's own" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["record_event", "handler"])
def test_nor_does_it_end_a_step(tmp_path, hooked, capfd, name):
    """The window of a save that does not come is told of as it is given up."""
    hooked(name, broken)
    loop = Loop(tmp_path, window={"steps": 3})
    with loop.manager:
        loop.train(7)
        loop.manager.wait_until_finished()
        loop.update()
        loop.update()
        assert loop.manager.window_status == "idle"
        assert loop.train(8, force=True)
        loop.manager.wait_until_finished()
        loop.assert_saved(0, 4, 8)
    assert "a listener's own" in capfd.readouterr().err


@pytest.mark.parametrize("name", _HOOKS)
def test_a_listener_cannot_wait_for_the_save_that_it_is_told_of(
    tmp_path, hooked, capfd, monkeypatch, name
):
    """It would wait for itself: told so at once, and the save is made."""
    has_returned = threading.Event()
    returned, committed = PendingReport.returned, PendingReport.committed

    def set_returned(pending: PendingReport, started_at: float) -> None:
        returned(pending, started_at)
        has_returned.set()

    def commit_behind(pending: PendingReport) -> None:  # so that the thread that commits tells
        assert has_returned.wait(WAIT_SECS)
        committed(pending)

    monkeypatch.setattr(PendingReport, "returned", set_returned)
    monkeypatch.setattr(PendingReport, "committed", commit_behind)
    loop = Loop(tmp_path, window={"steps": 1})
    hooked(name, loop.manager.wait_until_finished)
    with loop.manager:
        loop.train(0)
        loop.manager.wait_until_finished()
        loop.assert_saved(0)
    assert "it cannot wait for that save" in capfd.readouterr().err
