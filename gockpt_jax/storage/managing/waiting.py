"""A save that waits on the host until the previous one has been written: `on_busy="newest"`.

There is one place to wait in. Labels are committed in their order, so of two saves that wait the
older would have to be written first, or not at all; and whoever asks for the newest wants it not to
be late. So a newer save takes the place of the one that waits, as in PCcheck (Strati et al., ASPLOS
2025), whose slots are on the storage: there several are written at once, and here one is.
"""

import copy
import dataclasses
import datetime
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from gockpt_jax.storage.managing.naming import Naming
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.saving.taken import TakenSave
from gockpt_jax.telemetry.save_record import PendingReport

_log = logging.getLogger("gockpt_jax")


@dataclasses.dataclass(frozen=True)
class WaitingSave:
    """An accepted save of which Orbax does not know yet. To policies it is a save like others.

    Attributes:
      step: Its label.
      time: When it was accepted.
      arguments: For `ocp.CheckpointManager.save`; nothing in them changes any more.
    """

    step: int
    time: datetime.datetime
    arguments: Mapping[str, Any]

    @property
    def metrics(self) -> Any:
        """As they were given to `save`."""
        return self.arguments.get("metrics")

    @property
    def num_bytes(self) -> int:
        """What it holds on the host."""
        return self.pending.record.taken_bytes

    @property
    def taken(self) -> list[TakenSave]:
        """Its trees of arrays."""
        return [x for x in self.arguments["args"].values() if isinstance(x, TakenSave)]

    @property
    def pending(self) -> PendingReport:
        """Its report."""
        return self.taken[0].pending

    def release(self) -> None:
        """Gives its bytes back, those on their way as soon as they have landed."""
        for item in self.taken:
            item.release()


_not_forgotten: dict[int, Any] = {}
"""Managers in which a save waits, by the room's `id`: whoever forgot one had been told it saves."""


