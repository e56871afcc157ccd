"""Signal handlers run between any two lines of the trainer's thread; what they call is safe there.

A handler that raises is an interrupt (`test_interrupts.py`); these call the manager.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import gockpt_jax as gockpt
from gockpt_jax import locks
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.saving.written import Written
from gockpt_jax.training.program import StepProgram
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.window.open_window import OpenWindow
from gockpt_jax.window.seal import Seal

from .trainer import LIMIT_SECS, Trainer

PLACES = {
    "a block leaves": (OpenWindow, "leave"),
    "there is room for the step": (OpenWindow, "make_room"),
    "a cut follows": (OpenWindow, "follow"),
    "the policy has been asked": (ocp.CheckpointManager, "should_save"),
    "the state is taken": (Seal, "take"),
    "it is handed over": (StateHandler, "_write"),
    "Orbax saves": (ocp.AsyncCheckpointer, "save"),
}


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """Has a handler run before the next call of a function, and says what came of it."""
    before = signal.getsignal(signal.SIGUSR1)

    def arm(owner: Any, name: str, handler: Callable[[], Any]) -> list[Any]:
        real, came_of_it = getattr(owner, name), []

        def handle(*_: Any) -> None:
            try:
                came_of_it.append(handler())
            except RuntimeError as error:
                came_of_it.append(error)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_the_trainers = threading.current_thread() is threading.main_thread()
            if is_the_trainers and not came_of_it:
                os.kill(os.getpid(), signal.SIGUSR1)  # Python runs the handler here
                assert came_of_it
            return real(*args, **kwargs)

        signal.signal(signal.SIGUSR1, handle)
        monkeypatch.setattr(owner, name, call)
        return came_of_it

    yield arm
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("place", "on_busy"), [*((place, "wait") for place in PLACES), ("it is handed over", "newest")]
)
def test_a_save_inside_a_step_or_a_save_is_refused(
    tmp_path: Path, interrupted: Callable[..., list[Any]], place: str, on_busy: Any
) -> None:
    window = gockpt.WindowOptions(steps=3, on_busy=on_busy)
    with Trainer(tmp_path, window=window) as trainer:
        trainer.run_undisturbed(6)
        states = [jax.tree.map(jnp.copy, trainer.state)]

        def emergency() -> Any:
            return trainer.manager.save(7, args=gockpt.GoCkptSave(states[0]), force=True)

        came_of_it = interrupted(*PLACES[place], emergency)
        for last in (8, 12):  # one after the other: none takes the place of one that waits
            trainer.run(last)
            trainer.manager.wait_until_finished()
        assert [type(x) for x in came_of_it] == [RuntimeError]
        assert "save of step 7: this thread is in the middle" in str(came_of_it[0])
        trainer.run_past_next_window()  # nothing was lost by it: the next window is one
        trainer.assert_intact()
        trainer.settle()
        assert trainer.bytes_in_flight() == (0, 0)
        assert {r.kind for r in trainer.manager.reports if r.step in (8, 12)} == {"window"}


@pytest.mark.parametrize("place", ["a block leaves", "Orbax saves"])
@pytest.mark.parametrize(
    ("call", "subject"), [("restore", "restore"), ("delete", "deletion of step 4")]
)
def test_a_restore_or_a_deletion_inside_is_refused(
    tmp_path: Path, interrupted: Callable[..., list[Any]], call: str, subject: str, place: str
) -> None:
    """The window that it has interrupted goes on from a state that a restore would replace."""
    with Trainer(tmp_path, window=gockpt.WindowOptions(steps=3)) as trainer:
        trainer.run_undisturbed(6)
        came_of_it = interrupted(*PLACES[place], lambda: getattr(trainer.manager, call)(4))
        trainer.run(8)
        assert [type(x) for x in came_of_it] == [RuntimeError]
        assert f"{subject}: this thread is in the middle" in str(came_of_it[0])
        trainer.assert_intact()
        assert trainer.report(8).kind == "window"


@pytest.mark.parametrize("place", PLACES)
def test_a_wait_inside_waits_for_the_save_before(
    tmp_path: Path, interrupted: Callable[..., list[Any]], place: str
) -> None:
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        came_of_it = interrupted(*PLACES[place], trainer.manager.wait_until_finished)
        trainer.run(16)
        assert came_of_it == [None]
        trainer.run_past_next_window()
        trainer.assert_intact()
        assert {r.kind for r in trainer.manager.reports if r.step >= 8} == {"window"}


@pytest.mark.parametrize("call", ["wait_until_finished", "close"])
@pytest.mark.parametrize("place", ["a block leaves", "there is room for the step"])
def test_a_save_that_is_waited_for_inside_is_visible(
    tmp_path: Path, interrupted: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch,
    place: str, call: str,
) -> None:  # fmt: skip
    """It is held back until somebody waits for it."""
    result, wait, goes_on = (
        Written.result,
        ocp.CheckpointManager.wait_until_finished,
        threading.Event(),
    )

    def held(written: Written, timeout: float | None = None) -> None:
        result(written, timeout)
        assert goes_on.wait(LIMIT_SECS)

    def let_go(manager: ocp.CheckpointManager) -> None:
        goes_on.set()
        wait(manager)

    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(3)
        monkeypatch.setattr(Written, "result", held)
        trainer.run(6)
        monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", let_go)

        def handler() -> Any:
            getattr(trainer.manager, call)()
            return trainer.manager.directory.joinpath("4").exists()

        came_of_it = interrupted(*PLACES[place], handler)
        trainer.update()
        goes_on.set()
        assert came_of_it == [True]
        trainer.assert_intact()


LOCKED = {
    "room is had": (ByteBudget, "_fits"),
    "what is taken is counted": (ByteBudget, "_take"),
}


@pytest.mark.parametrize("call", ["wait_until_finished", "close"])
@pytest.mark.parametrize("place", LOCKED)
def test_a_wait_inside_a_lock_that_a_save_needs_is_refused(
    tmp_path: Path, interrupted: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch,
    place: str, call: str,
) -> None:  # fmt: skip
    """It would wait for threads that wait for the line which it has interrupted."""
    result, goes_on = Written.result, threading.Event()

    def held(written: Written, timeout: float | None = None) -> None:
        result(written, timeout)
        assert goes_on.wait(LIMIT_SECS)

    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(3)
        monkeypatch.setattr(Written, "result", held)
        trainer.run(6)
        came_of_it = interrupted(*LOCKED[place], getattr(trainer.manager, call))
        trainer.update()  # the window of the next save opens
        goes_on.set()
        assert [type(x) for x in came_of_it] == [RuntimeError]
        assert "lock which a save needs" in str(came_of_it[0])
        trainer.save()
        trainer.run_past_next_window()
        trainer.assert_intact()
        assert {r.kind for r in trainer.manager.reports if r.step >= 4} == {"window"}


@pytest.mark.parametrize("place", LOCKED)
def test_a_wait_inside_a_lock_without_a_save(
    tmp_path: Path, interrupted: Callable[..., list[Any]], place: str
) -> None:
    """There is nothing to wait for, as between most saves."""
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        held: list[bool] = []

        def handle() -> None:
            held.append(locks.any_held())
            trainer.manager.wait_until_finished()

        came_of_it = interrupted(*LOCKED[place], handle)
        trainer.run(12)
        assert (held, came_of_it) == ([True], [None])
        assert not locks.any_held()
        trainer.run_past_next_window()
        trainer.assert_intact()


def test_all_locks_are_known() -> None:
    """Those that the trainer's thread never holds, beside saves that need them, are listed here."""
    not_the_trainers = {"data_file.py", "hand_over.py", "step_room.py", "syncs.py"}
    # These say by `is_held` that a handler is inside, or are no matter of a save.
    asked = {"calls.py", "locks.py", "nested.py", "session.py", "traced.py"}
    sources = Path(gockpt.__file__).parent.rglob("*.py")
    made = re.compile(r"threading\.(Lock|RLock|Condition|Semaphore|Event|Barrier)\(\)")
    found = {path.name for path in sources if made.search(path.read_text())}
    assert found == not_the_trainers | asked


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Orbax's
@pytest.mark.parametrize("place", PLACES)
def test_a_handler_that_closes_and_exits(
    tmp_path: Path, interrupted: Callable[..., list[Any]], place: str
) -> None:
    """What has been accepted is written; what was under way when it came is not visible."""
    trainer = Trainer(tmp_path)

    def exits() -> None:
        came_of_it.append(None)  # no further call of the function is interrupted
        trainer.manager.close()
        raise SystemExit

    trainer.run_undisturbed(3)
    trainer.run(6)
    came_of_it = interrupted(*PLACES[place], exits)
    with pytest.raises(SystemExit):
        trainer.run(12)
    trainer.manager.close()
    del trainer.given[0]
    assert list(trainer.given) == [4]
    with ocp.CheckpointManager(tmp_path) as stock:
        assert sorted(stock.all_steps()) == [0, 4]


