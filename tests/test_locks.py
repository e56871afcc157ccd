"""The gate: everybody gets through once it is open, whatever has interrupted who opened it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

from signals import Signals

from gockpt_jax import locks
from gockpt_jax.locks import Gate

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
    assert gate.is_open
    assert gate.wait(0.0)
    assert gate.is_open


def test_one_that_is_shut_is_not_waited_for_any_longer():
    gate = Gate()
    assert not gate.wait(0.001)
    assert not gate.is_open


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
