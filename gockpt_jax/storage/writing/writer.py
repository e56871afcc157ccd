"""Writes host arrays exactly where and how stock Orbax would write the `jax.Array`s.

Only the source of the bytes differs: they come shard by shard, through futures. What lies on disk
(keys, values, `_METADATA`, `_sharding`, `array_metadatas`) is what stock would have written, so
stock restores it; see `spec.py` for the layout.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from gockpt_jax.options import as_count
from gockpt_jax.storage.files.direct import DirectFiles
from gockpt_jax.storage.writing import spec as spec_lib
from gockpt_jax.storage.writing.array_layout import (
    ArrayLayout,
    ItemLayout,
    ReplicaLayout,
    array_layout,
    chunk_count,
)
from gockpt_jax.storage.writing.database_writer import DatabaseIndexes, DatabaseWriter
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.leaf_writer import (
    LeafWriter,
    Places,
    first_error_alone,
    named_in_errors,
    open_store,
    to_the_end,
)
from gockpt_jax.storage.writing.write_budget import (
    DEFAULT_WRITE_LIMIT_BYTES,
    WriteBudget,
    WriteStats,
    collected_here,
)
from gockpt_jax.transfer.budget import ByteBudget

_LOG = logging.getLogger("gockpt_jax")
_MANY_FILES = 10_000  # in one save, and per 10**12 bytes: backups, quotas and deletion suffer


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One leaf of a save, with all that Orbax says about it."""

    array: HostArray
    info: ocp.type_handlers.ParamInfo
    args: ocp.SaveArgs


class HostArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]  # Orbax is untyped.
    """Orbax's type handler for `HostArray`: stock's for `jax.Array` with another `serialize`.

    It answers to the same type name, "jax.Array", so `_METADATA` names a type that stock knows. It
    takes the arguments of stock's `ArrayHandler` that fix what is written, with their meanings, so
    that registries of Orbax's own (its emergency and peer-to-peer managers') can be built with it.

    Args:
      write_limit_bytes: See `WindowOptions.write_limit_bytes`.
      chunk_byte_size: The largest chunk in bytes where the save's `ocp.SaveArgs` say nothing.
        None: 256 MiB where a chunk is stored as its values and nothing else, for those are
        written and read in pieces; else 64 MiB.
      primary_host: The process that writes what is common to all; None if every one has its own
        storage. As in `ocp.options.MultiprocessingOptions`.
      replica_id: As in stock. Which replica writes is settled by the shards that a `HostArray`
        is given, so every value writes those.
      use_replica_parallel: Whether chunks are slices of replicas; None: as stock would here.
      min_slice_bytes_for_replica_parallel: As in stock.
      max_replicas_for_replica_parallel: As in stock.
      write_array_metadatas: Whether to write `array_metadatas`, as stock's own handler does; one
        that a user makes (`ocp.type_handlers.ArrayHandler()`) does not.
      host: Accounts for what is in flight beside all else that saves hold; None: nobody does.

    Raises:
      ValueError: `write_limit_bytes` or `chunk_byte_size` is not positive.
    """

    def __init__(
        self,
        *,
        write_limit_bytes: int = DEFAULT_WRITE_LIMIT_BYTES,
        chunk_byte_size: int | None = None,
        primary_host: int | None = 0,
        replica_id: int | None = 0,
        use_replica_parallel: bool | None = None,
        min_slice_bytes_for_replica_parallel: int | None = None,
        max_replicas_for_replica_parallel: int | None = None,
        write_array_metadatas: bool = True,
        host: ByteBudget | None = None,
    ) -> None:
        super().__init__(primary_host=primary_host, replica_id=replica_id)
        for name, value in (
            ("write_limit_bytes", write_limit_bytes),
            ("chunk_byte_size", chunk_byte_size),
        ):
            if value is not None:
                as_count(name, value, "It is a number of bytes.")
        self._write_limit_bytes = write_limit_bytes
        self._host = host
        self._chunk_byte_size = chunk_byte_size
        self.primary_host = primary_host
        self.is_primary = ocp.multihost.is_primary_host(primary_host)
        self._replica_layout = ReplicaLayout.of(
            use_replica_parallel=use_replica_parallel,
            min_slice_bytes_for_replica_parallel=min_slice_bytes_for_replica_parallel,
            max_replicas_for_replica_parallel=max_replicas_for_replica_parallel,
        )
        self._write_array_metadatas = write_array_metadatas
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

        Raises:
          ValueError: A leaf is empty or local to this process: stock refuses to save those too.
        """
        args = args or [ocp.SaveArgs()] * len(values)
        leaves = [_Leaf(*leaf) for leaf in zip(values, infos, args, strict=True)]
        _check_savable(leaves)
        # The directory may not exist yet. This future waits for Orbax's word that it does.
        future = ocp.future.CommitFutureAwaitingContractedSignals(
            self._write_all(leaves, collected_here()), name="gockpt_host_array_write"
        )
        return [future]

    async def _write_all(self, leaves: Sequence[_Leaf], stats: WriteStats) -> None:
        item = ItemLayout.of(leaves[0].info)  # asked for once: a path of Orbax's is slow to make
        budget = WriteBudget(self._write_limit_bytes, stats, self._host)
        files = DirectFiles(item.folder, self._write_limit_bytes)
        try:
            for leaf in leaves:
                await _directory_exists(leaf.info)
            async with first_error_alone(), asyncio.TaskGroup() as group:
                layouts = [self._layout(leaf, item) for leaf in leaves]
                if self.is_primary and not item.use_ocdbt:
                    self._advise_on_files(layouts)
                places = self._places(leaves, layouts, files, group)
                for leaf, layout in zip(leaves, layouts, strict=True):
                    group.create_task(
                        self._write_leaf(
                            leaf, layout, places.get(layout.name), budget, files, group
                        )
                    )
                    await asyncio.sleep(0)  # its chunks begin while other leaves are made ready
                if self.is_primary:
                    group.create_task(_write_shardings(leaves, item.folder))
                if self._write_array_metadatas:
                    _write_array_metadatas(leaves[0].info, layouts)
            with budget.syncing():
                await to_the_end(asyncio.to_thread(files.sync))
        finally:
            # Tasks that were cancelled before they began have released nothing.
            for leaf in leaves:
                leaf.array.release()
            files.close()

    def _layout(self, leaf: _Leaf, item: ItemLayout) -> ArrayLayout:
        return array_layout(
            leaf.array, leaf.info.name, leaf.args, item, self._replica_layout, self._chunk_byte_size
        )

    def _advise_on_files(self, layouts: Sequence[ArrayLayout]) -> None:
        """Says once where files become too many: small leaves, or leaves cut into small shards."""
        count = sum(1 + chunk_count(layout.shape, layout.chunk) for layout in layouts)
        nbytes = sum(math.prod(layout.shape) * layout.dtype.itemsize for layout in layouts)
        if self._is_advice_given or count <= _MANY_FILES * max(1, nbytes / 10**12):
            return
        self._is_advice_given = True
        _LOG.warning(
            "A save makes %d files, %.1f MB each on average. An OCDBT database has far fewer:"
            " `pytree_options={'use_ocdbt': True}`, or the same keyword of `GoCkptHandler`.",
            count,
            nbytes / count / 1e6,
        )

    def _places(
        self,
        leaves: Sequence[_Leaf],
        layouts: Sequence[ArrayLayout],
        files: DirectFiles,
        group: asyncio.TaskGroup,
    ) -> Mapping[str, Places]:
        """Where values are written without TensorStore, by leaf; begins their database."""
        direct, item = [], layouts[0].item
        for leaf, layout in zip(leaves, layouts, strict=True):
            with named_in_errors(layout.name):
                boxes = leaf.array.boxes()
            is_ours = bool(boxes) or self.is_primary
            if is_ours and spec_lib.is_written_as_it_is(layout, boxes):
                direct.append((layout, boxes))
        if not (direct and item.use_ocdbt):
            return {layout.name: spec_lib.folder_places(layout) for layout, _ in direct}
        arrays = [spec_lib.placed_array(*one, self.is_primary) for one in direct]
        index = self._indexes.of(arrays, item.written_file_bytes)
        if index is None:
            return {}
        database = DatabaseWriter(item, index, files)
        group.create_task(database.join(_context(leaves[0].info, item)))
        return {layout.name: database.places_of(layout.name) for layout, _ in direct}

    async def _write_leaf(
        self,
        leaf: _Leaf,
        layout: ArrayLayout,
        places: Places | None,
        budget: WriteBudget,
        files: DirectFiles,
        group: asyncio.TaskGroup,
    ) -> None:
        """Opens the leaf's array and starts one task per shard."""
        context = _context(leaf.info, layout.item)
        with named_in_errors(layout.name):
            spec = spec_lib.array_spec(layout)
            if self.is_primary:
                if place := spec_lib.metadata_place(layout, places):
                    text = np.frombuffer(spec_lib.metadata_text(spec), np.uint8)
                    files.write(place.path, text, place.offset).result()
                else:
                    await open_store(spec, context, create=True, open=True)
            target = places or await open_store(spec, context, open=True, assume_metadata=True)
        writer = LeafWriter(layout, budget, target, files)
        for shard, box in zip(leaf.array.shards, leaf.array.boxes(), strict=True):
            group.create_task(writer.write_shard(shard, box))


