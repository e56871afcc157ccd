"""A value that comes later: everybody who asked is called, once, whoever was first."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gockpt_jax.promise import Promise


def test_who_asked_is_called_in_order_and_who_asks_later_at_once():
    promise, called = Promise(), []
    for name in "ab":
        promise.add_done_callback(lambda done, name=name: called.append((name, done.result())))
    assert not promise.done()
    assert called == []
    promise.set_result(6)
    assert called == [("a", 6), ("b", 6)]
    promise.add_done_callback(lambda done: called.append(("c", done.result())))
    assert called[2:] == [("c", 6)]
    assert promise.exception() is None


def test_what_went_wrong_is_raised_and_told():
    promise, called, error = Promise(), [], OSError("full")
    promise.add_done_callback(lambda done: called.append(done.exception()))
    promise.set_exception(error)
    assert called == [error]
    with pytest.raises(OSError, match="full"):
        promise.result()


def test_it_is_kept_once_and_asked_when_it_has_come():
    promise = Promise()
    for ask in (promise.result, promise.exception):
        with pytest.raises(AssertionError, match="nothing has come yet"):
            ask()
    promise.set_result(None)
    assert promise.result() is None
    for keep in (promise.set_result, promise.set_exception):
        with pytest.raises(AssertionError, match="kept already"):
            keep(OSError())


def test_a_callback_that_asks_again_is_called_again_only():
    promise, called = Promise(), []

    def ask_again(done):
        called.append("first")
        done.add_done_callback(lambda _: called.append("second"))

    promise.add_done_callback(ask_again)
    promise.set_result(1)
    assert called == ["first", "second"]


def test_each_is_called_once_though_threads_ask_as_it_comes():
    with ThreadPoolExecutor(4) as pool:
        for _ in range(300):
            promise, together, called = Promise(), threading.Barrier(4), []

            def ask(name, promise=promise, together=together, called=called):
                together.wait()
                if name:
                    for n in range(5):
                        promise.add_done_callback(lambda _, which=(name, n): called.append(which))
                else:
                    promise.set_result(1)

            list(pool.map(ask, range(4)))
            assert sorted(called) == [(name, n) for name in (1, 2, 3) for n in range(5)]


def test_whoever_asks_just_as_it_comes_is_called():
    """As the threads above may, once in a long time: a save would wait for ever."""
    promise, called = Promise(), []

    class Meanwhile(list):
        def append(self, call):
            promise.set_result(6)
            super().append(call)

    promise._callbacks = Meanwhile()
    promise.add_done_callback(lambda done: called.append(done.result()))
    assert called == [6]


@pytest.mark.usefixtures("its_own_garbage")
def test_it_is_two_objects_for_the_garbage_collector():
    gc.collect()
    before = len(gc.get_objects())
    kept = [Promise() for _ in range(1000)]
    assert len(gc.get_objects()) - before <= 2 * len(kept) + 50
