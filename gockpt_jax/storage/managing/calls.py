"""Who is in the middle of a manager's calls: other threads wait, signal handlers cannot."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from gockpt_jax import _compat, locks


class Calls:
    """One thread at a time begins saves, and hears how they ended.

    A signal handler runs between any two lines of the trainer's thread, and what it has interrupted
    goes on only after it: it cannot wait for that, nor do the same.

    Args:
      steps: The lock of the session, held in what a wrapped step does before and after its update.

    Attributes:
      saving: Held by whoever begins a save or hears how one ended, so inside Orbax's own
        `__init__`, `save` and `close` too.
    """

    def __init__(self, steps: Any):
        self.saving = threading.RLock()
        self._steps = steps
        self._teller: int | None = None  # the thread that tells the user of a commit

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the middle of one: Orbax asks, or a signal handler."""
        return _compat.is_held(self.saving) or _compat.is_held(self._steps)

    def refuse_inside(self, subject: str) -> None:
        """Refuses a call in the middle of another one.

        Raises:
          RuntimeError: if this thread is inside.
        """
        if self.is_inside:
            raise RuntimeError(
                f"{subject}: this thread is in the middle of a step or of another call of the "
                "manager, as where a signal handler has interrupted it. Nothing was done, and what "
                "was interrupted goes on. Have the handler set a flag, and look at it between two "
                "steps; `wait_until_finished` and `close` may be called."
            )

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """While the user is told of a commit, on the thread that commits."""
        self._teller = threading.get_ident()
        try:
            yield
        finally:
            self._teller = None

    def refuse_waiting(self) -> None:
        """Refuses to wait for the save that this thread commits.

        Raises:
          RuntimeError: if it is in `telling`.
        """
        if self._teller == threading.get_ident():
            raise RuntimeError(
                "`post_finalization_callback`, like whoever listens to `jax.monitoring` or to the "
                "log, runs in the middle of a save: it cannot wait for that save, so not save, "
                "restore, close, or delete it. Have it set a flag, and look at that between two "
                "steps."
            )

    def refuse_locked(self) -> None:
        """Refuses to wait for a save whose threads may wait for what was interrupted.

        Raises:
          RuntimeError: if this is a signal handler, and it has interrupted who holds a lock.
        """
        if locks.any_held():
            raise RuntimeError(
                "A signal handler has interrupted this thread in one of the few lines that hold a "
                "lock which a save needs, so it cannot wait for the one that is being written. "
                "Nothing was done. Have it set a flag, and look at that between two steps; or "
                "raise `SystemExit`, and close the manager where that arrives."
            )
