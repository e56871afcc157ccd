"""The index of an OCDBT database, made before its values are there: so they can go to their places.

TensorStore makes it, in memory, of a database that holds placeholders: as long as the values that
will come, they are views of memory that nobody touches, and so take none. Then it is written beside
the values, and the database is like any other of TensorStore's.
"""

import dataclasses
import itertools
import math
import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from gockpt_jax.storage.files import grid
from gockpt_jax.storage.files.aligned import BLOCK_BYTES
from gockpt_jax.storage.files.database import Extent, values_of
from gockpt_jax.storage.files.direct import SMALL_BYTES

_VALUES = "v/"
# Large values begin with a block of their file, as `O_DIRECT` asks, and with a page: where one of
# them went through the page cache after all, its neighbour's bytes are in no page of it.
_PAGE_BYTES = max(BLOCK_BYTES, mmap.PAGESIZE)


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """An array, some chunks of which will be in a database.

    Attributes:
      name: Its keys begin with it.
      spec: Of TensorStore, without the store.
      chunk: The shape of its chunks.
      dtype: Of its values, as stored.
      cells: Its chunks.
      metadata: What will be under its name and `.zarray`; None where that is in another database.
    """

    name: str
    spec: Mapping[str, Any]
    chunk: tuple[int, ...]
    dtype: np.dtype[Any]
    cells: Sequence[grid.Box]
    metadata: bytes | None

    @property
    def chunk_bytes(self) -> int:
        """The length of each chunk."""
        return math.prod(self.chunk) * self.dtype.itemsize

    def values(self) -> Iterator[tuple[str, int]]:
        """Yields the key of each value, without the name, and its length."""
        for cell in self.cells:
            yield grid.key(cell, self.chunk), self.chunk_bytes
        if self.metadata is not None:
            yield ".zarray", len(self.metadata)


@dataclasses.dataclass(frozen=True)
class DatabaseIndex:
    """A database without its values.

    Attributes:
      files: Its manifest and nodes, by their paths in its folder.
      extents: Where the value of each key belongs; paths are relative to its folder.
      data_files: The length of each file of values, and where they begin in it.
    """

    files: Mapping[str, bytes]
    extents: Mapping[str, Extent]
    data_files: Mapping[str, tuple[int, Collection[int]]]


def make_index(arrays: Sequence[PlacedArray], data_file_bytes: int) -> DatabaseIndex | None:
    """Makes the index of a database that will have these chunks, and their metadata, and no more.

    A value of 1 MiB or more begins with a page of its file, as `O_DIRECT` asks.

    Args:
      arrays: Of whole chunks without compression.
      data_file_bytes: A file of so many bytes takes no more values; 0 for no limit.

    Returns:
      None if TensorStore has not put the values one behind another, as all of its versions do that
      we know: then only TensorStore can write them.
    """
    context = ts.Context()  # its memory is that of no other
    placeholder = np.zeros(max((a.chunk_bytes for a in arrays), default=0), np.uint8)
    for file_bytes, commit in _commits(arrays, data_file_bytes):
        store = ts.KvStore.open(_database(file_bytes), context=context).result()
        # All of it at once: what is written by itself is followed by a node of its own.
        with ts.Transaction(atomic=True) as transaction:
            for array in commit:
                _put(array, placeholder, store.with_transaction(transaction))
    store = ts.KvStore.open(_database(data_file_bytes), context=context).result()
    with ts.Transaction(atomic=True) as transaction:
        for array in arrays:
            if array.metadata is not None:
                key = key_of(array.name, ".zarray")
                store.with_transaction(transaction)[key] = array.metadata
    assert store.base is not None
    index = _read(store.base)
    return index if _is_as_expected(index, arrays) else None


def _database(data_file_bytes: int) -> Any:
    return {
        "driver": "ocdbt",
        "base": "memory://",
        # All values are in data files, so that their extents do not depend on what they are.
        "config": {"max_inline_value_bytes": 0, "max_decoded_node_bytes": 100_000_000},
        "target_data_file_size": data_file_bytes,
        "value_data_prefix": _VALUES,
    }


def _put(array: PlacedArray, placeholder: np.ndarray[Any, Any], store: ts.KvStore) -> None:
    """Writes the chunks of an array; what is written is not even looked at."""
    where = store / key_of(array.name, "")
    target = ts.open(array.spec, kvstore=where, open=True, assume_metadata=True).result()
    values = placeholder[: array.chunk_bytes].view(array.dtype).reshape(array.chunk)
    for cell in array.cells:
        target[cell].write(values, can_reference_source_data_indefinitely=True).result()


def key_of(name: str, key: str) -> str:
    """Returns the key of an array's value; the array that is the whole tree has no name."""
    if name in ("", "/"):  # TensorStore takes the one for the other
        return key
    return f"{name}{'' if name.endswith('/') else '/'}{key}"


def _commits(
    arrays: Sequence[PlacedArray], data_file_bytes: int
) -> Iterator[tuple[int, Sequence[PlacedArray]]]:
    """What is put in at once, and so into files of its own; and how long those may be."""
    large = [array for array in arrays if array.chunk_bytes >= SMALL_BYTES]
    yield data_file_bytes, [array for array in large if not array.chunk_bytes % _PAGE_BYTES]
    yield 1, [array for array in large if array.chunk_bytes % _PAGE_BYTES]  # each its own file
    yield data_file_bytes, [array for array in arrays if array.chunk_bytes < SMALL_BYTES]


def _read(files: ts.KvStore) -> DatabaseIndex:
    values = values_of(files)
    extents = {key: extent for key, extent in values.items() if isinstance(extent, Extent)}
    in_files: dict[str, list[Extent]] = {}
    for extent in extents.values():
        in_files.setdefault(extent.path, []).append(extent)
    names = {name.decode() for name in files.list().result()}
    return DatabaseIndex(
        {name: bytes(files[name]) for name in names - in_files.keys()},
        extents,
        {
            path: (
                max(extent.offset + extent.nbytes for extent in inside),
                [extent.offset for extent in inside],
            )
            for path, inside in in_files.items()
        },
    )


def _is_as_expected(index: DatabaseIndex, arrays: Sequence[PlacedArray]) -> bool:
    """Whether there is an extent for each value, as long as it is, and no byte is of two."""
    lengths = {
        key_of(array.name, key): nbytes for array in arrays for key, nbytes in array.values()
    }
    found = {key: extent.nbytes for key, extent in index.extents.items()}
    in_order = sorted(index.extents.values(), key=lambda extent: (extent.path, extent.offset))
    return found == lengths and all(
        one.path != other.path or one.offset + one.nbytes <= other.offset
        for one, other in itertools.pairwise(in_order)
    )
