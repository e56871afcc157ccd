"""A checksum of every chunk, made before TensorStore gets it, and kept inside the checkpoint.

An item of a checkpoint holds, beside what stock Orbax wrote:

    _gockpt_checksums/process_N.json   of each process: leaf, box, dtype and digest of its chunks
    _gockpt_checksums/item.json        of the primary one, before the commit: every file of the
                                       item with its size; the digest of those that are not data

Digests are xxh3 (128 bits) of the little-endian values in C order, as stored and before
compression: independent of the layout on disk. Large ones are made on threads, without the GIL.
Stock never looks into this folder. See docs/decisions/0016.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
import xxhash
from etils import epath

from gockpt_jax.storage.grid import Box
from gockpt_jax.storage.item_files import (
    FOLDER,
    ITEM_FILE,
    file_digests,
    files_of,
    holds_chunks,
    sync_small,
)

FORMAT = "gockpt_jax checksums"
VERSION = 1
ALGORITHM = "xxh3_128"

_PIECE_BYTES = 2**20
# Below this a thread costs more than the digest.
_INLINE_BYTES = 2**18
_DIGEST_THREADS = 2


class ChecksumError(ValueError):
    """The checksums of a checkpoint are damaged or of a version that is not known."""


@dataclasses.dataclass(frozen=True)
class Checksum:
    """That of one chunk: a box of a leaf.

    Attributes:
      start: Its first index in each dimension.
      stop: The index after its last one.
      digest: Hexadecimal, of the values in C order.
      process: Who wrote it.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    digest: str
    process: int = 0

    @property
    def box(self) -> Box:
        """The chunk as an index of the leaf."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


def digest(values: np.ndarray[Any, Any]) -> str:
    """Returns the digest of an array's values; at most 1 MiB is copied where it is not contiguous.

    Example:
      >>> import numpy as np
      >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
      >>> digest(x) == digest(np.asfortranarray(x)) != digest(x + 1)
      True
    """
    return digest_of(_contiguous(values))


def digest_of(pieces: Iterable[np.ndarray[Any, Any]]) -> str:
    """Returns the digest of an array's values that come piece by piece, in C order."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece.reshape(-1).view(np.uint8).data)
    return str(state.hexdigest())


def _contiguous(values: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Cuts an array along its first axes into pieces in C order."""
    if values.dtype.name.endswith(("int2", "int4")):  # NumPy leaves their upper bits undefined.
        values = values.astype(np.int8)
    if values.flags.c_contiguous:
        yield values
    elif values.nbytes <= _PIECE_BYTES or values.ndim < 2:
        yield np.ascontiguousarray(values)
    else:
        for row in values:
            yield from _contiguous(row)


class Checksums:
    """What one process wrote of one item, chunk by chunk.

    Used on the event loop of one save; `add_value` before it starts.
    """

    def __init__(self) -> None:
        self._leaves: dict[str, dict[str, Any]] = {}
        # Faster than a disk, and the first chunk need not wait for the digests of all others.
        self._threads = asyncio.Semaphore(_DIGEST_THREADS)

    async def add(self, name: str, box: Box, data: np.ndarray[Any, Any], dtype: Any = None) -> None:
        """Records a chunk that is about to be written.

        Args:
          name: The leaf's parameter name.
          box: Where the chunk is in the leaf; explicit starts and stops.
          data: Its values.
          dtype: What they are stored as; by default what they are.
        """
        if data.nbytes < _INLINE_BYTES:
            made = _stored_digest(data, dtype)
        else:
            async with self._threads:
                made = await asyncio.to_thread(_stored_digest, data, dtype)
        self.record(name, box, data.dtype if dtype is None else np.dtype(dtype), made)

    def record(self, name: str, box: Box, dtype: np.dtype[Any], made: str) -> None:
        """Records a chunk whose digest is known, as stored with `dtype`."""
        chunks = self._chunks(name, dtype)
        chunks.append([[s.start for s in box], [s.stop for s in box], made])

    def add_value(self, name: str, value: Any, dtype: Any = None) -> None:
        """Records a leaf that stock writes as a whole: a NumPy array or a number."""
        data = np.asarray(value)
        chunks = self._chunks(name, data.dtype if dtype is None else np.dtype(dtype))
        chunks.append([[0] * data.ndim, list(data.shape), _stored_digest(data, dtype)])

    def add_values(self, tree: Any, save_args: Any = None) -> None:
        """Records the leaves of a tree that stock writes itself, on the first process."""
        names = ocp.tree.get_param_names(tree, include_empty_nodes=False)
        if save_args is None:
            save_args = jax.tree.map(lambda _: ocp.SaveArgs(), tree)

        def add(name: str, leaf: Any, args: Any) -> None:
            if isinstance(leaf, np.ndarray | np.generic | int | float | complex):
                self.add_value(name, leaf, getattr(args, "dtype", None))

        jax.tree.map(add, names, tree, save_args)

    def _chunks(self, name: str, dtype: np.dtype[Any]) -> list[Any]:
        leaf = self._leaves.setdefault(name, {"dtype": dtype.name, "chunks": []})
        chunks: list[Any] = leaf["chunks"]
        return chunks

    def write(self, item: Any) -> None:
        """Writes this process's file into the item, which is not visible yet."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "algorithm": ALGORITHM,
            "process_index": jax.process_index(),
            "process_count": jax.process_count(),
            "leaves": self._leaves,
        }
        folder = epath.Path(item) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        (folder / process_file(jax.process_index())).write_text(json.dumps(content))


