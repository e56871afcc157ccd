"""The worker thread: order, errors, and its end."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import subprocess
import sys
import threading
import time
import weakref

import pytest
from signals import Signals, interrupt

from gockpt_jax.window import worker as worker_module
from gockpt_jax.window.worker import Worker, in_any_case

WAIT_SECS = 60


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def pair():
    pair = Worker(behind=Worker("behind"))
    yield pair
    pair.close()


def threads():
    return [t for t in threading.enumerate() if t.name == "gockpt-worker"]


def test_tasks_run_in_order_on_one_thread(worker):
    ran = []
    for n in range(200):
        worker.submit(lambda n=n: ran.append((n, threading.current_thread())))
    worker.wait_until_idle()
    assert [n for n, _ in ran] == list(range(200))
    assert {t for _, t in ran} == set(threads())
    assert not threads()[0].daemon


def test_a_daemon_starts_no_daemon(worker):
    """One that is inside JAX when the interpreter ends would abort the process."""
    trainer = threading.Thread(target=worker.submit, args=(lambda: None,), daemon=True)
    trainer.start()
    trainer.join()
    assert [thread.daemon for thread in threads()] == [False]


def test_idle_means_that_the_last_task_has_ended(worker):
    started, go, ended = threading.Event(), threading.Event(), []
    worker.submit(lambda: (started.set(), go.wait(60), ended.append(True)))
    assert started.wait(60)
    threading.Timer(0.05, go.set).start()
    worker.wait_until_idle()
    assert ended == [True]


@pytest.mark.parametrize("error", [ValueError("lost"), SystemExit(1), KeyboardInterrupt()])
def test_survives_an_error_and_logs_it(worker, caplog, error):
    def fail():
        raise error

    ran, told = [], []
    with caplog.at_level(logging.ERROR, logger="gockpt_jax"):
        worker.submit(fail)
        worker.submit(fail, told.append)
        worker.submit(lambda: ran.append(True))
        worker.wait_until_idle()
    assert ran == [True]
    assert told == [error]
    assert [r.exc_info[1] for r in caplog.records] == [error]


class Lost(Exception):
    """Of a task."""


def fail():
    raise Lost


@contextlib.contextmanager
def cannot_be_entered():
    raise Lost
    yield


def test_whoever_waits_for_a_task_hears_what_went_wrong_with_it(pair, caplog):
    told = []
    pair.submit(fail, told.append)
    pair.submit_behind(fail, told.append)
    pair.submit(lambda: pair.pass_on(fail, told.append))
    pair.wait_until_idle()
    assert [type(error) for error in told] == [Lost] * 3
    assert caplog.records == []


@pytest.mark.parametrize("name", ["submit", "submit_behind"])
def test_a_task_that_was_never_run_has_failed(pair, monkeypatch, name):
    told = []
    monkeypatch.setattr(worker_module, "unwatched", cannot_be_entered)
    getattr(pair, name)(lambda: pytest.fail("it ran"), told.append)
    pair.wait_until_idle()
    assert [type(error) for error in told] == [Lost]


def test_a_task_that_could_not_be_passed_on_has_failed_on_its_own_thread(pair, monkeypatch):
    """In its turn: what it was to do is no matter of the thread before."""
    told, submit, refused = [], pair._behind.submit, []

    def refuse_once(*task):
        refused.append(task)
        fail() if len(refused) == 1 else submit(*task)

    monkeypatch.setattr(pair._behind, "submit", refuse_once)
    pair.submit_behind(
        lambda: pytest.fail("it ran"),
        lambda error: told.append((type(error), threading.current_thread().name)),
    )
    pair.wait_until_idle()
    assert told == [(Lost, "behind")]


def test_what_is_to_be_done_in_any_case_is_done_again(worker):
    ran = []
    worker.submit(*in_any_case(lambda: (ran.append(len(ran)), len(ran) > 1 or fail())))
    worker.wait_until_idle()
    assert ran == [0, 1]


@pytest.mark.parametrize("of_those", [Lost, SystemExit])
def test_the_thread_survives_those_who_hear_of_an_error(worker, caplog, of_those):
    def hear(error):
        raise of_those

    ran = []
    worker.submit(fail, hear)
    worker.submit(lambda: ran.append(True))
    worker.wait_until_idle()
    assert ran == [True]
    assert [type(r.exc_info[1]) for r in caplog.records] == [of_those]


def test_close_runs_what_is_left_and_ends_the_thread():
    worker, ran = Worker(), []
    for n in range(50):
        worker.submit(lambda n=n: ran.append(n))
    worker.close()
    assert ran == list(range(50))
    assert threads() == []
    worker.close()  # again, and without a thread


def test_used_after_close():
    worker, ran = Worker(), []
    for n in range(3):
        worker.submit(lambda n=n: ran.append(n))
        worker.close()
    assert ran == [0, 1, 2]
    assert threads() == []


def test_unused_worker_has_no_thread():
    worker = Worker()
    worker.wait_until_idle()
    worker.close()
    assert threads() == []


def test_tasks_are_dropped_once_run(worker, monkeypatch):
    """They hold chunks: before anybody hears that they have run."""

    class Chunk:
        pass

    notify, heard = worker._changed.notify_all, []
    monkeypatch.setattr(
        worker._changed, "notify_all", lambda: (heard.append(alive() is None), notify())
    )
    chunk = Chunk()
    alive = weakref.ref(chunk)
    worker.submit(lambda chunk=chunk: None)
    del chunk
    worker.wait_until_idle()
    assert heard == [False, True]


@pytest.mark.usefixtures("its_own_garbage")
def test_a_thread_without_tasks_ends_and_another_takes_the_next(monkeypatch):
    monkeypatch.setattr("gockpt_jax.window.worker._POLL_SECS", 0.01)
    monkeypatch.setattr("gockpt_jax.window.worker._IDLE_POLLS", 1)
    worker, threads = Worker(), []
    for _ in range(2):
        worker.submit(lambda: threads.append(threading.current_thread()))
        worker.wait_until_idle()
        threads[-1].join(60)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]
    alive = weakref.ref(worker)
    del worker
    gc.collect()
    assert alive() is None


def test_a_thread_that_waits_is_woken(worker, monkeypatch):
    """By each task, and by the end; not some polls later."""
    monkeypatch.setattr("gockpt_jax.window.worker._POLL_SECS", WAIT_SECS)
    for _ in range(50):
        ran = threading.Event()
        worker.submit(ran.set)
        assert ran.wait(WAIT_SECS / 2)
        worker.wait_until_idle()
    closer = threading.Thread(target=worker.close)
    closer.start()
    closer.join(WAIT_SECS / 2)
    assert not closer.is_alive()


def test_a_thread_whose_start_was_interrupted_is_not_relied_on(monkeypatch):
    """What it was to do is done by the next one, in order."""

    def interrupted(thread):
        raise KeyboardInterrupt

    worker, ran, both_ran = Worker(), [], threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.submit(lambda: ran.append(1))
    worker.submit(lambda: (ran.append(2), both_ran.set()))
    assert both_ran.wait(WAIT_SECS / 2)
    assert ran == [1, 2]
    worker.close()


def test_a_thread_that_was_started_though_it_was_interrupted_runs_no_task(monkeypatch):
    """Nobody knew, so another one runs them."""

    def interrupted(thread):
        lost.append(thread)
        raise KeyboardInterrupt

    worker, began, go_on, lost, ran = Worker(), threading.Event(), threading.Event(), [], []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.submit(lambda: (began.set(), go_on.wait(WAIT_SECS)))
    worker.submit(lambda: ran.append(threading.current_thread()))
    assert began.wait(WAIT_SECS / 2)
    lost[0].start()
    lost[0].join(WAIT_SECS / 2)
    assert ran == []
    go_on.set()
    worker.close()
    assert not {*ran} & {*lost}


def test_what_is_passed_on_runs_in_order_and_holds_nothing_up(pair):
    go, ran = threading.Event(), []
    for n in range(100):
        pair.submit(lambda n=n: pair.pass_on(lambda: (go.wait(60), ran.append(n))))
    pair.submit(go.set)  # behind all of them
    pair.submit_behind(lambda: ran.append(100))
    pair.wait_until_idle()
    assert ran == list(range(101))


def test_close_runs_what_was_passed_on_and_ends_both_threads():
    pair, ran = Worker(behind=Worker("behind")), []
    for _ in range(2):
        pair.submit_behind(lambda: ran.append(threading.current_thread()))
        pair.close()
    assert [t.name for t in ran] == ["behind", "behind"]
    assert not any(t.is_alive() for t in ran)
    assert threads() == []


def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_without_threads_to_be_had_the_caller_does_it(pair, monkeypatch):
    """While the interpreter ends, for one."""
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran = []
    pair.submit(lambda: pair.pass_on(lambda: ran.append(threading.current_thread())))
    pair.submit_behind(lambda: ran.append(threading.current_thread()))
    assert ran == [threading.current_thread()] * 2
    pair.submit(lambda: (pair.submit(lambda: ran.append("behind")), ran.append("before")))
    assert ran[2:] == ["before", "behind"]


SCRIPT = """
import threading
from gockpt_jax.window import worker as worker_module
from gockpt_jax.window.worker import Worker
worker_module._IDLE_POLLS = 10**9  # it does not end for want of tasks
worker = Worker(behind=Worker("behind"))
def pass_on():
    threading.main_thread().join()
    worker.pass_on(lambda: print("ran", flush=True))
