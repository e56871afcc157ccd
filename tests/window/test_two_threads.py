"""Other threads than the trainer's call wrapped steps: each update belongs to one thread.

An evaluation calls what the trainer trains with, on a state of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from window.training_loop import BATCH, SIZE, WAIT_SECS, Loop, assert_same, fresh, to_host, update

from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.training.last_result import LastResult


def evaluate_in(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, label: int, evaluate: Callable[[], None]
) -> list[str]:
    """Has another thread evaluate in the middle of an armed step, before it is dispatched.

    Returns:
      What has happened, when it has.
    """
    trainer, real, happened = threading.current_thread(), loop.session.before_update, []

    def before_update(*args):
        call = real(*args)
        if threading.current_thread() is trainer and loop.label == label and call is not None:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(evaluate).result(WAIT_SECS)
            happened.append("evaluated")
        return call

    monkeypatch.setattr(loop.session, "before_update", before_update)
    return happened


def evaluate_beside(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, label: int, evaluate: Callable[[], None]
) -> list[Future[None]]:
    """Likewise, but that one's step goes on until the trainer's has come to its end."""
    trainer = threading.current_thread()
    happened: list[Future[None]] = []
    threads: list[ThreadPoolExecutor] = []
    before, after = loop.session.before_update, loop.session.after_update
    has_begun, may_end = threading.Event(), threading.Event()

    def before_update(*args):
        call = before(*args)
        if threading.current_thread() is not trainer:
            has_begun.set()
            assert may_end.wait(WAIT_SECS)
        elif loop.label == label and call is not None:
            threads.append(ThreadPoolExecutor(1))
            happened.append(threads[0].submit(evaluate))
            assert has_begun.wait(WAIT_SECS)
        return call

    def after_update(*args):
        after(*args)
        if threading.current_thread() is trainer and threads:
            may_end.set()
            threads.pop().shutdown()

    monkeypatch.setattr(loop.session, "before_update", before_update)
    monkeypatch.setattr(loop.session, "after_update", after_update)
    return happened


@pytest.mark.parametrize("evaluating", [evaluate_in, evaluate_beside])
def test_what_follows_is_of_the_update_that_left(tmp_path, monkeypatch, evaluating):
    """The evaluation's opens a window anew; the trainer's cut is of another update than that."""
    loop = Loop(tmp_path, window={"steps": 4, "audit": None}, save_interval_steps=6)
    other = {"opt": fresh()["opt"], "params": {"w": jnp.zeros(SIZE)}}
    happened = evaluating(loop, monkeypatch, 10, lambda: loop.step(other, BATCH))
    with loop.manager as manager:
        loop.train(8)
        manager.wait_until_finished()  # the host has room for the window of 12
        loop.train(10)  # its first step
        loop.update()
        # It was counted, so this is the version at which the window was to end.
        assert manager.save(11, args=GoCkptSave(loop.state), force=True)
        loop.given[11] = to_host(loop.state)
        manager.wait_until_finished()
        assert happened
        loop.assert_saved(0, 6, 11)


def test_the_call_keeps_its_program(tmp_path, monkeypatch):
    """The evaluation's state lies elsewhere, and JAX has dropped the trace: there is none then."""
    own = jax.jit(lambda state, batch: update(state, batch))  # no other test keeps its trace
    loop = Loop(tmp_path, window={"steps": 3}, step=own)
    device = jax.devices()[0]

    def evaluate():
        jax.clear_caches()
        loop.step(jax.device_put(fresh(), device), BATCH)
        assert loop.step.program is None

    happened = evaluate_in(loop, monkeypatch, 7, evaluate)
    with loop.manager as manager:
        loop.train(5)
        manager.wait_until_finished()  # the host has room for the window of 8
        loop.train(12)
        manager.wait_until_finished()
        assert happened
        loop.assert_saved(0, 4, 8, 12)
    state = fresh()
    for _ in range(13):
        state = update(state, BATCH)
    assert_same(to_host(loop.state), to_host(state))


@pytest.mark.parametrize("arm", ["window", "always"])
def test_what_another_thread_could_not_trace_says_nothing_of_this_call(tmp_path, monkeypatch, arm):
    """The step was given up for good, with a warning of the other thread's error."""
    own = jax.jit(lambda state, batch: update(state, batch))  # no other test keeps its trace
    loop = Loop(tmp_path, window={"steps": 3, "arm": arm}, step=own)
    trainer, real, told = threading.current_thread(), loop.session.before_update, []
    other = {"opt": fresh()["opt"], "params": {"w": jnp.zeros(SIZE + 1)}}

    def evaluate():
        if arm == "always":  # what this one's call has had traced has been armed by now
            loop.step.program = None
        with pytest.raises(TypeError, match="incompatible shapes"):
            loop.step(other, BATCH)

    def before_update(*args):
        if threading.current_thread() is trainer and loop.label == 1:
            with ThreadPoolExecutor(1) as thread:
                told.append(thread.submit(evaluate).result(WAIT_SECS))
        return real(*args)

    monkeypatch.setattr(loop.session, "before_update", before_update)
    with loop.manager as manager:
        loop.train(9)
        manager.wait_until_finished()
        assert told == [None]
        assert loop.step.why_not is None
        assert loop.step.program is not None
        loop.assert_saved(0, 4, 8)


