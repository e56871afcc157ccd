"""What has begun of saves, and what those that were given up have left behind.

A save that does not come to its end may have left a thread that writes what it was given, or one of
Orbax's that makes a directory. The next save may have its label, and so its directory: what has not
begun to be written never is, what has stops at its next chunk, and the next save waits for that.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax.errors import StorageError
from gockpt_jax.storage.saving.hand_over import HandedOver
from gockpt_jax.storage.saving.taken import TakenSave
from gockpt_jax.storage.saving.written import Written
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.write_budget import WriteStats
from gockpt_jax.telemetry.save_record import PendingReport

_DIRECTORY_SECS = 10


@dataclasses.dataclass
class BegunItem:
    """One item of a save that has begun.

    Attributes:
      folder: The save's directory.
      root: In which its manager's saves are; "" for that of a checkpointer alone.
      arrays: Its leaves that were on devices.
      pending: Its save's report.
      stats: Of their writes.
      handed_over: What has been left to a thread of Orbax's, if anything has.
      written: Its writes, once they have begun.
    """

    folder: str
    root: str
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
      number: Of saves that have come so far that items of theirs were to be taken.
    """

    def __init__(self) -> None:
        self.label = -1
        self.number = 0
        self._folder = ""
        self._root = ""
        self._items: dict[str, BegunItem] = {}  # by their directories
        self._before: list[tuple[str, BegunItem]] = []  # those of saves before that are not over
        # What waits for what was left behind, and for how long at most.
        self._left: list[tuple[Callable[[float | None], None], float | None]] = []
        self._is_soiled = False  # what was left has been written into the directory of this one

    def expect(self, label: int) -> None:
        """What comes next is another save, also where it has the label of one that was deleted."""
        self.label, self._folder = label, ""

    def enter(self, folder: str, item: str) -> bool:
        """An item comes; says whether it begins another save than that of the one before.

        Args:
          folder: The save's directory.
          item: The item's; the same without a manager.
        """
        is_other = folder != self._folder or item in self._items
        if is_other:
            self.number += 1
            before = [*self._before, *self._items.items()]
            self._before = [(name, each) for name, each in before if not each.is_over]
            self._folder, self._items, self._is_soiled = folder, {}, False
            self._root = "" if folder == item else folder.rpartition("/")[0]
        self._items[item] = BegunItem(self._folder, self._root)
        return is_other

    def add(self, item: Any, taken: TakenSave) -> BegunItem:
        """Accounts for what has been taken of an item, from now on."""
        try:
            begun = BegunItem(self._folder, self._root, taken.arrays, taken.pending)
            self._items[str(item)] = begun
            return begun
        except BaseException:  # an interrupt
            taken.release()
            raise

    def item(self, directory: Any) -> BegunItem | None:
        """That which lies in a directory, of this save or of one before that is not over."""
        known = dict([*self._before, *self._items.items()])
        return known.get(str(directory))

    def give_up(self, error: BaseException) -> None:
        """It has failed, or does not begin after all.

        An interrupt may have come when it had begun: then what writes it is its commit, and goes on
        to its end.
        """
        for item in self._items.values():
            if item.handed_over is None or isinstance(error, Exception):
                item.give_up()
            self._leave(item)
        self._folder, self._items = "", {}

    def give_up_before(self, error: BaseException, *, one_at_a_time: bool) -> None:
        """Likewise of saves before this one that have ended, and nobody has told how.

        Args:
          error: What their reports say where nobody has.
          one_at_a_time: Whether a manager waits for its last save before another begins.
        """
        for _, item in self._before:
            is_waited_for = one_at_a_time and item.root != "" and item.root == self._root
            is_in_its_place = item.folder == self._folder
            if is_waited_for or is_in_its_place or item.will_not_begin:
                may_have_written = item.may_write
                item.has_ended(error)
                may_have_written &= not item.will_not_begin
                self._is_soiled |= is_in_its_place and may_have_written
                self._leave(item)

    def give_up_all(self, error: BaseException) -> None:
        """Likewise of all saves: whoever makes them has waited for them."""
        for _, item in [*self._before, *self._items.items()]:
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
            # Where the directory cannot be made, nothing will be in flight.
            secs = None if item.stats.peak_inflight_bytes or item.handed_over else _DIRECTORY_SECS
            self._left.append((item.wait, secs))

    def leave_directory(self) -> None:
        """It does not begin, and Orbax may still be making its directory."""
        made = ocp.future.CommitFutureAwaitingContractedSignals(_nothing(), name="gockpt_directory")
        self._left.append((made.result, _DIRECTORY_SECS))

    def wait_for_what_was_left(self) -> None:
        """Returns when nothing writes any more for saves that were given up.

        The next one may have the label of one of them, and so its directory. Nor can Orbax be
        closed while it makes one: it would wait 300 s for what it cannot make any more.
        """
        while self._left:  # the directory first: it came last
            wait, secs = self._left[-1]
            with contextlib.suppress(Exception):  # nobody is told
                wait(secs)
            self._left.pop()


async def _nothing() -> None:
    """What is left to do when a directory has been made."""