def test_a_handler_between_steps_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        before = signal.signal(
            signal.SIGUSR1, lambda *_: (trainer.save(force=True), trainer.manager.close())
        )
        try:
            trainer.update()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert 7 in trainer.given
        finally:
            signal.signal(signal.SIGUSR1, before)
        with ocp.CheckpointManager(tmp_path) as stock:
            assert sorted(stock.all_steps()) == [0, 4, 7]


def test_the_program_survives_a_handler_that_raises_as_the_step_is_armed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left with a plan and without an armed step: every later step raised."""
    real, times = StepProgram.arm, [0]

    def once(program: StepProgram) -> None:
        times[0] += 1
        if times[0] == 1:
            raise KeyboardInterrupt
        real(program)

    monkeypatch.setattr(StepProgram, "arm", once)
    with Trainer(tmp_path) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.run(8)
        trainer.run_past_next_window()
        trainer.assert_intact()


def test_what_a_handler_closed_over_ends_as_ever(
    tmp_path: Path, interrupted: Callable[..., list[Any]]
) -> None:
    """It returns, so the save that it interrupted is made; there is no other."""
    trainer = Trainer(tmp_path)
    trainer.run_undisturbed(6)
    came_of_it = interrupted(*PLACES["Orbax saves"], trainer.manager.close)
    trainer.run(8)
    assert came_of_it == [None]
    with pytest.raises(RuntimeError, match="the manager is closed"):
        trainer.run(9)
    trainer.assert_intact()
    trainer.manager.close()
    assert [r.error for r in trainer.manager.reports] == [None] * 3
