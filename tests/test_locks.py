"""The gate: everybody gets through once it is open, whatever has interrupted who opened it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from signals import Signals, hear_ctrl_c, send_ctrl_c, when_the_main_thread_waits

from gockpt_jax import locks
from gockpt_jax.locks import (
    Gate,
    any_held,
    is_running,
    shared_lock,
    wait_elsewhere,
    wait_where_join_does_not,
)

WAIT_SECS = 60


def test_all_who_wait_get_through_and_who_comes_later():
    gate, there = Gate(), threading.Barrier(4)

    def wait():
        there.wait(WAIT_SECS)
        return gate.wait(WAIT_SECS)

    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(wait) for _ in range(3)]
        there.wait(WAIT_SECS)
        gate.open()
        assert [one.result(WAIT_SECS) for one in waiting] == [True] * 3
    gate.open()
    assert gate.wait(0.0)
    assert gate.wait(0.0)


def test_a_thread_whose_join_was_interrupted_runs_and_is_waited_for():
    """Python 3.11 and 3.12 say of it that it has ended."""
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, args=(WAIT_SECS,))
    thread.start()
    hear_ctrl_c()
    when_the_main_thread_waits(send_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        thread.join()
    assert is_running(thread)
    if thread.is_alive():  # later versions, or the signal came just before it waited
        go_on.set()
        thread.join()
    when_the_main_thread_waits(go_on.set)
    wait_where_join_does_not(thread)
    go_on.set()  # where it did not have to wait
    assert not is_running(thread)


def test_a_thread_that_python_takes_for_ended_is_looked_at_until_it_has(monkeypatch):
    looks = [True, True, True, False]
    monkeypatch.setattr(locks, "is_running", lambda thread: looks.pop(0))
    wait_where_join_does_not(threading.Thread())
    assert looks == []


def test_a_thread_that_an_interrupt_kept_from_starting_does_not_run(monkeypatch):
    """Python lists it for good: whoever counted on it would wait for ever."""
    thread = threading.Thread()
    monkeypatch.setitem(threading._limbo, thread, thread)
    assert thread in threading.enumerate()
    assert not is_running(thread)


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("error", [OSError("nobody's"), SystemExit("a handler's")])
def test_of_a_wait_elsewhere_only_interrupts_are_told(monkeypatch, here, error):
    """Where no thread can be had any more, too."""

    def refused(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def wait():
        waited.append(threading.current_thread() is threading.main_thread())
        raise error

    waited, stopped = [], isinstance(error, SystemExit)
    with monkeypatch.context() as patch:
        if here:
            patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(SystemExit) if stopped else contextlib.nullcontext():
            wait_elsewhere(wait)
    assert waited == [here]


def test_whether_this_thread_holds_any_lock_and_not_another():
    """Nor are those known any more that are gone: each manager makes some."""
    known = len(locks._made)
    first, second = shared_lock(), shared_lock()
    with ThreadPoolExecutor(1) as thread:
        for lock in (first, second):
            with lock:
                assert any_held()
                assert not thread.submit(any_held).result(WAIT_SECS)
            assert not any_held()
    del first, second, lock
    assert len(locks._made) == known


def test_one_that_is_shut_is_not_waited_for_any_longer():
    gate = Gate()
    assert not gate.wait(0.001)
    assert not gate.wait(0.0)


def test_whoever_opens_it_may_be_interrupted_anywhere():
    """An event would be locked for ever: the training step that opens it next would hang."""
    for place in itertools.count(1):
        gate, signals = Gate(), Signals([place], inside=(locks.__file__,))
        with contextlib.suppress(KeyboardInterrupt), signals.coming():
            gate.open()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(gate.open).result(WAIT_SECS)
            assert threads.submit(gate.wait, 0.0).result(WAIT_SECS), signals.came_at
        if not signals.came_at:
            break
    assert place > 3
