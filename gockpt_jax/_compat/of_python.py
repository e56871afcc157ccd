"""What Python does not tell of threads and locks."""

import os
import threading
from collections.abc import Callable
from typing import Any


def before_shutdown(callback: Callable[[], None]) -> None:
    """Has `callback` called when the main thread has ended, while executors still take work.

    Not in a process that was forked from this one, as data loaders are: it ends in the same way.

    `atexit` is too late: it comes after the other threads have been joined, and a save of Orbax's
    that loses its executors on the way waits 300 s for a directory that nobody makes (0.12.8).
    `threading._register_atexit` is what `concurrent.futures` uses (Python 3.9 to 3.14).
    """
    register = getattr(threading, "_register_atexit", None)
    process = os.getpid()
    if register is not None:
        register(lambda: callback() if os.getpid() == process else None)


def is_held(lock: Any) -> bool:
    """Whether this thread holds a `threading.RLock`, which tells only conditions (3.11 to 3.14)."""
    return bool(lock._is_owned())
