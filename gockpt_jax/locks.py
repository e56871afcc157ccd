"""Locks, and ends of threads, that the trainer's thread shares with the threads that end a save.

A signal handler runs between any two lines of the trainer's thread. What needs a lock that the
interrupted line holds goes on only after the handler: so the handler cannot wait for that.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable

from gockpt_jax import _compat

_made: list["weakref.ref[threading.RLock]"] = []

_POLL_SECS = 0.01
_HEARD_SECS = 0.1
"""A signal that comes as Python begins to wait for a lock is heard of when the wait is over."""


def is_running(thread: threading.Thread) -> bool:
    """Whether a thread has begun, and not ended.

    A signal in the middle of `Thread.join`, or of `is_alive`, has Python 3.11 and 3.12 take it for
    ended from then on: `is_alive` says so, and `join` returns at once.

    Example:
      >>> is_running(threading.current_thread()), is_running(threading.Thread())
      (True, False)
    """
    return thread.ident is not None and thread in threading.enumerate()


def wait_where_join_does_not(thread: threading.Thread) -> None:
    """Waits for a thread if an earlier `join` of it was interrupted, so that another would not."""
    while is_running(thread) and not thread.is_alive():
        time.sleep(_POLL_SECS)


def wait_elsewhere(wait: Callable[[], object]) -> None:
    """Waits on a thread of its own: an interrupt here has nobody take what is awaited for ended.

    Not even those others who wait for the same thread, as Orbax's commit does for its writes.

    Args:
      wait: Returns, or raises an `Exception` that nobody is told, when the wait is over. If this
        thread is interrupted, it goes on.

    Example:
      >>> wait_elsewhere(lambda: print(threading.current_thread().name))
      gockpt-wait
    """
    is_over, interrupts = Gate(), []

    def waits() -> None:
        try:
            wait()
        except Exception:  # nobody is told
            pass
        except BaseException as error:  # that somebody else has been stopped by
            interrupts.append(error)
        finally:
            is_over.open()

    try:
        threading.Thread(target=waits, name="gockpt-wait").start()
    except RuntimeError:  # no thread can be had any more
        waits()
    while not is_over.wait(_HEARD_SECS):
        pass
    for error in interrupts:
        raise error


class Gate:
    """Shut until somebody opens it, for good.

    Unlike an `Event`, whose lock is taken in Python's own lines: an interrupt among these leaves it
    taken, and whoever sets the event next waits for ever.

    Example:
      >>> gate = Gate()
      >>> gate.wait(0.0), gate.open(), gate.wait(0.0)
      (False, None, True)
    """

    def __init__(self) -> None:
        self._bar = threading.Lock()
        self._bar.acquire()

    def open(self) -> None:
        """Lets everybody through, from now on."""
        with contextlib.suppress(RuntimeError):  # it is open, or another thread has, this moment
            self._bar.release()

    def wait(self, secs: float) -> bool:
        """Waits until it is open, for so long at most; says whether it is."""
        is_open = self._bar.acquire(timeout=secs)
        if is_open:
            self.open()  # for whoever comes next
        return is_open


def shared_lock() -> threading.RLock:
    """A lock of which `any_held` knows."""
    lock = threading.RLock()
    _made.append(weakref.ref(lock, _made.remove))
    return lock


def any_held() -> bool:
    """Whether this thread holds any: who asks outside of what is locked is a signal handler.

    Example:
      >>> lock = shared_lock()
      >>> with lock:
      ...     any_held()
      True
      >>> any_held()
      False
    """
    locks = [made() for made in tuple(_made)]
    return any(lock is not None and _compat.is_held(lock) for lock in locks)
