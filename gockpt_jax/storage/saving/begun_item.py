"""One item of a save that has begun: how far it is, and how it is given up."""

import dataclasses
from collections.abc import Sequence

from gockpt_jax.storage.saving.hand_over import HandedOver
from gockpt_jax.storage.saving.written import Written
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.write_budget import WriteStats
from gockpt_jax.telemetry.save_record import PendingReport


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
    arrays: Sequence[HostArray]
    pending: PendingReport
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
        self.pending.failed(error)

    def has_ended(self, error: BaseException) -> None:
        """Its save has: as it is known already, or with an error."""
        if self.pending.is_finished:
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
        return not self.may_write and self.pending.is_finished

    def wait(self, secs: float | None) -> None:
        """Returns when nothing of it is being written any more, however it has ended."""
        if self.handed_over is not None:
            self.handed_over.wait(secs)
        if self.written is not None:  # now, if it was not before
            self.written.wait(secs)
