"""The threads beside the trainer's: one lands what has left, one behind it replays."""

import collections
import functools
import logging
import threading
from collections.abc import Callable

from gockpt_jax.compiling import unwatched
from gockpt_jax.locks import shared_lock

_log = logging.getLogger("gockpt_jax")

Task = Callable[[], object]
Failed = Callable[[BaseException], object]

_POLL_SECS = 0.2
_IDLE_POLLS = 50


def _log_it(error: BaseException) -> None:
    _log.error(
        "a task of a worker thread failed for which nobody waits; please report it", exc_info=error
    )


def in_any_case(task: Task) -> tuple[Task, Failed]:
    """For `Worker.submit`: a task that is run again, if it has not been run to its end."""
    return task, lambda _: task()


class Worker:
    """Runs tasks one after another, in the order they were given.

    What goes wrong with a task, wherever it does, and be it before its first line, is for `failed`:
    somebody waits for what the task would have done. It is called on the task's thread, in its
    turn. By default it logs the error.

    The thread is not a daemon: one that is inside JAX while the interpreter shuts down aborts the
    process. It ends by itself when it has nothing to do and the main thread is gone, so that a
    script which forgets `close()`, or dies of an exception, still exits. It also ends when it has
    had nothing to do for a while, so that a forgotten manager leaves none behind; the next task
    starts another.

    Args:
      name: Of the thread.
      behind: Takes what tasks pass on to it, in that order. It is idle, and closed, after this one.
    """

    def __init__(self, name: str = "gockpt-worker", behind: "Worker | None" = None) -> None:
        self._name = name
        self._behind = behind
        self._tasks: collections.deque[tuple[Task, Failed]] = collections.deque()
        self._lock = shared_lock()  # taken itself: an interrupt in `Condition.__enter__` keeps it
        self._changed = threading.Condition(self._lock)
        self._runner: threading.Thread | None = None  # the only one that runs tasks
        self._is_starting = False  # another thread that may become that
        self._busy = False
        self._closed = False

    def submit(self, task: Task, failed: Failed = _log_it) -> None:
        """Appends a task.

        Args:
          task: Is called on the worker's thread.
          failed: Is called there with what went wrong with it; maybe again, if that does, too.
        """
        with self._lock:
            self._tasks.append((task, failed))
            self._changed.notify_all()
            has_runner = self._has_runner()
        if not has_runner:
            self._run(stays=False)

    def _has_runner(self) -> bool:
        """Whether a thread runs tasks, or is about to; starts one if none does, and one may be had.

        `Thread.is_alive` does not tell: a signal in the middle of it (Python 3.11, 3.12) makes it
        say no of a thread that goes on for ever. Nor is it known, after one in the middle of
        `start`, whether that has started a thread: another one is, and ends if it has.
        """
        if self._runner is not None or self._is_starting:
            return True
        self._is_starting = True
        try:
            threading.Thread(target=self._run, name=self._name, daemon=False).start()
            return True
        except RuntimeError:  # none may be had any more: the interpreter ends
            self._is_starting = False
            return False
        except BaseException:
            self._is_starting = False
            raise

    def pass_on(self, task: Task, failed: Failed = _log_it) -> None:
        """Appends a task to those of the worker behind; called by a task of this one."""
        assert self._behind is not None, "there is no worker behind"
        self._behind.submit(task, failed)

    def submit_behind(self, task: Task, failed: Failed = _log_it) -> None:
        """Appends a task that runs on the worker behind, after all that is passed on until then."""
        self.submit(
            lambda: self.pass_on(task, failed),
            lambda error: self.pass_on(functools.partial(failed, error), failed),
        )

    def wait_until_idle(self, *, behind: bool = True) -> None:
        """Returns when every task given so far has run; and what they passed on, if `behind`."""
        with self._lock:  # a task whose `submit` was interrupted may have no thread
            has_runner = not self._tasks or self._has_runner()
        if not has_runner:
            self._run(stays=False)
        with self._lock:
            self._changed.wait_for(lambda: not self._tasks and not self._busy)
        if behind and self._behind is not None:
            self._behind.wait_until_idle()

    def close(self) -> None:
        """Runs what is left, then ends the thread; used again, it ends as soon as it is idle."""
        self.wait_until_idle()
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            runner = self._runner
        if runner is not None:
            runner.join()
        if self._behind is not None:
            self._behind.close()

    def _run(self, *, stays: bool = True) -> None:
        me = threading.current_thread()
        try:
            with self._lock:
                self._is_starting = False
                if self._runner is not None:
                    return
                self._runner = me
            while self._comes(stays=stays):
                self._do_next()
        except BaseException:  # an interrupt of the main thread, as the interpreter ends
            if self._runner is me:
                self._runner = None
            raise

    def _comes(self, *, stays: bool) -> bool:
        """Waits for a task; whether there is one. If there is not, this is no runner any more."""
        with self._lock:
            polls = 0
            while not self._tasks:
                is_needed = polls < _IDLE_POLLS and threading.main_thread().is_alive()
                if self._closed or not (stays and is_needed):
                    self._runner = None
                    return False
                self._changed.wait(_POLL_SECS)
                polls += 1
            self._busy = True
            return True

    def _do_next(self) -> None:
        task, failed = self._tasks.popleft()
        try:
            try:
                with unwatched():
                    task()
            except BaseException as error:
                failed(error)
        except BaseException as error:  # of `failed` itself: the thread goes on
            _log_it(error)
        finally:
            del task, failed  # they hold chunks
            with self._lock:
                self._busy = False
                self._changed.notify_all()
