"""What has begun of saves, and what those that were given up have left behind.

A save that does not come to its end may have left a thread that writes what it was given, or one of
Orbax's that makes a directory. The next save may have its label, and so its directory: what has not
begun to be written never is, what has stops at its next chunk, and the next save waits for that.
"""

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax.errors import StorageError
from gockpt_jax.locks import Gate, wait_elsewhere
from gockpt_jax.storage.files.item_files import TEMPORARY
from gockpt_jax.storage.saving.hand_over import HAND_OVER, HandedOver
from gockpt_jax.storage.saving.taken import TakenSave
from gockpt_jax.storage.saving.written import Written
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.write_budget import WriteStats
from gockpt_jax.telemetry.save_record import PendingReport

_DIRECTORY_SECS = 10
_STOP_SECS = 300
"""Within which what was given up stops, unless the storage hangs."""


@dataclasses.dataclass
class BegunItem:
    """One item of a save that has begun.

    Attributes:
      label: The save's.
      folder: The save's directory.
      manager: What the directories of its manager's saves begin with; "" for a checkpointer alone.
      arrays: Its leaves that were on devices.
      pending: Its save's report.
      stats: Of their writes.
      handed_over: What has been left to a thread of Orbax's, if anything has.
      written: Its writes, once they have begun.
    """

    label: int
    folder: str
    manager: str
    arrays: Sequence[HostArray] = ()
    pending: PendingReport | None = None
    stats: WriteStats = dataclasses.field(default_factory=WriteStats)
    handed_over: HandedOver | None = None
    written: Written | None = None

    def give_up(self) -> None:
        """Nobody wants it any more. What is not being written of the host's bytes is given back."""
        self.stats.is_given_up = True
        if self.handed_over is not None:
            self.handed_over.cancel()
        for array in () if self.stats.peak_inflight_bytes else self.arrays:
            array.release()

    def failed(self, error: BaseException) -> None:
        """Its save has, so nobody wants it any more."""
        self.give_up()
        if self.pending is not None:
            self.pending.failed(error)

    def has_ended(self, error: BaseException) -> None:
        """Its save has: as it is known already, or with an error."""
        if self.pending is not None and self.pending.is_finished:
            self.give_up()
        else:
            self.failed(error)

    @property
    def will_not_begin(self) -> bool:
        """Whether its writing was left to a thread that will not begin it any more."""
        return self.handed_over is not None and self.handed_over.will_not_begin

    @property
    def is_writing(self) -> bool:
        """Whether its writing has begun, and not ended: that of a healthy save, maybe."""
        begins = self.handed_over is not None and self.handed_over.is_beginning
        return begins or (self.written is not None and not self.written.has_ended)

    @property
    def may_write(self) -> bool:
        """Whether something of it is being written, or may yet be."""
        waits = self.handed_over is not None and self.handed_over.may_begin
        return waits or (self.written is not None and not self.written.has_ended)

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left to be written, or told."""
        return not self.may_write and (self.pending is None or self.pending.is_finished)

    def wait(self, secs: float | None) -> None:
        """Returns when nothing of it is being written any more, however it has ended."""
        if self.handed_over is not None:
            self.handed_over.wait(secs)
        if self.written is not None:  # now, if it was not before
            self.written.wait(secs)


class BegunSave:
    """The items of the save that began last, and what saves have left that were given up then.

    Attributes:
      label: Of the save, or of one that is about to begin.
      may_be_written: Open where what is handed over need not wait any more; another one each save.
    """

    def __init__(self) -> None:
        self.label = -1
        self.may_be_written = Gate()
        self._holds = False
        self._folder = ""
        self._manager = ""
        self._items: dict[str, BegunItem] = {}  # by their directories
        self._before: list[tuple[str, BegunItem]] = []  # those of saves before that are not over
        self._left: list[_Left] = []
        self._is_soiled = False  # what was left has been written into the directory of this one
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # before it began

    def expect(self, label: int) -> None:
        """What comes next is another save, also where it has the label of one that was deleted."""
        self.label, self._folder = label, ""
        self._threads = weakref.WeakSet(threading.enumerate())

    @contextlib.contextmanager
    def held_back(self, is_held: bool) -> Iterator[None]:
        """What a save hands over inside begins to be written when `let_go` is called.

        Else two threads run Python, and the one that is the trainer's waits for the interpreter
        wherever it gives it away: in each file that Orbax touches, each thread that it starts, in
        the dispatch of the next step. And what is given up has not begun.

        Args:
          is_held: Whether it is: whether somebody will let it go, also if what is inside fails.
        """
        self._holds = is_held
        try:
            yield
        finally:
            self._holds = False

    def let_go(self) -> None:
        """What has been handed over begins to be written."""
        self.may_be_written.open()

    def enter(self, folder: str, item: str) -> bool:
        """An item comes; says whether it begins another save than that of the one before.

        Args:
          folder: The save's directory.
          item: The item's; the same without a manager.
        """
        is_other = folder != self._folder or item in self._items
        if is_other:
            self.may_be_written = Gate()
            if not self._holds:
                self.let_go()
            before = [*self._before, *self._items.items()]
            self._before = [(name, each) for name, each in before if not each.is_over]
            self._folder, self._items, self._is_soiled = folder, {}, False
            name = folder.partition(TEMPORARY)[0]
            self._manager = "" if folder == item else name.rstrip("0123456789")
        self._items[item] = BegunItem(self.label, self._folder, self._manager)
        return is_other

    def add(self, item: Any, taken: TakenSave) -> BegunItem:
        """Accounts for what has been taken of an item, from now on."""
        begun = BegunItem(self.label, self._folder, self._manager, taken.arrays, taken.pending)
        self._items[str(item)] = begun
        return begun

    def item(self, directory: Any) -> BegunItem | None:
        """That which lies in a directory, of this save or of one before that is not over."""
        known = dict([*self._before, *self._items.items()])
        return known.get(str(directory))

    def give_up(self, error: BaseException) -> None:
        """It has failed, or does not begin after all.

        An interrupt may have come when it had begun: then what writes it is its commit, and goes on
        to its end.
        """
        is_next_expected = self._folder == ""
        for item in self._items.values():
            if item.handed_over is None or isinstance(error, Exception):
                item.give_up()
            self._leave(item)
        self._folder, self._items = "", {}
        if is_next_expected:  # it is heard of in the middle of the next save
            self.wait_for_what_was_left(self.label)

    def give_up_before(self, error: BaseException, *, one_at_a_time: bool) -> None:
        """Likewise of saves before this one that have ended, and nobody has told how.

        What is being written may be of another manager's, or checkpointer's, healthy save, unless
        this one is in its place.

        Args:
          error: What their reports say where nobody has.
          one_at_a_time: Whether a manager waits for its last save before another begins.
        """
        for _, item in self._before:
            is_in_its_place = item.folder == self._folder
            is_of_this_manager = item.manager != "" and item.manager == self._manager
            is_waited_for = one_at_a_time and is_of_this_manager
            if is_in_its_place or item.will_not_begin or (is_waited_for and not item.is_writing):
                may_have_written = item.may_write
                item.has_ended(error)
                may_have_written &= not item.will_not_begin
                self._is_soiled |= is_in_its_place and may_have_written
                self._leave(item)

    def give_up_all(self, error: BaseException) -> None:
        """Likewise of all saves of which nothing can be written any more: their makers go."""
        for _, item in [*self._before, *self._items.items()]:
            if not item.may_write:
                item.has_ended(error)

    def require_clean(self) -> None:
        """Before this one is taken.

        Raises:
          StorageError: if what a failed one has left was being written when this one had begun.
        """
        if self._is_soiled:
            raise StorageError(
                f"the save of step {self.label}: what a failed one had left was still being "
                f"written into its directory, {self._folder}. It has stopped by now: save again. "
                "Earlier checkpoints are intact."
            )

    def _leave(self, item: BegunItem) -> None:
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
        """It does not begin, and Orbax may still be making its directory.

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
        """It does not begin, and Orbax may be writing it: what that fails with nobody shall hear.

        Before it is given up inside, which may be interrupted.

        Args:
          wait: Waits for that, and raises it; `None`: somebody hears of it.
          error: Why it does not begin. An interrupt has nobody wait for long.
        """
        left = [] if wait is None else [_Left(lambda secs: wait())]
        self._left += left
        try:
            yield
        finally:
            self.let_go()
        if wait is not None and isinstance(error, Exception):
            wait_elsewhere(wait)
            self._left.remove(*left)

    def wait_for_directory(self) -> None:
        """Likewise, and there is nobody to wait for it later: Orbax would make it twice at once."""
        with contextlib.suppress(Exception):  # what goes wrong with it is Orbax's
            _directory_made().result(_DIRECTORY_SECS)

    def wait_for_what_was_left(self, label: int | None = None) -> None:
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
