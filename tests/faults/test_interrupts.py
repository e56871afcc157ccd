"""Ctrl-C, and errors of the user's own functions, inside `save`: nothing is lost by them."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.futures.future import AwaitableSignalsContract
from signals import Signals, hear_ctrl_c, send_ctrl_c, when_the_main_thread_waits

import gockpt_jax as gockpt
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.storage.managing import waiting
from gockpt_jax.storage.saving import hand_over
from gockpt_jax.storage.saving import left as left_module
from gockpt_jax.storage.saving.begun import BegunSave
from gockpt_jax.storage.saving.begun_item import BegunItem
from gockpt_jax.storage.saving.left import LeftBehind
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.writing import leaf_writer
from gockpt_jax.window import open_window
from gockpt_jax.window.open_window import OpenWindow
from gockpt_jax.window.seal import Seal
from gockpt_jax.window.session import Session

from .processes import ENDS_WITHOUT_THREADS
from .trainer import WINDOW_STEPS, Trainer

Composite = ocp.CompositeCheckpointHandler


class Once:
    """Raises at the first call after it has been armed: before the function, or behind it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, behind: bool = False
    ):
        self.armed, self._behind, self._real = False, behind, getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: self._call(*args, **kwargs))

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        armed, self.armed = self.armed, False
        if armed and not self._behind:
            raise KeyboardInterrupt
        result = self._real(*args, **kwargs)
        if armed:
            raise KeyboardInterrupt
        return result


