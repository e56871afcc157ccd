"""What has begun of saves, and is given up if its save fails."""

import contextlib
from collections.abc import Iterator
from typing import Any

from gockpt_jax.errors import StorageError
from gockpt_jax.locks import Gate
from gockpt_jax.storage.files.item_files import TEMPORARY
from gockpt_jax.storage.saving.begun_item import BegunItem
from gockpt_jax.storage.saving.left import LeftBehind
from gockpt_jax.storage.saving.taken import TakenSave


class BegunSave:
    """The items of the save that began last, and those of saves before it that are not over.

    Attributes:
      label: Of the save, or of one that is about to begin.
      may_be_written: Open where what is handed over need not wait any more; another one each save.
      left: What was given up of saves, and may not have stopped.
    """

    def __init__(self) -> None:
        self.label = -1
        self.may_be_written = Gate()
        self.left = LeftBehind()
        self._holds = False
        self._folder = ""
        self._manager = ""
        self._entered: set[str] = set()  # the directories of its items
        self._items: dict[str, BegunItem] = {}  # those that were taken, by their directories
        self._before: list[tuple[str, BegunItem]] = []  # those of saves before that are not over
        self._is_soiled = False  # what was left has been written into the directory of this one

    def expect(self, label: int) -> None:
        """What comes next is another save, also where it has the label of one that was deleted."""
        self.label, self._folder = label, ""
        self.left.expect()

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
        is_other = folder != self._folder or item in self._entered
        if is_other:
            self.may_be_written = Gate()
            if not self._holds:
                self.let_go()
            before = [*self._before, *self._items.items()]
            self._before = [(name, each) for name, each in before if not each.is_over]
            self._folder, self._items, self._is_soiled = folder, {}, False
            self._entered = set()
            name = folder.partition(TEMPORARY)[0]
            self._manager = "" if folder == item else name.rstrip("0123456789")
        self._entered.add(item)
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
            self.left.leave_item(item)
        self._folder, self._items = "", {}
        if is_next_expected:  # it is heard of in the middle of the next save
            self.left.wait(self.label)

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
                self.left.leave_item(item)

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