def with_gradients(state, batch):
    """Of two parts that are like the state the second one is it."""
    grads = jax.tree.map(lambda w: jnp.sin(w + batch), state)
    return {"grads": grads, "state": jax.tree.map(lambda w, g: w - 0.125 * g, state, grads)}


@pytest.mark.parametrize("is_beside", [True, False])
def test_the_state_is_looked_for_in_the_next_call_where_another_came_between(tmp_path, is_beside):
    """The gradients were taken for it, for good: windows opened, and no save had use for one."""
    state, other = {"w": jnp.ones(SIZE)}, {"w": jnp.zeros(SIZE)}
    with GoCkptManager(tmp_path, window=WindowOptions(steps=2)) as manager:
        step, given = manager.wrap(jax.jit(with_gradients)), {}
        for label in range(12):
            if is_beside and label == 1:
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(step, other, BATCH).result(WAIT_SECS)
            state = step(state, BATCH)["state"]
            if label % 4 == 3:
                assert manager.save(label, args=GoCkptSave(state))
                manager.wait_until_finished()
                given[label] = state
        assert [report.kind for report in manager.reports][-1] == "window"
        for label, saved in given.items():
            assert_same(manager.restore(label), saved)


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_state_that_is_never_what_a_call_has_returned_is_looked_for_a_while(tmp_path, is_copied):
    state = {"w": jnp.ones(SIZE)}
    with GoCkptManager(tmp_path) as manager:
        step = manager.wrap(jax.jit(with_gradients))
        for _ in range(6):
            state = step(state, BATCH)["state"]
            state = jax.tree.map(jnp.array, state) if is_copied else state
        assert step.program is not None


def test_the_leaves_of_a_result_are_those_of_one_call():
    """Another thread's result comes where it has been seen that there are leaves."""

    class Shared(LastResult):
        left = 1_000

        def __getattribute__(self, name):
            Shared.left -= 1
            if Shared.left == 0:
                self.keep({"loss": 0.5}, None, is_to_be_traced=False)
            return super().__getattribute__(name)

    for place in range(1, 9):
        last = Shared()
        last.keep({"w": 1.0}, None, is_to_be_traced=True)
        Shared.left = place
        assert last.leaves in ([1.0], [0.5]), place


@pytest.mark.parametrize("on_busy", ["wait", "skip", "newest"])
def test_in_a_running_event_loop(tmp_path, on_busy):
    """As notebooks have one: Orbax has the state taken on another thread, and `save` waits."""
    ended = []

    async def notebook():
        loop = Loop(tmp_path, window={"steps": 3, "on_busy": on_busy})
        with loop.manager as manager:
            while loop.label <= 12:
                loop.train(loop.label)
                manager.wait_until_finished()
            loop.assert_saved(0, 4, 8, 12)
            assert list(loop.kinds.values()) == ["snapshot", "window", "window", "window"]
        ended.append("well")

    # A daemon: a test that fails here waits for ever.
    thread = threading.Thread(target=lambda: asyncio.run(notebook()), daemon=True)
    thread.start()
    thread.join(WAIT_SECS)
    assert ended


def test_what_comes_between_steps_keeps_no_thread_from_saving(tmp_path, monkeypatch):
    """It may wait for one that begins a save, and which needs the session's lock for that."""
    loop = Loop(tmp_path, window={"steps": 3})
    real, saved = loop.session.between_steps, []

    def between_steps() -> None:
        real()
        if loop.label == 6 and not saved:
            state = loop.state
            with ThreadPoolExecutor(1) as thread:
                saving = thread.submit(
                    loop.manager.save, 5, args=GoCkptSave(loop.state), force=True
                )
                saved.append(saving.result(WAIT_SECS))
            loop.given[5] = to_host(state)

    monkeypatch.setattr(loop.session, "between_steps", between_steps)
    with loop.manager:
        loop.train(12)
        loop.manager.wait_until_finished()
        assert saved == [True]
        loop.assert_saved(0, 4, 5, 8, 12)


def test_no_save_comes_behind_a_close_that_it_has_waited_for(tmp_path, monkeypatch):
    """It was accepted, and lost: Orbax has no threads any more by then."""
    manager = GoCkptManager(tmp_path)
    calls = manager._gockpt_saves.calls
    real, may_go_on = calls.refuse_waiting, threading.Event()

    def refuse_waiting():  # what a call looks at last before it waits for another thread's
        real()
        if threading.current_thread() is not threading.main_thread():
            assert may_go_on.wait(WAIT_SECS)

    monkeypatch.setattr(calls, "refuse_waiting", refuse_waiting)
    has_come = threading.Event()
    monkeypatch.setattr(calls, "refuse_inside", lambda subject: has_come.set())
    with ThreadPoolExecutor(1) as thread:
        save = thread.submit(manager.save, 0, args=GoCkptSave({"w": jnp.ones(3)}))
        assert has_come.wait(WAIT_SECS)
        manager.close()
        may_go_on.set()
        with pytest.raises(RuntimeError, match=r"^save of step \d+: the manager is closed"):
            save.result(WAIT_SECS)
    assert manager.all_steps() == []


def test_whoever_waits_for_saves_does_not_wait_for_a_step(tmp_path):
    """Which may be long, where it waits for the armed step to be compiled."""
    with (
        GoCkptManager(tmp_path) as manager,
        ThreadPoolExecutor(1) as thread,
        manager._gockpt_session.lock,  # as what a step does before its update holds it
    ):
        thread.submit(manager.wait_until_finished).result(WAIT_SECS)