PLACES = {
    "the state is taken": (Seal, "take", False),
    "what left early is taken": (open_window, "send_late", False),
    "what left early is taken, without an audit": (open_window, "send_late", False),
    "what left early has been taken": (OpenWindow, "take_early", True),
    "it is accounted for": (BegunSave, "add", False),
    "it is handed over": (StateHandler, "_write", False),
    "it has begun": (ocp.AsyncCheckpointer, "save", True),
    "it is listed": (ocp.CheckpointManager, "_add_checkpoint_info", True),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_save_that_was_interrupted_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name, behind = PLACES[place]
    once = Once(monkeypatch, owner, name, behind=behind)
    audit = None if "without an audit" in place else gockpt.Audit()
    window = gockpt.WindowOptions(steps=WINDOW_STEPS, audit=audit)
    with Trainer(tmp_path, window=window) as trainer:
        trainer.run_undisturbed(7)
        trainer.update()
        once.armed = True
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
        assert trainer.save()
        trainer.run_past_next_window()
        trainer.assert_intact()
        trainer.settle()
        assert trainer.bytes_in_flight() == (0, 0)


# In a generator that is closed as nobody holds it any more.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_state_that_is_interrupted_as_it_is_taken_is_held_by_nobody() -> None:
    """Wherever: in the seal, in the budget, or as one of them returns to the other."""
    handler = StateHandler()
    session = handler._gockpt_session
    args = gockpt.GoCkptSave({name: jnp.ones((3, 5)) for name in "abc"})
    handler.take(args).release()  # all is compiled: from now on the places are always the same
    session.end_save()
    for place in itertools.count(1):
        signals, taken = Signals([place]), []
        with contextlib.suppress(KeyboardInterrupt), signals.coming():
            taken.append(handler.take(args))
        for save in taken:
            save.release()
        session.end_save()
        session.resources.worker.wait_until_idle()
        assert session.host.used_bytes == 0, signals.came_at
        if not signals.came_at:
            break
    assert place > 100
    session.close()


class Logger:
    """The user's own, of which Orbax makes use as it leaves `save`."""

    error: BaseException | None = None

    def log_entry(self, entry: Any) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the user's")])
def test_what_orbax_has_begun_it_brings_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """What stops `save` behind that does not stop the commit."""
    logger, go_on, check = Logger(), threading.Event(), leaf_writer._check_data
    monkeypatch.setattr(leaf_writer, "_check_data", lambda *a: go_on.wait(60) and check(*a))
    go_on.set()
    with gockpt.GoCkptManager(tmp_path, logger=logger) as manager:
        for step in range(3):
            logger.error = error if step == 1 else None
            args = gockpt.GoCkptSave({"w": jnp.full(1000, step, jnp.float32)})
            if step == 1:
                manager.wait_until_finished()
                go_on.clear()
                with pytest.raises(type(error)):
                    manager.save(step, args=args)
                assert manager.is_saving_in_progress(), "it was not begun for nothing"
                go_on.set()
                assert not manager.save(step, args=args)  # it is there
            else:
                assert manager.save(step, args=args)
        manager.wait_until_finished()
        assert sorted(manager.all_steps(read=True)) == [0, 1, 2]
        for step in range(3):
            assert set(manager.restore(step, verify=True)["w"].tolist()) == {float(step)}
        assert [report.error for report in manager.reports] == [None] * 3
        assert manager._gockpt_session.host.used_bytes == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the user's")])
def test_what_orbax_has_begun_without_arrays_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """It has no report. It was on the disk, and under no label: nothing would have deleted it."""
    logger, go_on = Logger(), threading.Event()
    monkeypatch.setattr(
        ocp.JsonCheckpointHandler, "finalize", lambda *_: go_on.wait(60), raising=False
    )
    args = ocp.args.Composite(notes=ocp.args.JsonSave({"a": 1}))
    with gockpt.GoCkptManager(tmp_path, logger=logger) as manager:
        logger.error = error
        with pytest.raises(type(error)):
            manager.save(0, args=args)
        assert manager.is_saving_in_progress()
        go_on.set()
        manager.wait_until_finished()
        assert manager.all_steps() == [0]
        assert not manager.save(0, args=args)
        assert manager.save(1, args=args)
        manager.wait_until_finished()
        assert manager.all_steps(read=True) == [0, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the user's")])
@pytest.mark.parametrize("has_arrays", [True, False])
def test_what_orbax_has_written_at_once_is_complete_whatever_follows(
    tmp_path: Path, error: BaseException, has_arrays: bool
) -> None:
    """The report says so, too, where saves are synchronous. Without arrays there is none."""
    logger, args = Logger(), gockpt.GoCkptSave({"w": jnp.ones(4)})
    if not has_arrays:
        args = ocp.args.Composite(notes=ocp.args.JsonSave({"a": 1}))
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with gockpt.GoCkptManager(tmp_path, options=options, logger=logger) as manager:
        logger.error = error
        with pytest.raises(type(error)):
            manager.save(0, args=args)
        assert manager.save(1, args=args)
        assert manager.all_steps(read=True) == [0, 1]
        told = [(report.step, report.error) for report in manager.reports]
        assert told == ([(0, None), (1, None)] if has_arrays else [])


class Policy:
    """The user's own, which Orbax asks when its checkpointer has begun to write."""

    error: BaseException | None = None

    def should_preserve(self, infos: Sequence[Any], *, context: Any) -> list[bool]:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return [True] * len(infos)


# A tree is handed over to be written; a bare array begins to be written within `save`.
STATES: dict[str, Any] = {"a tree": {"w": jnp.ones(1000)}, "an array": jnp.ones(1000)}


def require_that_stock_stores(state: str, directory: Path) -> None:
    """A bare array is a leaf without a name, which older ones (Orbax 0.11.33) miss."""
    leaves = {"": jnp.ones(2)} if state == "an array" else {"w": jnp.ones(2)}
    try:
        with ocp.StandardCheckpointer() as stock:
            stock.save(directory / "stocks", leaves)
    except ValueError:
        pytest.skip("this Orbax misses a leaf without a name")


@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
@pytest.mark.parametrize("state", STATES)
def test_the_next_save_does_not_hear_of_one_that_the_users_policy_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, on_save_error: Any
) -> None:
    require_that_stock_stores(state, tmp_path)
    tmp_path = tmp_path / "run"
    policy, go_on = Policy(), threading.Event()
    wait, check = of_orbax.wait_for_writes, leaf_writer._check_data
    monkeypatch.setattr(of_orbax, "wait_for_writes", lambda *a: go_on.set() or wait(*a))
    monkeypatch.setattr(leaf_writer, "_check_data", lambda *a: go_on.wait(60) and check(*a))
    options = ocp.CheckpointManagerOptions(preservation_policy=policy)
    window = gockpt.WindowOptions(on_save_error=on_save_error)
    args = gockpt.GoCkptSave(STATES[state])
    with gockpt.GoCkptManager(tmp_path, options=options, window=window) as manager:
        policy.error = KeyError("the user's")
        with pytest.raises(KeyError, match="the user's"):
            manager.save(0, args=args)
        assert go_on.is_set(), "nobody has waited for what Orbax writes"
        assert (manager.all_steps(), manager.all_steps(read=True)) == ([], [])
        assert manager.save(1, args=args)
        assert_equal(manager.restore(1, verify=True), STATES[state])
        go_on.clear()
        policy.error = KeyError("the user's")
        with pytest.raises(KeyError, match="the user's"):
            manager.save(2, args=args)
        assert_equal(manager.restore(1), STATES[state])  # nor do restores
        assert manager.save(2, args=args)
        manager.wait_until_finished()
        assert manager.all_steps(read=True) == [1, 2]
        errors = [(report.step, report.error is None) for report in manager.reports]
        assert errors == [(0, False), (1, True), (2, False), (2, True)]
        assert manager._gockpt_session.host.used_bytes == 0


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_what_the_users_policy_has_stopped_never_begins_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrapped: bool
) -> None:
    """However fast it would be: the checkpoint of a save that has failed would be there."""
    monkeypatch.setattr(hand_over, "_HELD_SECS", 60)
    policy, begin, began = Policy(), StateHandler._begin_writing, []
    monkeypatch.setattr(
        StateHandler, "_begin_writing", lambda *args: began.append(args[1]) or begin(*args)
    )
    options = ocp.CheckpointManagerOptions(preservation_policy=policy)
    with gockpt.GoCkptManager(tmp_path, options=options) as manager:
        asked, gates = policy.should_preserve, manager._gockpt_handler.begun

        def asked_meanwhile(infos: Sequence[Any], *, context: Any) -> list[bool]:
            assert not gates.may_be_written.wait(0.0)
            return asked(infos, context=context)

        monkeypatch.setattr(policy, "should_preserve", asked_meanwhile)
        state = {"w": jnp.ones(3)}
        if is_wrapped:
            state = manager.wrap(jax.jit(lambda state: {"w": state["w"] + 1}))(state)
        for step in range(3):
            policy.error = KeyError("the user's")
            with pytest.raises(KeyError, match="the user's"):
                manager.save(step, args=gockpt.GoCkptSave(state))
            # A thread that passes an open gate shuts it for a moment.
            assert gates.may_be_written.wait(1.0)
        assert began == []
        assert manager.save(3, args=gockpt.GoCkptSave(state))
        assert gates.may_be_written.wait(1.0) is not is_wrapped
    assert len(began) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["3"]


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "stock's"])
def test_what_is_complete_when_the_users_policy_raises_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """Orbax asks behind its checkpointer, which may have renamed by then: `save` raises anyhow."""
    monkeypatch.setattr(hand_over, "_HELD_SECS", 0)
    policy, state = Policy(), {"w": jnp.arange(1000)}
    asked = policy.should_preserve

    def asked_late(infos: Sequence[Any], *, context: Any) -> list[bool]:
        for commit in [t for t in threading.enumerate() if t.name == "async_save"]:
            commit.join()
        return asked(infos, context=context)

    monkeypatch.setattr(policy, "should_preserve", asked_late)
    options = ocp.CheckpointManagerOptions(preservation_policy=policy)
    kind = gockpt.GoCkptManager if is_ours else ocp.CheckpointManager
    with kind(tmp_path, options=options) as manager:
        policy.error = KeyError("the user's")
        with pytest.raises(KeyError, match="the user's"):
            manager.save(0, args=ocp.args.StandardSave(state))
        assert manager.all_steps() == [0]
        assert not manager.save(0, args=ocp.args.StandardSave(state))
        assert_equal(manager.restore(0), state)
        assert manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        manager.reload()
        assert manager.all_steps() == [0, 1]