worker.submit(pass_on)
{ending}
"""


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("raise ValueError('the loop')", 1)])
def test_a_forgotten_worker_ends_with_the_main_thread(ending, code):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(ending=ending)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    assert result.stdout == "ran\n"
    assert ("the loop" in result.stderr) == (code == 1)


def test_an_interrupt_anywhere_leaves_one_thread_that_runs_tasks(monkeypatch):
    """Two would replay updates in another order, or at once."""
    monkeypatch.setattr("gockpt_jax.window.worker._POLL_SECS", 0.01)
    monkeypatch.setattr("gockpt_jax.window.worker._IDLE_POLLS", 1)
    for place in itertools.count(1):
        worker, go_on, ran = Worker(f"interrupted at {place}"), threading.Event(), []

        def task(n, go_on=go_on, ran=ran):
            ran.append((n, threading.current_thread()))
            assert len(ran) > 1 or go_on.wait(WAIT_SECS)

        signals = Signals([place], inside=(worker_module.__file__,))
        for n in range(3):
            with contextlib.suppress(KeyboardInterrupt), signals.coming():
                worker.submit(functools.partial(task, n))
        worker.submit(functools.partial(task, 3))
        deadline = time.monotonic() + WAIT_SECS / 4
        while not ran:
            assert time.monotonic() < deadline, signals.came_at
        for thread in threading.enumerate():
            if thread.name == worker._name and thread is not ran[0][1]:
                with contextlib.suppress(RuntimeError):  # its start was interrupted
                    thread.join(WAIT_SECS)
        assert len(ran) == 1, signals.came_at
        go_on.set()
        worker.wait_until_idle()
        assert {thread for _, thread in ran} == {ran[0][1]}, signals.came_at
        order = [n for n, _ in ran]
        assert order == sorted(order), signals.came_at
        assert len(order) >= 3, signals.came_at  # one may have been interrupted before it was there
        worker.close()
        if not signals.came_at:
            break
    assert place > 10


@pytest.mark.parametrize("may_start", [True, False])
def test_a_task_whose_thread_could_not_be_started_is_waited_for(monkeypatch, may_start):
    """Or is done by whoever waits, if no thread may be had."""
    worker, ran, start = Worker(), [], threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: interrupt())
        with pytest.raises(KeyboardInterrupt):
            worker.submit(lambda: ran.append(1))
    assert (ran, threads()) == ([], [])
    if not may_start:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    waiting = threading.Thread(target=worker.wait_until_idle, daemon=True)
    start(waiting)
    waiting.join(WAIT_SECS / 2)
    assert ran == [1]
    worker.close()


def test_a_caller_that_is_interrupted_as_it_runs_tasks_leaves_them_to_the_next(monkeypatch):
    worker, ran = Worker(), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(worker, "_do_next", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.submit(lambda: ran.append(1))
    has_run = threading.Event()
    worker.submit(has_run.set)
    assert has_run.wait(WAIT_SECS / 2)
    assert ran == [1]
    worker.close()


def test_one_thread_is_started_for_tasks_that_come_before_it_runs(monkeypatch):
    """Another would stay for a while, also behind `close`."""
    worker, ran, started = Worker(), [], []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
        for n in range(3):
            worker.submit(functools.partial(ran.append, n))
    (thread,) = started
    thread.start()
    worker.close()
    assert ran == [0, 1, 2]
