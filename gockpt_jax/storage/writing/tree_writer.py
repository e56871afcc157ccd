"""One save of a tree of host arrays: the values of its leaves, and what says what they are."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import tensorstore as ts
from etils import epath

from gockpt_jax.storage.files import grid
from gockpt_jax.storage.files.database import Extents, files_in
from gockpt_jax.storage.files.direct import DirectFiles
from gockpt_jax.storage.writing import spec as spec_lib
from gockpt_jax.storage.writing.array_layout import ArrayLayout, ItemLayout
from gockpt_jax.storage.writing.arrivals import Arrivals
from gockpt_jax.storage.writing.database_writer import DatabaseIndexes, DatabaseWriter
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.leaf_writer import (
    LeafWriter,
    first_error_alone,
    named_in_errors,
    open_store,
    to_the_end,
)
from gockpt_jax.storage.writing.write_budget import WriteBudget


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf: its values, and where they are stored.

    Attributes:
      array: The values.
      layout: Where they are stored.
      boxes: Of the array, those that this process writes.
    """

    array: HostArray
    layout: ArrayLayout
    boxes: Sequence[grid.Box]

    @classmethod
    def of(cls, array: HostArray, layout: ArrayLayout) -> "Leaf":
        """Raises `ValueError` if the array's shards are not what this process must write."""
        with named_in_errors(layout.name):
            return cls(array, layout, array.boxes())


@dataclasses.dataclass(frozen=True)
class TreeWriter:
    """Writes the leaves of an item; belongs to one save.

    Attributes:
      item: What the leaves have in common.
      leaves: All of the item's.
      budget: The bytes in flight.
      files: Writes values without TensorStore.
      context: TensorStore's, of the save.
      is_primary: Whether this process writes what is common to all.
    """

    item: ItemLayout
    leaves: Sequence[Leaf]
    budget: WriteBudget
    files: DirectFiles
    context: ts.Context
    is_primary: bool

    async def write(self, indexes: DatabaseIndexes) -> None:
        """Writes all of it; values that `files` writes are durable after its `sync`.

        Args:
          indexes: Of databases, as earlier saves have made them.
        """
        async with first_error_alone(), asyncio.TaskGroup() as group:
            extents = self._extents(indexes, group)
            count = sum(len(leaf.boxes) for leaf in self.leaves)
            is_direct = all(x.layout.name in extents for x in self.leaves if x.boxes)
            arrivals = Arrivals(count, group, is_direct=is_direct)
            for leaf in self.leaves:
                group.create_task(self._begin_leaf(leaf, extents.get(leaf.layout.name), arrivals))
                await asyncio.sleep(0)  # its chunks begin while other leaves are made ready
            if self.is_primary:
                group.create_task(self._write_shardings())
            self._write_array_metadatas()

    def _extents(self, indexes: DatabaseIndexes, group: asyncio.TaskGroup) -> Mapping[str, Extents]:
        """Where values are written without TensorStore, by leaf; begins their database."""
        direct = [
            leaf
            for leaf in self.leaves
            if (leaf.boxes or self.is_primary)
            and spec_lib.is_written_as_it_is(leaf.layout, leaf.boxes)
        ]
        if not (direct and self.item.use_ocdbt):
            return {leaf.layout.name: files_in(leaf.layout.path) for leaf in direct}
        arrays = [spec_lib.placed_array(x.layout, x.boxes, self.is_primary) for x in direct]
        index = indexes.of(arrays, self.item.written_file_bytes)
        if index is None:
            return {}
        database = DatabaseWriter(self.item, index, self.files)
        group.create_task(database.join(self.context))
        return {leaf.layout.name: database.extents_of(leaf.layout.name) for leaf in direct}

    async def _begin_leaf(self, leaf: Leaf, extents: Extents | None, arrivals: Arrivals) -> None:
        """Opens the leaf's array, and has its shards written as they come."""
        layout, context = leaf.layout, self.context
        with named_in_errors(layout.name):
            spec = spec_lib.array_spec(layout)
            if self.is_primary:
                if extent := spec_lib.metadata_extent(layout, extents):
                    text = np.frombuffer(spec_lib.metadata_text(spec), np.uint8)
                    self.files.write(extent.path, text, extent.offset).result()
                else:
                    await open_store(spec, context, create=True, open=True)
            target = extents or await open_store(spec, context, open=True, assume_metadata=True)
            writer = LeafWriter(layout, self.budget, target, self.files)
            for shard, box in zip(leaf.array.shards, leaf.boxes, strict=True):
                arrivals.expect(writer, shard, box)

    def _write_array_metadatas(self) -> None:
        """Writes the file from which Orbax takes write shapes and PRNG implementations."""
        folder = epath.Path(self.item.folder) / "array_metadatas"
        folder.mkdir(parents=self.item.is_in_bucket, exist_ok=True)  # as for the checksums
        text = json.dumps({"array_metadatas": [leaf.layout.metadata() for leaf in self.leaves]})
        (folder / f"process_{jax.process_index()}").write_text(text)

    async def _write_shardings(self) -> None:
        """Writes the `_sharding` file, by which stock restores without a target."""
        texts = {
            spec_lib.sharding_key(leaf.layout.name): text
            for leaf in self.leaves
            if (text := spec_lib.sharding_text(leaf.array.sharding)) is not None
        }
        if texts:
            spec = spec_lib.sharding_spec(self.item.folder)
            store = await open_store(spec, self.context, open=True)
            await to_the_end(store.write(np.array(texts, object)))