def test_the_next_save_does_not_hear_of_an_interrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not handed over stops; nobody waits for that before the next save."""
    require_that_stock_stores("an array", tmp_path)
    tmp_path = tmp_path / "run"
    policy, go_on = Policy(), threading.Event()
    wait, check = of_orbax.wait_for_writes, leaf_writer._check_data
    monkeypatch.setattr(of_orbax, "wait_for_writes", lambda *a: go_on.set() or wait(*a))
    monkeypatch.setattr(leaf_writer, "_check_data", lambda *a: go_on.wait(60) and check(*a))
    options = ocp.CheckpointManagerOptions(preservation_policy=policy)
    args = gockpt.GoCkptSave(STATES["an array"])
    with gockpt.GoCkptManager(tmp_path, options=options) as manager:
        policy.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            manager.save(0, args=args)
        assert not go_on.is_set()
        assert manager.save(1, args=args)
        manager.wait_until_finished()
        assert manager.all_steps(read=True) == [1]


@pytest.mark.parametrize(
    ("owner", "name"), [(LeftBehind, "leave_directory"), (left_module, "wait_elsewhere")]
)
def test_an_interrupt_as_a_stopped_save_is_given_up_leaves_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Whatever of giving it up is left out, the next save does not hear of it."""
    policy, once = Policy(), Once(monkeypatch, owner, name)
    options = ocp.CheckpointManagerOptions(preservation_policy=policy)
    args = gockpt.GoCkptSave(STATES["a tree"])
    with gockpt.GoCkptManager(tmp_path, options=options) as manager:
        policy.error, once.armed = KeyError("the user's"), True
        with pytest.raises(KeyboardInterrupt):
            manager.save(0, args=args)
        assert manager.all_steps() == []
        assert manager.reports[0].error == 'KeyError: "the user\'s"'
        assert manager.save(1, args=args)
        manager.wait_until_finished()
        assert manager.all_steps(read=True) == [1]


