"""The chunks of a leaf against their checksums: whether they cover it, and what is on the disk."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorstore as ts

from gockpt_jax.errors import without_specs
from gockpt_jax.storage.files import checksums
from gockpt_jax.storage.files.aligned import PIECE_BYTES
from gockpt_jax.storage.files.checksum_files import Checksum, LeafChecksums
from gockpt_jax.storage.files.plain_array import PlainArray
from gockpt_jax.storage.files.plain_reads import PlainReads
from gockpt_jax.storage.inspecting.stored_item import StoredItem, nbytes_of


class Read(NamedTuple):
    """One read: a chunk of a leaf, and where it lies, if it is stored as it is."""

    name: str
    store: ts.TensorStore
    chunk: Checksum
    plain: PlainArray | None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return nbytes_of(self.store, self.chunk.box)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory while it is read."""
        return self.nbytes if self.plain is None else min(self.nbytes, PIECE_BYTES)


def open_leaf(item: StoredItem, name: str) -> ts.TensorStore | Exception:
    """Opens a leaf, or says why it cannot be opened."""
    try:
        return item.open(name)
    except Exception as error:
        return error


def reads_of(
    item: StoredItem,
    name: str,
    leaf: LeafChecksums,
    store: ts.TensorStore | Exception,
    *,
    is_part: bool,
) -> tuple[list[str], list[Read]]:
    """Checks what a leaf is, and plans its reads, one for each of its checksums.

    Args:
      item: In which it is.
      name: Its own.
      leaf: Its checksums.
      store: What `open_leaf` has found.
      is_part: Whether chunks of it may be elsewhere.
    """
    if isinstance(store, Exception):
        return [str(store)], []
    faults = []
    stored = store.dtype.numpy_dtype.name
    if stored != leaf.dtype:
        faults.append(f"`{name}`: expected {leaf.dtype}, found {stored}")
    shape = tuple(store.shape)
    uncovered = _cover_fault(shape, leaf.chunks, is_part=is_part)
    if uncovered:
        return [*faults, f"`{name}`: {uncovered}"], []
    plain = item.plain(name)

    def read(chunk: Checksum) -> Read:
        as_it_is = plain is not None and plain.is_chunk(chunk.box)
        return Read(name, store, chunk, plain if as_it_is else None)

    return faults, [*map(read, leaf.chunks)]


def _cover_fault(shape: Sequence[int], chunks: Sequence[Checksum], *, is_part: bool) -> str | None:
    """Says whether chunks cover an array (or a part) once; counts in a grid of all their edges."""
    for chunk in chunks:
        if {len(chunk.start), len(chunk.stop)} != {len(shape)} or any(
            not 0 <= a <= b <= n for a, b, n in zip(chunk.start, chunk.stop, shape, strict=True)
        ):
            return f"the box {chunk.start} to {chunk.stop} is not in its shape {tuple(shape)}"
    if not shape:
        return None if len(chunks) == 1 else f"{len(chunks)} chunks of a scalar"
    edges = [
        sorted({0, n, *(c.start[i] for c in chunks), *(c.stop[i] for c in chunks)})
        for i, n in enumerate(shape)
    ]
    places = [{edge: j for j, edge in enumerate(axis)} for axis in edges]
    counts = np.min_scalar_type(len(chunks))  # however often one is there
    count = np.zeros([len(axis) - 1 for axis in edges], counts)
    for chunk in chunks:
        count[
            tuple(
                slice(place[a], place[b])
                for place, a, b in zip(places, chunk.start, chunk.stop, strict=True)
            )
        ] += 1
    wrong = np.argwhere(count > 1 if is_part else count != 1)
    if not len(wrong):
        return None
    corner = tuple(axis[j] for axis, j in zip(edges, wrong[0], strict=True))
    which = "missing" if not count[tuple(wrong[0])] else "there twice"
    return f"the chunk at {corner} of its shape {tuple(shape)} is {which}"


def check(reads: PlainReads, job: Read) -> list[str]:
    """Reads a chunk and digests it."""
    start, stop = list(job.chunk.start), list(job.chunk.stop)
    where = f"`{job.name}`, {start} to {stop}, written by process {job.chunk.process},"
    try:
        made = _digest(reads, job)
    except Exception as error:
        return [f"{where} cannot be read: {without_specs(error)}"]
    if made == job.chunk.digest:
        return []
    return [f"{where} is damaged: its values have changed"]


def _digest(reads: PlainReads, job: Read) -> str:
    if job.plain is not None:
        return checksums.digest_of(reads.stream(job.plain, job.chunk.box))
    return checksums.digest(np.asarray(job.store[job.chunk.box].read().result()))
