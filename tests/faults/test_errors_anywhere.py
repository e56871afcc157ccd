"""An error wherever a function of the library's is called, once in a period.

On a thread of the background: training goes on, and hears of it. The save is there and right, or
its report says why not, and nothing of it is visible; nothing hangs, and the next save and what is
held are as ever. On the trainer's thread, behind the dispatch of a step: the state is not lost.
`make errors` tries all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest
from bits import differing
from campaigns import seeds
from signals import GOES_ON, LIBRARY, profiled

import gockpt_jax as gockpt
from gockpt_jax.window import worker

from .periods import INTERVAL, NoTrouble, Periods, batch, fresh, train_step
from .states import abstract, bits_of, stock_restore

IS_CAMPAIGN = seeds("ERRORS") is not None
PLACES = seeds("ERRORS") or range(1, 4_000, 67)  # of some 2,100 in a period
STEP_PLACES = seeds("ERRORS") or range(1, 400, 17)  # of some 300
PARTS = 4
MODES = ("wait", "newest")
CASES = [
    # Here each place is tried under one of the modes.
    (mode, part)
    for mode in MODES
    for part in range(PARTS)
    if IS_CAMPAIGN or part % len(MODES) == MODES.index(mode)
]
_TRIES = 6
NOT_THERE = {
    # What catches errors, where it does not yet, or no more.
    "Worker._run", "Worker._comes", "Worker._do_next",
    # What counts bytes as they are given back: they stay counted.
    "ByteBudget.release", "ByteBudget.hand_over", "give_back", "give_back.<locals>.<lambda>",
    "HostShard.release", "WriteBudget._add", "WriteBudget._remove", "span",
    "Promise.done", "Promise.result", "Promise.exception", "Promise.add_done_callback",
    "Promise._require_done", "Promise._call_all",
    # What Orbax does behind a commit: what fails there is reported as failed, and is there.
    "Turn.told_at.<locals>.heard", "Turn._settle", "_alone", "Deleter.delete_steps",
    # Of what a step has returned, where it is taken apart; with Python 3.12 that is no call.
    "StepProgram.call.<locals>.<listcomp>",
}  # fmt: skip


class Injected(Exception):
    """At the place that was chosen."""


class ErrorAt:
    """Raises where the background comes to the n-th place.

    Args:
      place: Which it is, counted from one, whichever thread comes there.

    Attributes:
      may_come: Whether what is passed now is a place.
      came_at: Where it came, if it has.
      told: What the loop was told.
    """

    def __init__(self, place: int):
        self.may_come: Callable[[], bool] = lambda: True
        self.came_at: str | None = None
        self.told: list[BaseException] = []
        self._left = place
        self._lock = threading.Lock()

    def during(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls; again where an error was told, as a loop that does not give up."""
        for _ in range(_TRIES):
            try:
                return call(*args, **kwargs)
            except Exception as error:
                self.told.append(error)
        raise AssertionError("no end of errors") from self.told[-1]

    def profile(self, frame: Any, event: str, arg: Any) -> None:
        """As `threading.setprofile` takes it: calls of the library's, by threads started then."""
        code = frame.f_code
        # A generator that goes on would not see what is raised as it does.
        if event != "call" or code.co_flags & GOES_ON:
            return
        is_ours = code.co_filename.startswith(LIBRARY) and code.co_qualname not in NOT_THERE
        if is_ours and self.may_come():
            self._pass(f"{code.co_qualname}, {code.co_filename}:{frame.f_lineno}")

    def once_entered(self, context: Callable[[], Any]) -> Callable[[], Any]:
        """A context manager of the library's that cannot be entered at the place."""

        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            self._pass(context.__name__)
            with context():
                yield

        return entered

    def _pass(self, where: str) -> None:
        with self._lock:
            self._left -= 1
            is_here = self._left == 0
        if is_here:
            self.came_at = f"{where}, {threading.current_thread().name}"
            raise Injected


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.fixture
def own_profile() -> Iterator[None]:
    """Whoever measures tests has one, too."""
    before = threading.getprofile()
    yield
    threading.setprofile(before)  # type: ignore[arg-type]  # None, as a rule


