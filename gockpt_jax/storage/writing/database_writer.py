"""Writes this process's part of an OCDBT database, all but the values, which `DirectFiles` writes.

Stock's handlers write what is no array into the database of the process, too. So ours is one of its
own in there, and its index joins that of the other, as Orbax does with those of the processes.
"""

import functools
import importlib.metadata
import logging
from collections.abc import Sequence

import numpy as np
import tensorstore as ts

from gockpt_jax.storage.files.database import Extent, Extents
from gockpt_jax.storage.files.direct import DirectFiles
from gockpt_jax.storage.writing import spec as spec_lib
from gockpt_jax.storage.writing.array_layout import ItemLayout
from gockpt_jax.storage.writing.database_index import (
    DatabaseIndex,
    PlacedArray,
    key_of,
    make_index,
)
from gockpt_jax.storage.writing.leaf_writer import to_the_end

_log = logging.getLogger("gockpt_jax")
_FOLDER = "direct/"
_KEPT = 4  # indexes


class DatabaseWriter:
    """One save's.

    Args:
      item: What is saved.
      index: Of the database.
      files: Of the save.
    """

    def __init__(self, item: ItemLayout, index: DatabaseIndex, files: DirectFiles) -> None:
        self._item = item
        self._index = index
        self._folder = f"{spec_lib.process_folder(item)}{_FOLDER}"
        for path, (nbytes, offsets) in index.data_files.items():
            files.share(f"{self._folder}{path}", nbytes, offsets)
        for path, content in index.files.items():
            files.write(f"{self._folder}{path}", np.frombuffer(content, np.uint8)).result()

    def extents_of(self, name: str) -> Extents:
        """Returns where the values of a leaf belong."""
        return functools.partial(self._extent, name)

    def _extent(self, name: str, key: str) -> Extent:
        extent = self._index.extents[key_of(name, key)]
        return Extent(f"{self._folder}{extent.path}", extent.offset, extent.nbytes)

    async def join(self, context: ts.Context) -> None:
        """Has the process's database tell of these values; they need not be there yet."""
        specs = spec_lib.database_in(self._folder), spec_lib.process_database(self._item)
        ours, whole = [await to_the_end(ts.KvStore.open(s, context=context)) for s in specs]
        await to_the_end(ours.experimental_copy_range_to(whole))


class DatabaseIndexes:
    """Makes indexes; a run saves the same arrays again and again.

    Those of the last few trees are kept, for the items of a step are written at the same time.
    """

    def __init__(self) -> None:
        self._known: Sequence[tuple[Sequence[PlacedArray], int, DatabaseIndex | None]] = ()

    def of(self, arrays: Sequence[PlacedArray], data_file_bytes: int) -> DatabaseIndex | None:
        """Returns the index of a database with these arrays; None where only TensorStore can."""
        for *made_of, index in self._known:
            if made_of == [arrays, data_file_bytes]:
                return index
        index = make_index(arrays, data_file_bytes)
        if index is None:
            _log.warning(
                "TensorStore %s lays out values in a database otherwise than gockpt_jax knows, so"
                " it has to write them: checkpoints are the same, saves take longer. Those of plain"
                " files do not (`use_ocdbt=False`).",
                importlib.metadata.version("tensorstore"),
            )
        self._known = ((arrays, data_file_bytes, index), *self._known[: _KEPT - 1])
        return index