def test_what_a_save_has_left_does_not_write_into_the_next_of_its_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted behind the hand-over, and before the commit: a thread of Orbax's still writes."""
    real, waited, check = Composite.async_save, BegunItem.wait, leaf_writer._check_data
    armed, go_on = [True], threading.Event()

    async def interrupted(*args: Any, **kwargs: Any) -> Any:
        futures = await real(*args, **kwargs)
        if armed and armed.pop():
            raise KeyboardInterrupt
        return futures

    def wait(left: BegunItem, secs: float | None) -> None:
        go_on.set()
        waited(left, secs)

    monkeypatch.setattr(Composite, "async_save", interrupted)
    monkeypatch.setattr(BegunItem, "wait", wait)
    monkeypatch.setattr(leaf_writer, "_check_data", lambda *a: go_on.wait(60) and check(*a))
    with gockpt.GoCkptManager(tmp_path) as manager:
        old, new = ({"w": jnp.full(1000, n, jnp.float32)} for n in (1, 2))
        with pytest.raises(KeyboardInterrupt):
            manager.save(0, args=gockpt.GoCkptSave(old))
        assert not go_on.is_set()
        begin = manager._gockpt_handler.take
        monkeypatch.setattr(
            manager._gockpt_handler, "take", lambda *a: go_on.is_set() and begin(*a)
        )
        assert manager.save(0, args=gockpt.GoCkptSave(new))
        found = manager.restore(0, verify=True)
        np.testing.assert_array_equal(found["w"], new["w"])
        assert manager._gockpt_session.host.used_bytes == 0


