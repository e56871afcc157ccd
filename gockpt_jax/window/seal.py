"""A save at its seal: the state is taken, item by item."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.window.facts import NO_BYTES, SavedBytes
from gockpt_jax.window.late import take_late
from gockpt_jax.window.open_window import OpenWindow
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.slots import ChunkSlot, give_back


class Taken(NamedTuple):
    """What a save has taken of one item.

    Attributes:
      record: The save's.
      slots: Of each array.
      audit: What it has shown of those that left early, complete once their slots are; `None` if
        there is none.
    """

    record: SaveRecord
    slots: list[list[ChunkSlot]]
    audit: dict[str, Any] | None


class Seal:
    """One save while its items are taken; on the trainer's thread.

    Args:
      window: The one that ends here; `None` for a snapshot.
      record: The save's.
      resources: The session's.

    Attributes:
      items: Of each item so far, its arrays, by their ids.
      taken: Bytes of them all.
    """

    def __init__(self, window: OpenWindow | None, record: SaveRecord, resources: Resources):
        self._window = window
        self._record = record
        self._resources = resources
        self.items: list[set[int]] = []
        self.taken = NO_BYTES
        if window is None:  # a window's peaks are measured from its opening on
            resources.measure_from_now(record)
        record.sealed_at = time.perf_counter()

    def take(self, arrays: Sequence[jax.Array]) -> Taken:
        """Takes one item's arrays.

        Args:
          arrays: Those to be saved. The ones that the last update returned, by identity, and that
            left early and were followed all the way, come from the window; all others are staged
            now.

        Raises:
          HostBudgetError: if the user's host budget cannot hold the save even alone.
        """
        record = self._record
        to = self._resources
        distinct = {id(a): a for a in arrays}  # one that lies in several places is taken once
        self.items.append(set(distinct))
        self.taken = self.taken.plus(SavedBytes.of(distinct.values(), to.replicas))
        owned = {i: to.replicas.source(a).owned_bytes for i, a in distinct.items()}
        taken_bytes = sum(owned.values())
        to.host.admit_save(record.taken_bytes + taken_bytes)
        slots: dict[int, list[ChunkSlot]] = {}
        audit: dict[str, Any] | None = None
        try:
            if self._window is not None:
                audit = self._window.take_early(arrays, slots)
            record.early_leaves += len(slots)
            record.num_arrays += len(arrays)
            record.state_bytes += sum(owned[id(a)] for a in arrays)
            record.taken_bytes += taken_bytes
            record.early_bytes += sum(owned[id(a)] for a in arrays if id(a) in slots)
            record.host_budget_bytes = to.host.limit_bytes
            with events.span(events.SPAN_SEAL):
                # Of an array on other processes' devices alone there is nothing to take.
                slots.update((id(a), []) for a in arrays if not a.sharding.addressable_devices)
                late = [a for i, a in distinct.items() if i not in slots]
                slots |= take_late(late, to)
            to.worker.submit(record.drained)
            return Taken(record, [slots[id(a)] for a in arrays], audit)
        except BaseException:  # nobody will write what has been taken
            give_back([slot for found in slots.values() for slot in found], to.host)
            raise

    def end(self) -> None:
        """All items have been taken; what the save did not ask for is forgotten."""
        if self._window is not None:
            self._window.drop()
