"""Handing a sealed save to stock's tree handler, away from the trainer's thread.

Once the state is sealed, all that is left is bookkeeping: names, types and specifications of every
leaf, an event loop, threads. For a few hundred leaves that takes stock longer than the seal, and
nothing in it needs the trainer. What `save` promises when it returns has to be true by then all
the same: what it refuses it has refused, and what the caller may change has been copied.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gockpt_jax.storage.saving.taken import TakenSave
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.write_budget import WriteStats

_DIRECTORY_SECS = 10
_KNOWN = (HostArray, bool, int, float, str, np.generic)  # no caller can change them


class HandedOver(ocp.future.Future):  # type: ignore[misc]
    """A save whose writing is begun by a thread of Orbax's, as soon as its directory is there.

    Args:
      begin: Begins the writing; its result resolves when all is written.
    """

    def __init__(self, begin: Coroutine[Any, Any, ocp.future.Future]):
        self._begun = ocp.future.CommitFutureAwaitingContractedSignals(
            begin, name="gockpt_hand_over"
        )

    def result(self, timeout: float | None = None) -> None:
        """Waits for every write; raises what the first failing one, or their beginning, raised."""
        started_at = time.monotonic()
        written = self._begun.result(timeout)
        if timeout is not None:
            timeout = max(0.0, timeout - (time.monotonic() - started_at))
        written.result(timeout)


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
      number: Of saves that have come so far that items of theirs were to be taken.
    """

    def __init__(self) -> None:
        self.number = 0
        self._folder = ""
        self._items: dict[str, BegunItem] = {}  # by their directories
        self._left: list[tuple[ocp.future.Future, float | None]] = []  # and how long to wait for it

    def enter(self, folder: str, item: str) -> bool:
        """An item comes; says whether it begins another save than that of the one before.

        Args:
          folder: The save's directory.
          item: The item's.
        """
        is_other = folder != self._folder or item in self._items
        if is_other:
            self.number += 1
            self._folder, self._items = folder, {}
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


def run_to_its_end(save: Coroutine[Any, Any, None]) -> None:
    """Waits for a coroutine; in a notebook too, where this thread runs a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(save)
        return
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, save).result()


def settled(save: ocp.args.PyTreeSave) -> ocp.args.PyTreeSave | None:
    """The arguments of a save that stock neither refuses nor copies on the trainer's thread.

    Args:
      save: Its arrays are `HostArray`s; nothing in it has been refused.

    Returns:
      The same, with NumPy arrays copied, as stock copies them in `save`. `None` if stock would
      refuse something there, or a leaf is of a type that only its own handler knows.
    """
    tree: Any  # untyped in JAX's stubs
    leaves, tree = jax.tree.flatten(save.item)
    if not leaves or jax.tree_util.treedef_is_leaf(tree):
        return None
    if save.save_args is not None and jax.tree.structure(save.save_args) != tree:
        return None
    if not all(type(x) is np.ndarray or isinstance(x, _KNOWN) for x in leaves):
        return None
    copied = [x.copy() if isinstance(x, np.ndarray) else x for x in leaves]
    return dataclasses.replace(save, item=jax.tree.unflatten(tree, copied))