@pytest.mark.parametrize(("owner", "name"), [(leaf_writer, "_check_data"), (Composite, "finalize")])
def test_a_save_waits_for_an_interrupted_one_also_where_that_wait_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Python (3.11, 3.12) takes a thread for ended whose `join` was: a torn one was listed."""
    real, go_on = getattr(owner, name), threading.Event()
    monkeypatch.setattr(owner, name, lambda *a: go_on.wait(60) and real(*a))
    held, ended_in_time = Composite.finalize, []
    monkeypatch.setattr(
        Composite, "finalize", lambda *a: held(*a) or ended_in_time.append(go_on.is_set())
    )
    once = Once(monkeypatch, ocp.AsyncCheckpointer, "save", behind=True)
    args = gockpt.GoCkptSave({"w": jnp.arange(1000)})
    with gockpt.GoCkptManager(tmp_path) as manager:
        once.armed = True
        with pytest.raises(KeyboardInterrupt):
            manager.save(0, args=args)
        (commit,) = [t for t in threading.enumerate() if t.name == "async_save"]
        hear_ctrl_c()
        for _ in range(3):  # in each of its waits
            when_the_main_thread_waits(send_ctrl_c)
            with pytest.raises(KeyboardInterrupt):
                manager.save(0, args=args)
        when_the_main_thread_waits(go_on.set)
        assert manager.save(0, args=args)
        assert commit not in threading.enumerate()
        manager.wait_until_finished()
        assert manager.all_steps(read=True) == [0]
        assert manager.restore(0, verify=True)["w"].tolist() == [*range(1000)]
    assert ended_in_time == [True, True]
    assert [report.error is None for report in manager.reports] == [False, True]
    assert manager._gockpt_session.host.used_bytes == 0


def test_orbax_is_not_closed_before_what_a_save_has_left_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread would write into a checkpoint that nobody has an eye on any more."""
    real, waited, check = Composite.async_save, BegunItem.wait, leaf_writer._check_data
    close, go_on, ended = ocp.CheckpointManager.close, threading.Event(), []

    async def interrupted(*args: Any, **kwargs: Any) -> Any:
        await real(*args, **kwargs)
        raise KeyboardInterrupt

    def wait(left: BegunItem, secs: float | None) -> None:
        go_on.set()
        waited(left, secs)
        ended.append("what was left")

    def closes(manager: ocp.CheckpointManager) -> None:
        go_on.set()
        ended.append("Orbax")
        close(manager)

    monkeypatch.setattr(Composite, "async_save", interrupted)
    monkeypatch.setattr(BegunItem, "wait", wait)
    monkeypatch.setattr(leaf_writer, "_check_data", lambda *a: go_on.wait(60) and check(*a))
    monkeypatch.setattr(ocp.CheckpointManager, "close", closes)
    with gockpt.GoCkptManager(tmp_path) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.save(0, args=gockpt.GoCkptSave({"w": jnp.ones(1000)}))
        assert not go_on.is_set()
    assert ended == ["what was left", "Orbax"]
    assert manager._gockpt_session.host.used_bytes == 0