class WaitingRoom:
    """Where a save waits.

    Args:
      handler: Takes states, and writes them later.
      naming: Says which items it takes.
      manager: Alive for as long as a save waits, so that it is written at the end of the script.

    Attributes:
      leaving: A save that goes to Orbax, which may not know of it yet; whoever has it leave ends
        that.
    """

    def __init__(self, handler: StateHandler, naming: Naming, manager: Any):
        self.leaving: WaitingSave | None = None
        self._waiting: WaitingSave | None = None
        self._handler = handler
        self._is_ours = naming.is_ours
        self._manager = manager

    @property
    def waiting(self) -> WaitingSave | None:
        """The save that waits; `None` if none does."""
        return self._waiting

    @waiting.setter
    def waiting(self, save: WaitingSave | None) -> None:
        """Nobody forgets the manager meanwhile."""
        self._waiting = save
        if save is None:
            _not_forgotten.pop(id(self), None)
        else:
            _not_forgotten[id(self)] = self._manager

    def take(self, step: int, arguments: Mapping[str, Any]) -> str | None:
        """Takes a save's state, and has it wait in the place of the one that does.

        It waits on every process or on none: what one has no room for, all skip.

        Args:
          step: Its label.
          arguments: Those of `ocp.CheckpointManager.save`, `as_they_are`.

        Returns:
          Why it cannot wait; `None` if it does.

        Raises:
          ValueError: if the state has been donated to a later step.
          HostBudgetError: if the user's host budget cannot hold it even alone.
        """
        items = dict(arguments["args"].items())
        trees = {name: args for name, args in items.items() if self._is_ours(name, args)}
        if (why_not := self._why_not(step, items, trees)) is not None:
            return why_not
        trees = {name: _own(args) for name, args in trees.items()}
        # What cannot be copied has been refused: the save that waits is still there.
        if self._why_no_room(trees) is not None:
            self.supersede(step)  # that makes the room
        before, taken = self.waiting, self._take(trees)
        try:
            now = datetime.datetime.now(tz=datetime.UTC)
            composite = ocp.args.Composite(**{**items, **taken})
            self.waiting = WaitingSave(step, now, {**arguments, "args": composite})
            if before is not None:  # other threads see one of them all the time
                self._drop(before, step)
        except BaseException:  # an interrupt: the older one waits on, unless it is reported
            goes_on = before is not None and not before.pending.is_finished
            self.waiting = before if goes_on else None
            for tree in taken.values():
                tree.release()
            raise
        return None

    def _take(self, trees: Mapping[str, Any]) -> dict[str, TakenSave]:
        """Takes the trees of arrays, all or none."""
        taken: dict[str, TakenSave] = {}
        try:
            for name, args in trees.items():
                taken[name] = self._handler.take(args)
        except BaseException:
            for tree in taken.values():
                tree.release()
            raise
        return taken

    def leave(self, waiting: WaitingSave) -> None:
        """The save that waits goes to be written."""
        self.leaving = waiting
        record = waiting.pending.record
        record.waiting_secs = time.perf_counter() - record.sealed_at
        self.waiting = None  # behind `leaving`: whoever looks in that order sees one of them

    def supersede(self, step: int) -> None:
        """Drops the save that waits, if it is older than this one; a report says so."""
        waiting = self.waiting
        if waiting is not None and waiting.step < step:
            try:
                self.waiting = None
                self._drop(waiting, step)
            except BaseException:  # an interrupt: it waits on, unless it is reported
                self.waiting = None if waiting.pending.is_finished else waiting
                raise

    def _drop(self, waiting: WaitingSave, step: int) -> None:
        """Ends a save that waits no more, for one of a newer step."""
        error = next((e for item in waiting.taken if (e := item.failure()) is not None), None)
        if error is not None:
            _log.warning("the save of step %d, superseded by %d, had failed", waiting.step, step)
        try:
            waiting.pending.superseded(step, error)
            waiting.release()
        except BaseException:
            if waiting.pending.is_finished:
                waiting.release()  # all of it, if it was interrupted
            raise

    def give_up(self, error: BaseException) -> None:
        """Drops the save that waits, if there is one: it cannot be written any more."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.pending.failed(error)
            waiting.release()

    def _why_not(self, step: int, items: Mapping[str, Any], trees: Mapping[str, Any]) -> str | None:
        """Why they cannot be taken before they are written; the same on every process."""
        if self.waiting is not None and self.waiting.step >= step:
            return f"a newer save waits, of step {self.waiting.step}"
        for name, args in items.items():
            if name not in trees and not isinstance(args, ocp.args.JsonSave):
                return f"the item `{name}` (`{type(args).__name__}`) cannot be taken beforehand"
        if not trees:
            return "there is no tree of arrays in it"
        freed_bytes = 0 if self.waiting is None else self.waiting.num_bytes
        no_room = self._why_no_room(trees, freed_bytes)
        return self._handler._gockpt_session.processes.objection("room", no_room)

    def _why_no_room(self, trees: Mapping[str, Any], freed_bytes: int = 0) -> str | None:
        """Why this process's host budget cannot hold them; `None` if it can."""
        session = self._handler._gockpt_session
        if session.has_due_window:  # was admitted when the window opened
            return None
        flat = [{id(x): x for x in jax.tree.leaves(args.item)} for args in trees.values()]
        arrays = [x for leaves in flat for x in leaves.values() if isinstance(x, jax.Array)]
        source = session.resources.replicas.source
        num_bytes = sum(source(a).owned_bytes for a in arrays if not a.is_deleted())
        return session.host.why_no_room(num_bytes, freed_bytes=freed_bytes)


def _own(args: Any) -> Any:
    """A tree that the loop cannot change any more; arrays on devices are those given."""
    item = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else copy.deepcopy(x), args.item)
    return dataclasses.replace(args, item=item)  # its metadata is copied as it is taken
