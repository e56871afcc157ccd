"""What saves that were given up have left behind: what is still written, or makes a directory.

A save that does not come to its end may have left a thread that writes what it was given, or one of
Orbax's that makes a directory. The next save may have its label, and so its directory: what has not
begun to be written never is, what has stops at its next chunk, and the next save waits for that.
"""

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator

import orbax.checkpoint as ocp

from gockpt_jax.errors import StorageError
from gockpt_jax.locks import wait_elsewhere
from gockpt_jax.storage.saving.begun_item import BegunItem
from gockpt_jax.storage.saving.hand_over import HAND_OVER

_DIRECTORY_SECS = 10
_STOP_SECS = 300
"""Within which what was given up stops, unless the storage hangs."""


class LeftBehind:
    """What the next save waits for."""

    def __init__(self) -> None:
        self._left: list[_Left] = []
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def expect(self) -> None:
        """A save is about to begin: no thread that is there now makes its directory."""
        self._threads = weakref.WeakSet(threading.enumerate())

    def leave_item(self, item: BegunItem) -> None:
        """It has been given up, and may be written all the same."""
        if item.may_write:
            stats = item.stats
            if not stats.is_given_up:  # an interrupted save's commit, maybe
                left = _Left(item.wait)
            elif item.handed_over is not None or stats.peak_inflight_bytes:
                left = _Left(item.wait, _STOP_SECS, item)
            else:  # where the directory cannot be made, nothing ever will be in flight
                left = _Left(item.wait, _DIRECTORY_SECS, item)
            self._left.append(left)

    def leave_directory(self, error: BaseException) -> None:
        """A save does not begin, and Orbax may still be making its directory.

        Args:
          error: Why. An interrupt may have come before Orbax has told that a thread makes one.
        """
        if not isinstance(error, Exception):
            makers = [t for t in threading.enumerate() if t not in self._threads and _is_orbaxs(t)]
            self._left += [_Left(maker.join, _DIRECTORY_SECS) for maker in makers]
        with contextlib.suppress(Exception):  # the job's coordinator is gone: the error is told
            self._left.append(_Left(_directory_made().result, _DIRECTORY_SECS))

    @contextlib.contextmanager
    def leaving_writes(
        self, wait: Callable[[], None] | None, error: BaseException
    ) -> Iterator[None]:
        """A save does not begin, and Orbax may be writing it: why that fails nobody shall hear.

        Before it is given up inside, which may be interrupted.

        Args:
          wait: Waits for that, and raises it; `None`: somebody hears of it.
          error: Why it does not begin. An interrupt has nobody wait for long.
        """
        left = [] if wait is None else [_Left(lambda secs: wait())]
        self._left += left
        yield
        if wait is not None and isinstance(error, Exception):
            wait_elsewhere(wait)
            self._left.remove(*left)

    def wait_for_directory(self) -> None:
        """Returns when Orbax has made that of a save which nobody else waits for: it fails at once.

        The next one of its label would have it made twice at the same time.
        """
        with contextlib.suppress(Exception):  # what goes wrong with it is Orbax's
            _directory_made().result(_DIRECTORY_SECS)

    def wait(self, label: int | None = None) -> None:
        """Returns when nothing writes any more for saves that were given up.

        The next one may have the label of one of them, and so its directory. Nor can Orbax be
        closed while it makes one: it would wait 300 s for what it cannot make any more.

        Args:
          label: Of the next save: what has failed under another label is not waited for. `None`:
            there is none, and of what has failed nothing is waited for for long.

        Raises:
          StorageError: if what has failed under this label does not stop: the storage hangs.
        """
        for left in reversed(self._left.copy()):  # the directory first: it came last
            failed = left.item
            if failed is None or label in (None, failed.label):
                secs = left.secs if failed is None or label is not None else _DIRECTORY_SECS
                wait_elsewhere(functools.partial(left.wait, secs))  # what it raises nobody is told
                if failed is not None and secs == _STOP_SECS and failed.is_writing:
                    raise StorageError(
                        f"the save of step {label}: what a failed one has left in {failed.folder} "
                        f"is still being written after {secs} s. Look at the storage, and save "
                        "again later. Earlier checkpoints are intact."
                    )
            elif failed.may_write:
                continue
            self._left.remove(left)


@dataclasses.dataclass(eq=False)
class _Left:
    """What was left behind.

    Attributes:
      wait: Waits for its end, so many seconds at most.
      secs: How many.
      item: What has failed, for the next save of its label to wait for; `None`: any save has to.
    """

    wait: Callable[[float | None], None]
    secs: float | None = None
    item: BegunItem | None = None


def _is_orbaxs(thread: threading.Thread) -> bool:
    """Whether it is one of Orbax's that neither writes for us nor ends a save."""
    is_handed_over = thread.name.startswith(HAND_OVER)
    return type(thread).__module__.startswith("orbax.") and not is_handed_over


def _directory_made() -> ocp.future.Future:
    """Of the save that is being begun here; at once where Orbax has made it."""
    return ocp.future.CommitFutureAwaitingContractedSignals(_nothing(), name="gockpt_directory")


async def _nothing() -> None:
    """What is left to do when a directory has been made."""