def makers_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: Once, go_on: threading.Event
) -> list[int]:
    """Interrupts a save, and saves its label again: both make a directory of the same name.

    Args:
      tmp_path: Of the manager.
      monkeypatch: Of the test.
      once: Where it is interrupted.
      go_on: Lets the first go on with its directory; set as the next save waits for that, and if it
        does not wait, as it makes its own.

    Returns:
      Of each thread in turn, how often it has begun or ended to make one.
    """
    path = ocp.path.atomicity.AtomicRenameTemporaryPath
    create, made_by = path.create, list[threading.Thread]()

    async def creates(tmp: Any, *args: Any, **kwargs: Any) -> Any:
        if tmp.get().parent.name != tmp_path.name:  # an item's
            return await create(tmp, *args, **kwargs)
        made_by.append(threading.current_thread())
        if made_by[0] is not made_by[-1]:
            go_on.set()
        assert go_on.wait(60)
        made = await create(tmp, *args, **kwargs)
        made_by.append(threading.current_thread())
        return made

    monkeypatch.setattr(path, "create", creates)
    with gockpt.GoCkptManager(tmp_path) as manager:
        once.armed = True
        args = gockpt.GoCkptSave({"w": jnp.ones(3)})
        with pytest.raises(KeyboardInterrupt):
            manager.save(0, args=args)
        assert manager.save(0, args=args)
        assert manager.restore(0, verify=True)["w"].tolist() == [1.0] * 3
    return [len([*made]) for _, made in itertools.groupby(made_by)]


@pytest.mark.parametrize(
    ("place", "name"), [(Seal, "take"), (BegunSave, "enter")], ids=["taken", "not yet known"]
)
def test_the_next_save_does_not_come_before_an_interrupted_ones_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    """Orbax makes it on a thread of its own: there it would take the place of the next one's."""
    wait, go_on = LeftBehind.wait, threading.Event()

    def waits(left: LeftBehind, label: int | None = None) -> None:
        if left._left:
            go_on.set()
        wait(left, label)

    once = Once(monkeypatch, place, name)
    monkeypatch.setattr(LeftBehind, "wait", waits)
    assert makers_in_turn(tmp_path, monkeypatch, once, go_on) == [2, 2]


def test_a_directory_that_orbax_has_told_nobody_of_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread had been started: it would have removed what the next save had made there."""
    elsewhere, go_on = left_module.wait_elsewhere, threading.Event()

    def waits(wait: Any) -> None:
        if isinstance(getattr(wait.func, "__self__", None), threading.Thread):
            go_on.set()  # it may not have come to its directory yet
        elsewhere(wait)

    once = Once(monkeypatch, AwaitableSignalsContract, "add_to_awaitable_signals_contract")
    monkeypatch.setattr(left_module, "wait_elsewhere", waits)
    assert makers_in_turn(tmp_path, monkeypatch, once, go_on) == [2, 2]


def test_an_interrupted_wait_leaves_the_save_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes were given back while it was being written, and it was told to have failed."""
    finalize, go_on = Composite.finalize, threading.Event()
    with Trainer(tmp_path, max_to_keep=2) as trainer:
        trainer.run_undisturbed(3)
        monkeypatch.setattr(Composite, "finalize", lambda *a: go_on.wait(60) and finalize(*a))
        trainer.run(4)
        (commit,) = [t for t in threading.enumerate() if t.name == "save_finalize"]

        def interrupted(*_: Any) -> None:
            commit.join = real  # type: ignore[method-assign]
            raise KeyboardInterrupt

        for wait in (trainer.manager.wait_until_finished, lambda: trainer.save(force=True)):
            real, commit.join = commit.join, interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                wait()
        assert trainer.manager.is_saving_in_progress()
        assert [report.step for report in trainer.manager.reports] == [0]
        go_on.set()
        trainer.run_past_next_window()
        for deleted in (0, 4):  # as ever: the saves are 0, 4, 8 and 12
            del trainer.given[deleted]
        trainer.assert_intact()
        assert [r.error for r in trainer.manager.reports] == [None] * 4
        trainer.settle()
        assert trainer.bytes_in_flight() == (0, 0)