def _stored_digest(data: np.ndarray[Any, Any], dtype: Any) -> str:
    if dtype is not None and np.dtype(dtype) != data.dtype:
        # TensorStore's own conversion, bit for bit, NaNs included.
        data = ts.cast(ts.array(data), np.dtype(dtype)).read().result()
    return digest(data)


def process_file(index: int) -> str:
    """The name of a process's file."""
    return f"process_{index}.json"


# --- The item's own file ---------------------------------------------------------------------


def seal_item(item: Any, *, shared: bool) -> None:
    """Writes `item.json`, when everything else of the item is there: just before its commit.

    Args:
      item: The item's directory; one without checksums is left as it is.
      shared: Whether all processes write into this directory, or each into its own.

    Raises:
      RuntimeError: The checksums of a process are not there, so its chunks may not be either.
    """
    item = epath.Path(item)
    if not (item / FOLDER).exists():
        return
    count = jax.process_count()
    expected = range(count) if shared else [jax.process_index()]
    missing = [n for n in expected if not (item / FOLDER / process_file(n)).exists()]
    if missing:
        raise RuntimeError(
            f"{item}: processes {missing} of {count} have left no checksums. The save fails; do all"
            " processes write into the same file system?"
        )
    sizes = dict(files_of(item))
    small = [name for name in sizes if not holds_chunks(name)]
    digests = dict(zip(small, file_digests(item, small), strict=True))
    files = {name: [length, digests.get(name)] for name, length in sizes.items()}
    content = {"format": FORMAT, "version": VERSION, "processes": [*expected], "files": files}
    content["digest"] = self_digest(content)
    (item / FOLDER / ITEM_FILE).write_text(json.dumps(content))
    sync_small(item)


def self_digest(content: Mapping[str, Any]) -> str:
    """The digest of `item.json`'s content, without the entry that holds it."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return str(xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode()))


# --- Reading ---------------------------------------------------------------------------------


def parse(text: bytes, where: str) -> dict[str, Any]:
    """Reads one of the files above.

    Raises:
      ChecksumError: It is no such file, or of another version.
    """
    try:
        content = json.loads(text)
        found = (content["format"], content["version"])
    except (ValueError, TypeError, KeyError) as error:
        raise ChecksumError(f"`{where}` is damaged: {error!r}") from error
    if found[0] != FORMAT:
        raise ChecksumError(f"`{where}` is damaged: expected the format {FORMAT!r}.")
    if found[1] != VERSION or content.get("algorithm", ALGORITHM) != ALGORITHM:
        raise ChecksumError(
            f"`{where}` has version {found[1]} and algorithm {content.get('algorithm')}; this"
            f" gockpt_jax reads version {VERSION} and {ALGORITHM}. Install the one that wrote it."
        )
    return dict(content)


def checksums_in(content: Mapping[str, Any]) -> dict[str, tuple[str, list[Checksum]]]:
    """Returns dtype and checksums of each leaf in a process's file."""
    process = content["process_index"]
    return {
        name: (
            leaf["dtype"],
            [
                Checksum(tuple(start), tuple(stop), made, process)
                for start, stop, made in leaf["chunks"]
            ],
        )
        for name, leaf in content["leaves"].items()
    }
