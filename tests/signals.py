"""Signals at each place of the library where one may arrive, as a test chooses."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gockpt_jax
from gockpt_jax import compiling, locks

LIBRARY = os.path.dirname(gockpt_jax.__file__)
GOES_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_BETWEEN = (contextlib.__file__, threading.__file__)
"""Who calls these is inside, if they are."""
_STARTS = threading.Thread.start.__code__
"""Python itself does not survive a signal in there: what has started waits for a lock for ever."""


def when_the_main_thread_waits(act: Callable[[], object]) -> threading.Thread:
    """Has something done by another thread as soon as the main one is in `Thread.join`, or polls.

    Returns:
      The other thread.
    """
    main = threading.main_thread().ident
    assert main is not None

    def look() -> None:
        known = (threading.Thread.join, locks.wait_where_join_does_not, locks.wait_elsewhere)
        waits = [function.__code__ for function in known]
        found = False
        while not found:
            frame: Any = sys._current_frames().get(main)  # none, for a moment, as it ends
            while frame is not None and not found:
                found = frame.f_code in waits
                frame = frame.f_back
            time.sleep(0.001)
        act()

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    return looking


def hear_ctrl_c() -> None:
    """Has it interrupt the main thread, also where it was started in the background of a shell."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def send_ctrl_c() -> None:
    """A real one."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def interrupt() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


def _place(frame: Any) -> str:
    """Files with lines: where it is, and who has called, back to the library."""
    found = [f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"]
    inside = frame.f_code.co_filename.startswith(LIBRARY)
    return found[0] if inside or frame.f_back is None else f"{found[0]} < {_place(frame.f_back)}"


@contextlib.contextmanager
def profiled(profile: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """Has this thread's calls inside told to a profile, as `sys.setprofile` says."""
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


class Signals:
    """Sends a signal to this thread where the library gives it a chance, once or now and then.

    Python looks for one as a function begins, and behind each call of what is not written in
    Python, whose result is lost if the handler raises. (Where a loop jumps back, too: not here.)

    Args:
      places: Which place it is, counted from one, and how many further on each next one is: in
        another call than the one before, so never in what makes good for that one.
      handler: What the signal does.
      inside: What the paths of files begin with that it comes into; what is between them, too.

    Attributes:
      passed: Places so far.
      came_at: Where it came.
    """

    def __init__(
        self, places: Iterable[int], *, handler: Callable[[], None] = interrupt,
        inside: tuple[str, ...] = (LIBRARY,),
    ):  # fmt: skip
        self.passed = 0
        self.came_at: list[str] = []
        self._places = iter(places)
        self._left = next(self._places, 0)
        self._handler = handler
        self._inside = inside

    def coming(self) -> contextlib.AbstractContextManager[None]:
        """They come in what is called inside."""
        return profiled(self._profile)

    def during(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls; again, and again, where it is interrupted."""
        while True:
            with contextlib.suppress(KeyboardInterrupt), self.coming():
                return call(*args, **kwargs)

    def _is_inside(self, frame: Any) -> bool:
        while frame.f_code.co_filename in _BETWEEN and frame.f_back is not None:
            if frame.f_code is _STARTS:
                return False
            frame = frame.f_back
        path = frame.f_code.co_filename
        # There JAX's settings are entered, by generators in generators: what is raised by a profile
        # in these has upset Python 3.11 itself (seen twice). Who means it names it.
        if path == compiling.__file__ and path not in self._inside:
            return False
        return bool(path.startswith(self._inside))

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        # A generator that goes on would not see what is raised as it does.
        begins = event == "call" and not code.co_flags & GOES_ON
        if (event == "c_return" or begins) and self._is_inside(frame):
            self.passed += 1
            self._left -= 1
            if self._left == 0:
                self._left = next(self._places, 0)
                self.came_at.append(_place(frame))
                self._handler()
