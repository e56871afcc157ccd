"""Orbax's type handler of host arrays, written where and how stock would write the `jax.Array`s.

Only the source of the bytes differs: they come shard by shard, as promised. What lies on disk
(keys, values, `_METADATA`, `_sharding`, `array_metadatas`) is what stock would have written, so
stock restores it; see `array_layout.py` and `spec.py`.
"""

import asyncio
import logging
import math
from collections.abc import Sequence

import orbax.checkpoint as ocp

from gockpt_jax.checks import as_count
from gockpt_jax.storage.files.direct import DirectFiles
from gockpt_jax.storage.writing.array_layout import (
    ArrayLayout,
    ItemLayout,
    ReplicaLayout,
    array_layout,
    chunk_count,
)
from gockpt_jax.storage.writing.database_writer import DatabaseIndexes
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.leaf_writer import to_the_end
from gockpt_jax.storage.writing.tree_writer import Leaf, TreeWriter
from gockpt_jax.storage.writing.write_budget import (
    WriteBudget,
    WriteStats,
    collected_here,
)
from gockpt_jax.transfer.budget import ByteBudget

_log = logging.getLogger("gockpt_jax")
_MANY_FILES = 10_000  # in one save, and per 10**12 bytes: backups, quotas and deletion suffer


class HostArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]  # Orbax is untyped.
    """Orbax's type handler for `HostArray`: stock's for `jax.Array` with another `serialize`.

    It answers to the same type name, "jax.Array", so `_METADATA` names a type that stock knows.

    Args:
      write_limit_bytes: See `WindowOptions.write_limit_bytes`.
      chunk_byte_size: The largest chunk in bytes where the save's `ocp.SaveArgs` say nothing.
        None: 256 MiB where a chunk is stored as its values and nothing else, for those are
        written and read in pieces; else 64 MiB.
      replica_layout: Whether chunks are slices of replicas. Which replica writes one is settled by
        the shards that a `HostArray` is given.
      primary_host: The process that writes what is common to all; None if every one has its own
        storage. As in `ocp.options.MultiprocessingOptions`.
      host: Accounts for what is in flight beside all else that saves hold; None: nobody does.

    Raises:
      ValueError: `write_limit_bytes` or `chunk_byte_size` is not positive.
    """

    def __init__(
        self,
        *,
        write_limit_bytes: int,
        chunk_byte_size: int | None,
        replica_layout: ReplicaLayout,
        primary_host: int | None,
        host: ByteBudget | None,
    ) -> None:
        super().__init__(primary_host=primary_host)
        as_count("write_limit_bytes", write_limit_bytes, "It is a number of bytes.")
        if chunk_byte_size is not None:
            as_count("chunk_byte_size", chunk_byte_size, "It is a number of bytes.")
        self._write_limit_bytes = write_limit_bytes
        self._host = host
        self._chunk_byte_size = chunk_byte_size
        self._is_primary = ocp.multihost.is_primary_host(primary_host)
        self._replica_layout = replica_layout
        self._is_advice_given = False
        self._indexes = DatabaseIndexes()

    def memory_size(self, values: Sequence[HostArray]) -> list[tuple[int, int]]:
        """Returns the bytes to write and to read per value, which Orbax before 0.12.2 asks for."""
        sizes = [math.prod(v.sharding.shard_shape(v.shape)) * v.dtype.itemsize for v in values]
        return [(nbytes, nbytes) for nbytes in sizes]

    async def serialize(
        self,
        values: Sequence[HostArray],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        """Starts writing `values` on a thread of Orbax's; the future resolves when all is written.

        The future raises what the first failing shard or write raised, with the leaf's name added
        as a note. Whatever happens, every shard has been released when it resolves.
        """
        args = args or [ocp.SaveArgs()] * len(values)
        # The directory may not exist yet. This future waits for Orbax's word that it does.
        future = ocp.future.CommitFutureAwaitingContractedSignals(
            self._write_all(values, infos, args, collected_here()), name="gockpt_host_array_write"
        )
        return [future]

    async def _write_all(
        self, arrays: Sequence[HostArray], infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs], stats: WriteStats,
    ) -> None:  # fmt: skip
        item = ItemLayout.of(infos[0])  # asked for once: a path of Orbax's is slow to make
        budget = WriteBudget(self._write_limit_bytes, stats, self._host)
        files = DirectFiles(item.folder, self._write_limit_bytes)
        try:
            stats.require_wanted()
            replica_layout, chunk_bytes = self._replica_layout, self._chunk_byte_size
            leaves = [
                Leaf.of(x, array_layout(x, info.name, asked, item, replica_layout, chunk_bytes))
                for x, info, asked in zip(arrays, infos, args, strict=True)
            ]
            if self._is_primary and not item.use_ocdbt:
                self._advise_on_files([leaf.layout for leaf in leaves])
            # With the save's, stock's handlers share one OCDBT database with ours, too.
            context = infos[0].ts_context
            writer = TreeWriter(item, leaves, budget, files, context, self._is_primary)
            await writer.write(self._indexes)
            with budget.syncing():
                await to_the_end(asyncio.to_thread(files.sync))
        finally:
            # Tasks that were cancelled before they began have released nothing.
            for array in arrays:
                array.release()
            files.close()

    def _advise_on_files(self, layouts: Sequence[ArrayLayout]) -> None:
        """Says once where files become too many: small leaves, or leaves cut into small shards."""
        count = sum(1 + chunk_count(layout.shape, layout.chunk) for layout in layouts)
        nbytes = sum(math.prod(layout.shape) * layout.dtype.itemsize for layout in layouts)
        if self._is_advice_given or count <= _MANY_FILES * max(1, nbytes / 10**12):
            return
        self._is_advice_given = True
        _log.warning(
            "A save makes %d files, %.1f MB each on average. An OCDBT database has far fewer:"
            " `pytree_options={'use_ocdbt': True}`, or the same keyword of `GoCkptHandler`.",
            count,
            nbytes / count / 1e6,
        )
