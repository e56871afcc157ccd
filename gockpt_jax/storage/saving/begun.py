"""What has begun of the last save, and what saves that were given up have left behind.

A save that does not come to its end may have left a thread that writes what it was given, or one of
Orbax's that makes a directory: the host's bytes are given back, and the next save waits for these.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax.storage.saving.hand_over import HandedOver
from gockpt_jax.storage.saving.taken import TakenSave
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.write_budget import WriteStats

_DIRECTORY_SECS = 10


@dataclasses.dataclass
class BegunItem:
    """One item of a save that has begun.

    Attributes:
      arrays: Its leaves that were on devices.
      stats: Of their writes.
      handed_over: What has been left to a thread of Orbax's, if anything has.
    """

    arrays: Sequence[HostArray]
    stats: WriteStats = dataclasses.field(default_factory=WriteStats)
    handed_over: HandedOver | None = None

    def release(self) -> None:
        """Gives the host's bytes back, unless they are being written."""
        for array in () if self.stats.peak_inflight_bytes else self.arrays:
            array.release()


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
        self._items: dict[str, BegunItem] = {}  # by their directories
        self._before: dict[str, BegunItem] = {}  # those of the save before
        self._left: list[tuple[ocp.future.Future, float | None]] = []  # and how long to wait for it

    def expect(self, label: int) -> None:
        """What comes next is another save, also where it has the label of one that was deleted."""
        self.label, self._folder = label, ""

    def enter(self, folder: str, item: str) -> bool:
        """An item comes; says whether it begins another save than that of the one before.

        Args:
          folder: The save's directory.
          item: The item's.
        """
        is_other = folder != self._folder or item in self._items
        if is_other:
            self.number += 1
            self._folder, self._before, self._items = folder, self._items, {}
        self._items[item] = BegunItem(())
        return is_other

    def add(self, item: Any, taken: TakenSave) -> BegunItem:
        """Accounts for what has been taken of an item, from now on."""
        try:
            self._items[str(item)] = begun = BegunItem(taken.arrays)
            return begun
        except BaseException:  # an interrupt
            taken.release()
            raise

    def _forget(self) -> None:
        self._folder, self._items = "", {}

    def give_back(self) -> None:
        """Gives the host's bytes back where it failed before its writing began.

        Orbax's threads wait up to 300 s for a directory that could not be made, and the state with
        them.
        """
        for item in self._items.values():
            item.release()
        self._forget()

    def give_back_before(self) -> None:
        """Likewise of the save before this one, which has ended, nobody has told how."""
        for item in self._before.values():
            item.release()
        self._before = {}

    def give_up(self, error: BaseException) -> None:
        """It does not begin after all. What writes it already goes on to its end.

        An interrupt may have come when it had begun: then that is its commit.
        """
        for item in self._items.values():
            if item.handed_over is not None:
                self._left.append((item.handed_over, None))
            if item.handed_over is None or isinstance(error, Exception):
                item.release()
        self._forget()

    def leave_directory(self) -> None:
        """It does not begin, and Orbax may still be making its directory."""
        made = ocp.future.CommitFutureAwaitingContractedSignals(_nothing(), name="gockpt_directory")
        self._left.append((made, _DIRECTORY_SECS))

    def wait_for_what_was_left(self) -> None:
        """Returns when nothing writes any more for saves that were given up.

        The next one may have the label of one of them, and so its directory. Nor can Orbax be
        closed while it makes one: it would wait 300 s for what it cannot make any more.
        """
        while self._left:  # the directory first: it came last
            future, secs = self._left[-1]
            with contextlib.suppress(Exception):  # nobody is told
                future.result(secs)
            self._left.pop()


async def _nothing() -> None:
    """What is left to do when a directory has been made."""
