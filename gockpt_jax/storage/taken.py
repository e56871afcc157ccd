"""An item whose state has been taken from the devices, and which is written now or later."""

import dataclasses

import jax
import orbax.checkpoint as ocp

from gockpt_jax.storage.host_array import HostArray
from gockpt_jax.telemetry.report import PendingReport


@dataclasses.dataclass
class TakenSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Arguments of a save whose state is on the host, or on its way there.

    No step can change it any more. It is written once, or released.

    Attributes:
      save: What the stock tree handler is given; its arrays are `HostArray`s.
      pending: The report of the save that it belongs to.
    """

    save: ocp.args.PyTreeSave
    pending: PendingReport

    @property
    def arrays(self) -> list[HostArray]:
        """The leaves that were arrays on devices."""
        return [x for x in jax.tree.leaves(self.save.item) if isinstance(x, HostArray)]

    def failure(self) -> BaseException | None:
        """What went wrong on the way to the host, as far as it is known by now."""
        for array in self.arrays:
            for shard in array.shards:
                if not shard.released and shard.data.done() and shard.data.exception() is not None:
                    return shard.data.exception()
        return None

    def release(self) -> None:
        """Gives the bytes back, those on their way as soon as they have landed."""
        for array in self.arrays:
            array.release()