def _context(info: ocp.type_handlers.ParamInfo, item: ItemLayout) -> ts.Context:
    """Sharing the save's makes stock's handlers share one OCDBT database with ours, too."""
    made: ts.Context = info.ts_context
    return made or ocp.type_handlers.get_ts_context(use_ocdbt=item.use_ocdbt)


def _check_savable(leaves: Sequence[_Leaf]) -> None:
    """Raises for leaves that stock refuses, naming all of them at once."""
    empty = [leaf.info.name for leaf in leaves if not leaf.array.size]
    if empty:
        raise ValueError(f"Cannot save arrays with zero size (nor can stock Orbax): {empty}.")
    if jax.process_count() == 1:
        return
    local = [leaf.info.name for leaf in leaves if leaf.array.sharding.is_fully_addressable]
    if local:
        raise ValueError(
            f"Cannot save arrays that live in one of several processes only: {local}. Make global"
            " arrays of them, for example with `jax.make_array_from_process_local_data`."
        )


async def _directory_exists(info: ocp.type_handlers.ParamInfo) -> None:
    """Waits for the save's directory; older Orbax creates it before it calls us."""
    if hasattr(info, "await_path_creation"):
        await info.await_path_creation()


def _write_array_metadatas(
    info: ocp.type_handlers.ParamInfo, layouts: Sequence[ArrayLayout]
) -> None:
    """Writes the file from which Orbax takes write shapes and PRNG implementations."""
    folder = info.parent_dir / "array_metadatas"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"array_metadatas": [layout.metadata() for layout in layouts]})
    (folder / f"process_{jax.process_index()}").write_text(text)


async def _write_shardings(leaves: Sequence[_Leaf], folder: str) -> None:
    """Writes the `_sharding` file, by which stock restores without a target."""
    texts = {
        spec_lib.sharding_key(leaf.info.name): text
        for leaf in leaves
        if (text := spec_lib.sharding_text(leaf.array.sharding)) is not None
    }
    if texts:
        spec = spec_lib.sharding_spec(folder)
        store = await open_store(spec, leaves[0].info.ts_context, open=True)
        await to_the_end(store.write(np.array(texts, object)))
