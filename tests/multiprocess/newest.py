"""Saves that wait for the previous one, beside another process: `on_busy="newest"`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import gockpt_jax as gockpt
from gockpt_jax.storage.managing.turn import MARGIN_CALLS
from gockpt_jax.storage.saving.written import Written
from gockpt_jax.window.host_budget import HostBudget

from .scenarios import FAULTY, failing, failure_of, holds_nothing, queue_of, replaced, say
from .training import WINDOW_STEPS, Loop

INTERVAL = 8
WAIT_SECS = 60


@contextlib.contextmanager
def waiting_behind(loop: Loop, label: int, *, fails: bool = False) -> Iterator[None]:
    """Runs to a label; one process goes on writing it until the block ends, or fails to.

    After the block every process has heard of its end, and none has made a call since.
    """
    loop.run(label - 1)
    loop.manager.wait_until_finished()
    go_on, result = threading.Event(), Written.result

    def held(written: Written, timeout: float | None = None) -> None:
        result(written, timeout)
        if written._record.step == label:
            assert go_on.wait(WAIT_SECS)
            if fails:
                raise RuntimeError("injected")

    with replaced(Written, "result", held):
        loop.run(label)
        yield
        assert loop.manager.is_saving_in_progress()
        loop.session.processes.barrier("held")
        go_on.set()
        for thread in threading.enumerate():
            if thread.name == "save_finalize":
                threading.Thread.join(thread, WAIT_SECS)


def waits(loop: Loop) -> int | None:
    """The label of the save that waits."""
    waiting = loop.manager._gockpt_saves.waiting
    return None if waiting is None else waiting.step


def until_handed_over(loop: Loop) -> None:
    """Makes updates, without `save`; the last of them is the same everywhere."""
    try:
        while waits(loop) is not None:
            loop.update()
    finally:
        labels = loop.session.processes.gather("handed over", str(loop.label))
        assert len(set(labels.values())) == 1, labels


def newest(directory: Path) -> None:
    """Saves wait, are handed over at one call, superseded, skipped, and fail, everywhere alike."""
    window = gockpt.WindowOptions(steps=WINDOW_STEPS, on_busy="newest")
    loop = Loop(directory / "run", window=window, save_interval_steps=INTERVAL)
    called_in_vain(loop)
    superseded(loop)
    with_full_queues(loop)
    after_a_failure(loop)
    no_room(loop)
    not_taken(loop)
    before_the_turn(loop)
    superseded_though_it_had_failed(loop)
    with waiting_behind(loop, 21 * INTERVAL):
        loop.run(22 * INTERVAL)
    assert waits(loop) == 22 * INTERVAL
    loop.manager.close()
    loop.keep()
    at_any_pace(directory / "paces", window)
    holds_nothing(loop)


def at_any_pace(directory: Path, window: gockpt.WindowOptions) -> None:
    """Each process writes at a pace of its own; all the same becomes of every save."""
    rng, go_on = np.random.default_rng(jax.process_index()), threading.Event()
    result = Written.result

    def at_some_pace(written: Written, timeout: float | None = None) -> None:
        result(written, timeout)
        assert go_on.wait(WAIT_SECS)

    with replaced(Written, "result", at_some_pace, only_on=jax.process_index()):
        loop = Loop(directory, window=window, save_interval_steps=3)
        for label in range(37):
            loop.run(label)
            (go_on.set if rng.random() < 0.5 else go_on.clear)()
        go_on.set()
        loop.manager.wait_until_finished()
    kinds = {report.step: report.kind for report in loop.manager.reports}
    assert sorted(kinds) == list(range(0, 37, 3))
    told = loop.session.processes.gather("kinds", str(sorted(kinds.items())))
    assert len(set(told.values())) == 1, told
    dropped = {step for step, kind in kinds.items() if kind == "superseded"}
    assert dropped, "or nothing was tried"
    loop.given = {step: given for step, given in loop.given.items() if step not in dropped}
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()


def called_in_vain(loop: Loop) -> None:
    """One process calls in vain, more often than the margin is wide: that makes it no faster."""
    loop.run(3)
    for _ in range(3 * MARGIN_CALLS * (jax.process_index() == FAULTY)):
        with pytest.raises(TypeError):
            loop.step(loop.state, "no batch")


def superseded(loop: Loop) -> None:
    """The newest is written: from the same call on, though one process is ahead when it hears."""
    with waiting_behind(loop, INTERVAL):
        loop.run(2 * INTERVAL)
        assert waits(loop) == 2 * INTERVAL
        loop.run(3 * INTERVAL)
        assert loop.manager.latest_step() == waits(loop) == 3 * INTERVAL
        assert ocp.utils.checkpoint_steps(loop.directory) == [0]
        kept = []  # jax 0.7 drops what was donated when the step has run: with the other process
        for _ in range(2 * (jax.process_index() == FAULTY)):
            kept.append(loop.state)
            loop.update()
    until_handed_over(loop)
    del loop.given[2 * INTERVAL]
    loop.manager.wait_until_finished()
    kinds = {report.step: report.kind for report in loop.manager.reports}
    assert kinds == {0: "snapshot", 8: "window", 16: "superseded", 24: "window"}
    assert loop.report(3 * INTERVAL).waiting_secs > 0


def with_full_queues(loop: Loop) -> None:
    """Steps that wait for the other process are still in the queue when it has been handed over."""
    is_first, dispatch = jax.process_index() == 0, queue_of(loop)
    with waiting_behind(loop, 4 * INTERVAL):
        loop.run(5 * INTERVAL)
    queued = dispatch() if is_first else []
    while waits(loop) is not None:  # a call of the step would wait in that queue
        assert not loop.save(args=gockpt.GoCkptSave(loop.state))
        loop.label += 1
    if is_first:
        say("running", not any(x.is_ready() for x in queued))
    loop.session.processes.barrier("looked")
    jax.block_until_ready(queued if is_first else dispatch())


def after_a_failure(loop: Loop) -> None:
    """One process fails to write: the same call raises everywhere, and the next hands over."""
    with waiting_behind(loop, 6 * INTERVAL, fails=True):
        loop.run(7 * INTERVAL)
    with pytest.raises(gockpt.ProcessError, match=f"process {FAULTY}: RuntimeError: injected"):
        until_handed_over(loop)
    del loop.given[6 * INTERVAL]
    assert waits(loop) == 7 * INTERVAL
    loop.update()
    assert waits(loop) is None


def no_room(loop: Loop) -> None:
    """What one process has no room for, all skip; the one that waits goes on waiting."""
    with waiting_behind(loop, 8 * INTERVAL):
        loop.run(9 * INTERVAL)
        with replaced(HostBudget, "why_no_room", lambda *_, **__: "no room"):
            loop.run(10 * INTERVAL)
        report = loop.manager.last_report
        assert (report.step, report.kind) == (10 * INTERVAL, "skipped")
        assert report.reason.endswith(f"and process {FAULTY}: no room")
        assert waits(loop) == 9 * INTERVAL
    loop.manager.wait_until_finished()


def not_taken(loop: Loop) -> None:
    """What one process could not take is a save that fails on all."""
    error = gockpt.HostBudgetError("injected")
    with waiting_behind(loop, 12 * INTERVAL):
        with replaced(HostBudget, "admit_save", failing(error)):
            loop.run(13 * INTERVAL)
        assert waits(loop) == 13 * INTERVAL
    assert f"process {FAULTY}: HostBudgetError: injected" in failure_of(loop)
    del loop.given[13 * INTERVAL]
    failed = {report.step for report in loop.manager.reports if report.error is not None}
    assert failed == {6 * INTERVAL, 13 * INTERVAL}


def superseded_though_it_had_failed(loop: Loop) -> None:
    """It is one word on all processes, and on the one that had failed there is the error, too."""
    with waiting_behind(loop, 18 * INTERVAL):
        with replaced(HostBudget, "admit_save", failing(gockpt.HostBudgetError("injected"))):
            loop.run(19 * INTERVAL)
        loop.run(20 * INTERVAL)
        assert waits(loop) == 20 * INTERVAL
    report = loop.report(19 * INTERVAL)
    assert report.kind == "superseded", report
    assert (report.error is None) == (jax.process_index() != FAULTY), report
    del loop.given[19 * INTERVAL]
    loop.manager.wait_until_finished()


def before_the_turn(loop: Loop) -> None:
    """An accepted save that all find idle hands over what waits, and waits in its place."""
    with waiting_behind(loop, 15 * INTERVAL):
        loop.run(17 * INTERVAL - 1)
        assert waits(loop) == 16 * INTERVAL
    loop.run(17 * INTERVAL)
    assert waits(loop) == 17 * INTERVAL
    loop.manager.wait_until_finished()
    assert sorted(loop.manager.all_steps())[-2:] == [16 * INTERVAL, 17 * INTERVAL]
    assert [loop.report(n * INTERVAL).kind for n in (16, 17)] == ["window"] * 2