def test_an_interrupted_wait_for_no_save_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(manager: ocp.CheckpointManager) -> None:
        raise KeyboardInterrupt

    with gockpt.GoCkptManager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(ocp.CheckpointManager, "wait_until_finished", interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.wait_until_finished()
        manager.wait_until_finished()


def test_a_wait_that_ctrl_c_has_ended_waits_when_it_is_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python (3.11, 3.12) takes Orbax's thread for ended then: the save was told to be there."""
    go_on, check = threading.Event(), leaf_writer._check_data
    monkeypatch.setattr(leaf_writer, "_check_data", lambda *a: go_on.wait(60) and check(*a))
    with gockpt.GoCkptManager(tmp_path) as manager:
        assert manager.save(0, args=gockpt.GoCkptSave({"w": jnp.ones(3)}))
        hear_ctrl_c()
        when_the_main_thread_waits(send_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            manager.wait_until_finished()
        assert manager.is_saving_in_progress()
        when_the_main_thread_waits(go_on.set)
        manager.wait_until_finished()
        assert manager.all_steps(read=True) == [0]
        assert manager.restore(0)["w"].tolist() == [1.0] * 3
        assert not manager.is_saving_in_progress()


_WAITS_AND_DIES = """
import sys, threading
import jax.numpy as jnp
import gockpt_jax as gockpt
from gockpt_jax.storage.writing import leaf_writer
from signals import hear_ctrl_c, send_ctrl_c, when_the_main_thread_waits
interrupted, check = threading.Event(), leaf_writer._check_data
leaf_writer._check_data = lambda *a: interrupted.wait(60) and check(*a)
def ctrl_c():
    send_ctrl_c()
    when_the_main_thread_waits(interrupted.set)
manager = gockpt.GoCkptManager(sys.argv[1])
manager.save(0, args=gockpt.GoCkptSave({"w": jnp.ones(3)}))
hear_ctrl_c()
when_the_main_thread_waits(ctrl_c)
manager.wait_until_finished()
"""


@pytest.mark.skipif(ENDS_WITHOUT_THREADS, reason="nothing is saved at the end of a script")
def test_a_script_that_ctrl_c_ends_as_it_waits_has_its_save(tmp_path: Path) -> None:
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    script = [sys.executable, "-c", _WAITS_AND_DIES, str(tmp_path)]
    ended = subprocess.run(script, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "KeyboardInterrupt" in ended.stderr
    with gockpt.GoCkptManager(tmp_path) as manager:
        assert manager.all_steps() == [0], ended.stderr


def test_an_interrupted_save_does_not_touch_the_one_of_its_label_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, check = threading.Event(), leaf_writer._check_data
    monkeypatch.setattr(leaf_writer, "_check_data", lambda *a: go_on.wait(60) and check(*a))
    once = Once(monkeypatch, ocp.CheckpointManager, "_maybe_await_cleanup_tmp_directory")
    with gockpt.GoCkptManager(tmp_path) as manager:
        assert manager.save(4, args=gockpt.GoCkptSave({"w": jnp.ones(3)}))
        once.armed = True
        with pytest.raises(KeyboardInterrupt):
            manager.save(4, args=gockpt.GoCkptSave({"w": jnp.zeros(3)}), force=True)
        go_on.set()
        manager.wait_until_finished()
        assert manager.all_steps() == [4]
        assert manager.restore(4)["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize("in_anyones_place", [False, True])
def test_a_save_that_is_to_wait_is_interrupted_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_anyones_place: bool
) -> None:
    """With `on_busy="newest"`: in the room where it waits, in an older one's place or alone."""
    go_on, check = threading.Event(), leaf_writer._check_data
    monkeypatch.setattr(leaf_writer, "_check_data", lambda *a: go_on.wait(60) and check(*a))

    def save(manager: gockpt.GoCkptManager, step: int) -> bool:
        return manager.save(step, args=gockpt.GoCkptSave({"w": jnp.full(3, step)}))

    window = gockpt.WindowOptions(on_busy="newest")
    with gockpt.GoCkptManager(tmp_path, window=window) as manager:
        for place in itertools.count(1):
            signals = Signals([place], inside=(waiting.__file__,))
            go_on.clear()
            first = 3 * place
            assert save(manager, first)
            accepted = [first]
            if in_anyones_place and save(manager, first + 1):
                accepted.append(first + 1)
            with contextlib.suppress(KeyboardInterrupt), signals.coming():
                if save(manager, first + 2):
                    accepted.append(first + 2)
            go_on.set()
            manager.wait_until_finished()
            manager._gockpt_session.resources.worker.wait_until_idle()
            assert manager._gockpt_session.host.used_bytes == 0, signals.came_at
            kinds = {r.step: r.kind for r in manager.reports}
            there = {n for n in accepted if kinds[n] != "superseded"}
            assert there <= {*manager.all_steps(read=True)}, signals.came_at
            if not signals.came_at:
                break
    assert place > 10


BEHIND_THE_DISPATCH = {
    "the update is counted": (Session, "after_update", False),
    "its cut is sent": (OpenWindow, "_land", False),
    "its cut has followed": (Session, "after_update", True),
}


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("place", BEHIND_THE_DISPATCH)
def test_a_step_interrupted_behind_its_dispatch_is_the_end_of_its_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, place: str
) -> None:
    """The loop goes on from the state before it, of which a block has left already."""
    owner, name, behind = BEHIND_THE_DISPATCH[place]
    once, armed = Once(monkeypatch, owner, name, behind=behind), []
    after_update = Session.after_update

    def counted(session: Session, step: Any, result: Any) -> None:
        armed.extend([result] * (result is not None))
        once.armed = len(armed) == at and result is not None
        after_update(session, step, result)

    monkeypatch.setattr(Session, "after_update", counted)
    options = ocp.CheckpointManagerOptions(save_interval_steps=4)
    window = gockpt.WindowOptions(steps=3)
    given, interrupts = {}, 0
    with gockpt.GoCkptManager(tmp_path, options=options, window=window) as manager:
        step = manager.wrap(
            jax.jit(lambda s: {k: 0.5 * s[k] + jnp.sin(s[other]) for k, other in ("ab", "ba")})
        )
        state = {"a": jnp.arange(4096.0), "b": jnp.arange(4096.0)}
        for label in range(17):
            try:
                state = step(state)
            except KeyboardInterrupt:
                state, interrupts = step(state), interrupts + 1
            if manager.save(label, args=gockpt.GoCkptSave(state)):
                given[label] = jax.tree.map(np.array, state)
        manager.wait_until_finished()
        assert interrupts == 1
        for label, saved in given.items():
            jax.tree.map(np.testing.assert_array_equal, dict(manager.restore(label)), saved)
        report = manager.reports[-1]
        assert (report.kind, report.gradient_bytes > 0) == ("window", True)
        assert manager._gockpt_session.resources.device.used_bytes == 0


BEFORE_THE_DISPATCH = {
    "a block leaves": (OpenWindow, "leave", True),
    "there is room": (OpenWindow, "make_room", True),
}


def assert_holds_nothing(trainer: Trainer) -> None:
    trainer.settle()
    trainer.manager._gockpt_session.resources.watcher.wait_until_idle()
    assert (trainer.manager.window_status, *trainer.bytes_in_flight()) == ("idle", 0, 0)


@pytest.mark.parametrize("place", [*BEFORE_THE_DISPATCH, *BEHIND_THE_DISPATCH])
def test_a_loop_whose_step_was_interrupted_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """To a checkpoint, without another step: what the armed one was to take was never given back.

    What is interrupted before its dispatch has the state still, and holds nothing at once.
    """
    owner, name, behind = (BEFORE_THE_DISPATCH | BEHIND_THE_DISPATCH)[place]
    once = Once(monkeypatch, owner, name, behind=behind)
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        once.armed = True
        with pytest.raises(KeyboardInterrupt):
            trainer.update()
        if place in BEFORE_THE_DISPATCH:
            assert_holds_nothing(trainer)
        restore = gockpt.GoCkptRestore(trainer.target)
        trainer.state, trainer.label = trainer.manager.restore(4, args=restore), 5
        assert_holds_nothing(trainer)
        trainer.run_past_next_window()
        trainer.assert_intact()
