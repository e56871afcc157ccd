"""The chunks of a leaf against their checksums: whether they cover it, and what is on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from gockpt_jax.errors import brief
from gockpt_jax.storage.files import checksums, grid
from gockpt_jax.storage.files.aligned import PIECE_BYTES
from gockpt_jax.storage.files.checksum_files import Checksum, LeafChecksums
from gockpt_jax.storage.files.plain_array import PlainArray
from gockpt_jax.storage.files.plain_reads import PlainReads
from gockpt_jax.storage.inspecting.stored_item import StoredItem, chunk_shape, nbytes_of


class Read(NamedTuple):
    """One read: a box of a leaf, the chunks in it, and where it lies, if it is a chunk as it is."""

    name: str
    store: ts.TensorStore
    box: grid.Box
    chunks: list[Checksum]
    plain: PlainArray | None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return nbytes_of(self.store, self.box)

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
    """Checks what a leaf is, and plans its reads: each zarr chunk is read once.

    Args:
      item: In which it is.
      name: Its own.
      leaf: Its checksums.
      store: What `open_leaf` has found.
      is_part: Whether chunks of it may be elsewhere.
    """
    if isinstance(store, Exception):
        return [f"`{name}` cannot be opened: {brief(store)}"], []
    faults = []
    stored = store.dtype.numpy_dtype.name
    if stored != leaf.dtype:
        faults.append(f"`{name}`: expected {leaf.dtype}, found {stored}")
    shape, zarr_chunk = tuple(store.shape), chunk_shape(store)
    uncovered = _cover_fault(shape, leaf.chunks, is_part=is_part)
    if uncovered:
        return [*faults, f"`{name}`: {uncovered}"], []
    plain = item.plain(name)
    groups: dict[Any, list[Checksum]] = {}
    for chunk in leaf.chunks:
        cell = _cell_of(zarr_chunk, chunk, shape)
        groups.setdefault(cell or (chunk.start, chunk.stop), []).append(chunk)
    jobs = []
    for key, of_group in groups.items():
        box = tuple(map(slice, *key))
        is_chunk = plain is not None and len(of_group) == 1 and plain.is_chunk(box)
        jobs.append(Read(name, store, box, of_group, plain if is_chunk else None))
    return faults, jobs


def _cell_of(zarr_chunk: Sequence[int], chunk: Checksum, shape: Sequence[int]) -> Any:
    """The zarr chunk that a chunk lies in; `None` if it lies in several."""
    start = tuple(a // n * n for a, n in zip(chunk.start, zarr_chunk, strict=True))
    stop = tuple(min(a + n, s) for a, n, s in zip(start, zarr_chunk, shape, strict=True))
    inside = all(b <= end for b, end in zip(chunk.stop, stop, strict=True))
    return (start, stop) if inside else None


def _cover_fault(shape: Sequence[int], chunks: Sequence[Checksum], *, is_part: bool) -> str | None:
    """Says whether chunks cover an array (or a part) once; counts in a grid of all their edges."""
    for chunk in chunks:
        if len(chunk.start) != len(shape) or any(
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
    """Reads a box and digests the chunks in it."""
    try:
        digests = _digests(reads, job)
    except Exception as error:
        where = _where(job.box, job.chunks[0])
        return [f"`{job.name}`, {where}, cannot be read: {brief(error)}"]
    return [
        f"`{job.name}`, {_where(chunk.box, chunk)}, is damaged: its values have changed"
        for chunk, digest in zip(job.chunks, digests, strict=True)
        if chunk.digest != digest
    ]


def _digests(reads: PlainReads, job: Read) -> list[str]:
    if job.plain is not None:
        return [checksums.digest_of(reads.stream(job.plain, job.box))]
    values = np.asarray(job.store[job.box].read().result())
    boxes = [grid.within(chunk.box, job.box) for chunk in job.chunks]
    return [checksums.digest(values[box]) for box in boxes]


def _where(box: grid.Box, chunk: Checksum) -> str:
    start, stop = [s.start for s in box], [s.stop for s in box]
    return f"{start} to {stop}, written by process {chunk.process}"
