"""Programs of ours, compiled once per process on a thread of their own.

Never on the trainer's thread: under its `set_mesh`, JAX refuses programs for other devices than the
mesh's. Called there, a compiled program does not look at it.
"""

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from gockpt_jax.locks import is_running, shared_lock

REMEMBERED = 4096
"""Of how many programs the compiled ones are kept, those used last: as many as JAX keeps. A model
has hundreds at most; only a loop that saves other shapes each time comes by more."""

_Key = tuple[Hashable, ...]
_Program = concurrent.futures.Future[Any]

_DEBUGGING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")


def debugged_by() -> str | None:
    """The setting, if there is one, by which the user has JAX run or check programs one by one."""
    return next((name for name in _DEBUGGING if getattr(jax.config, name)), None)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """For programs and transfers of ours: what the user has JAX look for is for the user's own.

    Ours exist compiled only, NaNs are numbers like others to them, and what they move is meant.
    Settings of a thread, of which each has its own.
    """
    with (
        jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False),
        jax.transfer_guard("allow"),
    ):  # fmt: skip
        yield


class Programs:
    """Compiled programs by what they are made from; a manager that is opened again meets the same.

    Args:
      thread_name: Of the thread that compiles.
      compile_it: Makes a program of what is asked for; called on the thread, once for equal ones.
      most: How many are kept.

    Example:
      >>> programs = Programs("a thread's name", lambda a, b: a * b)
      >>> programs.wanted(2, 3)
      >>> programs.needed(2, 3)
      6
    """

    def __init__(self, thread_name: str, compile_it: Callable[..., Any], most: int = REMEMBERED):
        self._name = thread_name
        self._compile_it = compile_it
        self._most = most
        # Those asked for last at the end.
        self._found: collections.OrderedDict[_Key, _Program] = collections.OrderedDict()
        # What is still to be compiled, in order: what somebody waits for, and all else.
        self._needed: dict[_Key, _Program] = {}
        self._wanted: dict[_Key, _Program] = {}
        self._lock = shared_lock()
        self._thread: threading.Thread | None = None

    def wanted(self, *made_from: Hashable) -> None:
        """Has a program compiled ahead; what goes wrong surfaces where it is needed."""
        self._ask(made_from, self._wanted)

    def needed(self, *made_from: Hashable) -> Any:
        """The program itself, before all that are only wanted; waits for it.

        One that failed to compile is tried again when next asked for.
        """
        return self._ask(made_from, self._needed).result()

    def _ask(self, key: _Key, queue: dict[_Key, _Program]) -> _Program:
        # Ctrl-C may come between any two of these: whatever is in `_found` has been queued before,
        # and a thread that is known may never have been started.
        with self._lock:
            found = self._found.get(key)
            if found is None:
                self._forget_oldest()
                found = concurrent.futures.Future()
                queue[key] = found
                self._found[key] = found
            elif key in self._wanted:
                queue[key] = self._wanted[key]
            self._found.move_to_end(key)
            if key not in queue or (self._thread is not None and is_running(self._thread)):
                return found
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=False)
            try:
                self._thread.start()
                return found
            except RuntimeError:  # none may be had any more: the interpreter ends
                pass
        self._run()
        return found

    def _forget_oldest(self) -> None:
        """Makes room for another; what nobody has compiled yet is waited for, and stays."""
        while len(self._found) >= self._most:
            key, found = next(iter(self._found.items()))
            if not found.done():
                return
            del self._found[key]

    def _run(self) -> None:
        while (job := self._next()) is not None:
            key, found = job
            try:
                with unwatched():
                    found.set_result(self._compile_it(*key))
            except BaseException as error:  # handed to whoever needs the program
                with self._lock:  # first: whoever is told of it may ask again
                    self._found.pop(key, None)
                found.set_exception(error)

    def _next(self) -> tuple[_Key, _Program] | None:
        with self._lock:
            if not threading.main_thread().is_alive():  # nobody will need what is only wanted
                for key in self._wanted:
                    self._found.pop(key, None)
                self._wanted.clear()
            queue = self._needed or self._wanted
            if not queue:
                self._thread = None
                return None
            key = next(iter(queue))
            found = queue.pop(key)
            self._wanted.pop(key, None)  # what was wanted before it was needed is in both
            return key, found