@contextlib.contextmanager
def naming(error_at: ErrorAt) -> Iterator[None]:
    """Says of a failure where the error came."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"an error came at {error_at.came_at}; told {error_at.told}")
        raise


def assert_nothing_is_lost(periods: Periods, error_at: ErrorAt) -> None:
    """Behind a period in which an error came, wherever it came."""
    report = periods.assert_saved_or_reported()
    assert report.error is None or error_at.told, report
    for told in error_at.told:  # a warning, which is an error in tests, has no cause
        is_of_it = any(isinstance(cause, Injected) for cause in causes(told))
        assert is_of_it or "Injected()" in str(told), told
    periods.run(NoTrouble())
    periods.run(NoTrouble())
    periods.assert_as_ever()


@pytest.mark.usefixtures("own_profile")
@pytest.mark.filterwarnings("ignore::gockpt_jax.SnapshotOnlyWarning")  # on CPUs with FMA
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's coroutines
@pytest.mark.parametrize(("on_busy", "part"), CASES)
def test_an_error_at_each_place(tmp_path: Path, on_busy: str, part: int) -> None:
    periods = Periods(tmp_path, on_busy)
    with periods.manager:
        for place in PLACES[part::PARTS]:
            error_at = ErrorAt(place)
            periods.end_threads()
            threading.setprofile(error_at.profile)
            with naming(error_at):
                periods.run(error_at)
                threading.setprofile(None)  # type: ignore[arg-type]
                periods.end_threads()
                assert_nothing_is_lost(periods, error_at)
            if error_at.came_at is None:  # the period has no more
                assert place != PLACES[part], "nothing was tried"
                break
    assert periods.held_bytes == {"host": 0, "device": 0}


@pytest.mark.filterwarnings("ignore::gockpt_jax.SnapshotOnlyWarning")  # on CPUs with FMA
def test_each_task_that_is_not_run_is_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    periods = Periods(tmp_path, "wait")
    with periods.manager:
        for place in itertools.count(1):
            error_at = ErrorAt(place)
            with monkeypatch.context() as patch:
                patch.setattr(worker, "unwatched", error_at.once_entered(worker.unwatched))
                periods.run(error_at)
            if error_at.came_at is None:
                break
            assert_nothing_is_lost(periods, error_at)
    assert place > 4
    assert periods.held_bytes == {"host": 0, "device": 0}


@pytest.mark.parametrize("place", [1, 2])  # on the thread that lands, and on the one behind it
def test_an_abandoned_window_holds_nothing_though_the_task_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    periods, error_at = Periods(tmp_path, "wait"), ErrorAt(place)
    with periods.manager:
        assert periods.held_bytes["host"] > 0
        with monkeypatch.context() as patch:
            patch.setattr(worker, "unwatched", error_at.once_entered(worker.unwatched))
            periods.manager._gockpt_session.abandon("a test has it so")
            assert periods.held_bytes == {"host": 0, "device": 0}
    assert error_at.came_at is not None


def donating_life(directory: Path, error_at: ErrorAt) -> None:
    """Steps that donate what they are given, two windows, and an error behind a step's dispatch."""
    state, plain, label = fresh(), fresh(), 0
    options = ocp.CheckpointManagerOptions(save_interval_steps=INTERVAL)
    window = gockpt.WindowOptions(steps=2)
    with gockpt.GoCkptManager(directory, options=options, window=window) as manager:
        step = manager.wrap(jax.jit(train_step.__wrapped__, donate_argnums=0))
        for label in range(2 * INTERVAL + 1):
            plain = train_step(plain, batch(label))
            error_at.may_come = jax.tree.leaves(state)[0].is_deleted
            with profiled(error_at.profile):
                state = error_at.during(step, state, batch(label))
            assert not differing(bits_of(state), bits_of(plain))
            if step.program is not None and step.program.is_armed:
                step.program.wait_until_ready()
            manager.save(label, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        assert not any(report.error for report in manager.reports), manager.reports
    assert not differing(stock_restore(directory, label, abstract(plain)), bits_of(plain))


@pytest.mark.filterwarnings("ignore::gockpt_jax.SnapshotOnlyWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_an_error_behind_a_step_loses_no_state(tmp_path: Path, part: int) -> None:
    """What was given to the step is donated: it has to return, whatever becomes of windows."""
    for place in STEP_PLACES[part::PARTS]:
        error_at = ErrorAt(place)
        with naming(error_at):
            donating_life(tmp_path / str(place), error_at)
        if error_at.came_at is None:  # a life has no more
            assert place != STEP_PLACES[part], "nothing was tried"
            break
