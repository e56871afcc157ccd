"""Locks that the trainer's thread shares with the threads that end a save.

A signal handler runs between any two lines of the trainer's thread. What needs a lock that the
interrupted line holds goes on only after the handler: so the handler cannot wait for that.
"""

import threading
import weakref

from gockpt_jax import _compat

_made: list["weakref.ref[threading.RLock]"] = []


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
