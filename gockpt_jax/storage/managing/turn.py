"""At which call a save that waits is handed to Orbax: at the same one on every process.

That the save before it has ended, each process hears by itself, on a thread of Orbax's; but a save
meets all others, so all must begin it at the same place of the program. Calls of the wrapped steps
and of `save` are such places: every process makes them in the same order. One that fails on one of
them counts once, whether it is made again there or left out.
"""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax.errors import ProcessError
from gockpt_jax.locks import shared_lock
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.window.processes import Processes

Barrier = Callable[..., None]
"""Called with `key` and `timeout_ms`, as `ocp.AsyncOptions.barrier_sync_fn`."""

MARGIN_CALLS = 4
"""How many calls the fastest process may make while the others answer, before it waits for them.

They answer within milliseconds. A larger margin hands saves over later for nothing; with a smaller
one a step that is shorter than that would wait for them.
"""


@dataclasses.dataclass(frozen=True)
class _Ended:
    """A save has ended on every process.

    Attributes:
      known_by: The call that this process does not make without knowing the turn.
      turn: The call at which the next save begins; never before `known_by`.
    """

    known_by: int
    turn: concurrent.futures.Future[int]


class Turn:
    """Counts calls, and says at which of them the save that waits has its turn.

    When a save has ended, each process tells how many calls it has made, n, and the turn is at call
    max(n) + margin. Nobody makes its own call n + margin before it has heard the others, and none
    of the n is known before all have ended; so at call k either everyone knows that the turn has
    come, or it is later than k for all. Whatever else begins a save (a forced one, a wait) does so
    at the same call everywhere too, and makes the turn void.

    Args:
      processes: Those that save together; alone, the turn comes with the next call.

    Example:
      >>> turn = Turn(Processes())
      >>> barrier = turn.told_at(lambda **_: None)
      >>> turn.has_come("save 7", anyone_waits=True)
      False
      >>> with concurrent.futures.ThreadPoolExecutor() as orbax:
      ...     orbax.submit(barrier, key="x.set_value_end", timeout_ms=1000).result()
      >>> turn.has_come("step 8", anyone_waits=True)
      True
    """

    def __init__(self, processes: Processes):
        self._processes = processes
        self._margin = MARGIN_CALLS if processes.several else 0
        self._lock = shared_lock()
        self._calls = 0
        self._place: Any = None  # of the last one
        self._ended: _Ended | None = None
        self._saving_on: threading.Thread | None = None

    def has_come(self, place: Any, *, anyone_waits: bool) -> bool:
        """Counts a call; on the trainer's thread, at the same calls on every process.

        Args:
          place: Of the call in the program: that of the one before, if that is made again.
          anyone_waits: Whether a save does, the same everywhere. If not, this returns at once; else
            it may wait until the other processes have told how far they are.

        Returns:
          Whether the save before has ended everywhere, and all know it at this call.

        Raises:
          ProcessError: if a process is gone.
        """
        with self._lock:
            self._calls += place != self._place
            self._place, ended = place, self._ended
        if not anyone_waits or ended is None or self._calls < ended.known_by:
            return False
        return self._calls >= ended.turn.result()

    def saving_here(self) -> None:
        """This thread goes to begin a save."""
        self._saving_on = threading.current_thread()

    def told_at(self, barrier: Barrier) -> Barrier:
        """The same barrier, at which it is heard that a save has begun or ended.

        Args:
          barrier: Orbax's way to wait for all processes.
        """

        def heard(*, key: str, timeout_ms: int) -> None:
            barrier(key=key, timeout_ms=timeout_ms)
            if of_orbax.PROGRESS_BARRIER not in key:
                return
            if threading.current_thread() is self._saving_on:
                self._ended = None  # begun: the one before has ended, and been heard
            elif not self._processes.is_one_missing:
                self._settle()

        return heard

    def _settle(self) -> None:
        """Settles with the other processes, which have come here too, when the turn is."""
        turn: concurrent.futures.Future[int] = concurrent.futures.Future()
        with self._lock:
            calls = self._calls
            self._ended = _Ended(calls + self._margin, turn)
        try:
            told = self._processes.gather("turn", str(calls))
            turn.set_result(max(map(int, told.values())) + self._margin)
        except ProcessError as error:  # no fault of the save that has ended
            turn.set_exception(error)
        except Exception as error:  # the trainer would wait for this turn for ever
            turn.set_exception(ProcessError(f"the other processes cannot be asked: {error}"))


def told_of_turns(
    options: ocp.CheckpointManagerOptions, turn: Turn
) -> ocp.CheckpointManagerOptions:
    """The same options, with which a turn hears of each save's begin and end.

    Args:
      options: With a word of commits (`commit.py`); several processes have a barrier in them.
      turn: Of that manager.
    """
    barrier = options.async_options.barrier_sync_fn or _alone
    told = dataclasses.replace(options.async_options, barrier_sync_fn=turn.told_at(barrier))
    return dataclasses.replace(options, async_options=told)


def _alone(*, key: str, timeout_ms: int) -> None:
    """The barrier of one process."""
