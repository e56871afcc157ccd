"""The checkpoint handler: seals the window inside Orbax's own save, and lets stock do the rest."""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from gockpt_jax.storage.host_array import HostArray, HostShard
from gockpt_jax.storage.tree_handler import make_tree_handler
from gockpt_jax.storage.write_budget import WriteStats
from gockpt_jax.telemetry.report import PendingReport, ReportLog, SaveRecord
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.window.session import Session
from gockpt_jax.window.slots import ChunkSlot


class GoCkptHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]  # Orbax is untyped.
    """Saves trees of arrays through a window; restores like `ocp.StandardCheckpointHandler`.

    Args:
      session: Holds the window that `save` seals.
      log: Where the reports go.
      write_limit_bytes: Bytes handed to TensorStore at one time.
      **options: Keywords of `ocp.PyTreeCheckpointHandler` (`use_ocdbt`, `use_zarr3`, ...).
    """

    def __init__(self, session: Session, log: ReportLog, *, write_limit_bytes: int, **options: Any):
        self._session = session
        self._log = log
        self._tree, self._writer = make_tree_handler(write_limit_bytes=write_limit_bytes, **options)
        self._standard = ocp.StandardCheckpointHandler()
        # What `_CHECKPOINT_METADATA` names: stock restores without arguments by it.
        self.typestr = ocp.StandardCheckpointHandler.typestr
        self.label = -1  # of the save that is about to begin
        self.pending: PendingReport | None = None  # of the last save that began

    async def async_save(self, directory: Any, args: "GoCkptSave") -> Sequence[ocp.future.Future]:
        """Seals the window (or takes a snapshot) and starts writing what becomes final."""
        entered_at = time.perf_counter()
        leaves, tree = jax.tree.flatten(args.item)
        positions = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        record, slots = self._session.seal([leaves[i] for i in positions])
        self.pending = PendingReport(record, self.label, entered_at, self._log)
        for i, promised in zip(positions, slots, strict=True):
            leaves[i] = _host_array(leaves[i], promised, self._session.host)
        stock = ocp.args.PyTreeSave(
            jax.tree.unflatten(tree, leaves),
            save_args=args.save_args,
            custom_metadata=args.custom_metadata,
        )
        futures = await self._tree.async_save(directory, args=stock)
        return [_Written(futures or (), record, self._writer.take_stats())]

    def save(self, directory: Any, args: "GoCkptSave") -> None:
        """Saves and waits; used where asynchronous checkpointing is switched off."""

        async def save_and_wait() -> None:
            for future in await self.async_save(directory, args):
                future.result()

        asyncio.run(save_and_wait())

    def restore(self, directory: Any, args: "GoCkptRestore | None" = None) -> Any:
        """Restores as stock does; without a target, as it was saved."""
        return self._standard.restore(directory, args=(args or GoCkptRestore()).as_stock())

    def metadata(self, directory: Any) -> Any:
        """Shapes, dtypes and shardings of a checkpoint, as stock gives them."""
        return self._standard.metadata(directory)

    def finalize(self, directory: Any) -> None:
        """Orbax's own: merges what the processes wrote."""
        self._tree.finalize(directory)

    def close(self) -> None:
        """Closes the stock handlers inside."""
        self._tree.close()
        self._standard.close()


@ocp.args.register_with_handler(GoCkptHandler, for_save=True)
@dataclasses.dataclass
class GoCkptSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to save: arguments of `GoCkptManager.save`, like `ocp.args.StandardSave`.

    Attributes:
      item: Any tree. Arrays that the last wrapped step returned leave through the window; all other
        leaves are saved as stock saves them.
      save_args: A tree of `ocp.SaveArgs`, as in `ocp.args.PyTreeSave`.
      custom_metadata: JSON to store beside the tree, as in `ocp.args.PyTreeSave`.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@ocp.args.register_with_handler(GoCkptHandler, for_restore=True)
@dataclasses.dataclass
class GoCkptRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to restore: arguments of `GoCkptManager.restore`, like `ocp.args.StandardRestore`.

    Attributes:
      item: A tree of arrays or `jax.ShapeDtypeStruct`s to restore into, with their shardings;
        `None`: as it was saved.
      strict: Whether a stored shape other than the target's is an error (or padded, truncated).
      support_layout: Whether to restore device layouts.
      fallback_sharding: Placement of arrays whose stored sharding does not exist here.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None

    def as_stock(self) -> ocp.args.StandardRestore:
        """The stock arguments with the same meaning."""
        return ocp.args.StandardRestore(
            self.item, self.strict, self.support_layout, self.fallback_sharding
        )


def _host_array(array: jax.Array, slots: Sequence[ChunkSlot], host: ByteBudget) -> HostArray:
    spec = HostArray.spec_like(array)
    shards = []
    for slot in slots:
        release = functools.partial(_release_when_known, slot, host)
        shards.append(HostShard(slot.index, slot.data, release))
    return HostArray(spec.shape, spec.dtype, spec.sharding, shards, spec.key_impl)


def _release_when_known(slot: ChunkSlot, host: ByteBudget) -> None:
    """Gives a chunk's bytes back to the host's account, once it has landed."""
    slot.data.add_done_callback(
        lambda future: None if future.exception() else host.release(future.result().nbytes)
    )


class _Written(ocp.future.Future):  # type: ignore[misc]
    """All of a save's writes, with the time at which the last one ended."""

    def __init__(self, futures: Sequence[Any], record: SaveRecord, stats: WriteStats):
        self._futures = futures
        self._record = record
        self._stats = stats

    def result(self, timeout: float | None = None) -> None:
        """Waits for every write; raises what the first failing one raised."""
        try:
            for future in self._futures:
                future.result(timeout)
        finally:
            self._record.write_secs = self._stats.write_secs
            self._record.written_bytes = self._stats.written_bytes
            self._record.written_at = time.perf_counter()
