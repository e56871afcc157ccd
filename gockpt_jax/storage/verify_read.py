"""One read of a verification: what is on the disk of a chunk, against its checksum."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorstore as ts

from gockpt_jax.errors import brief
from gockpt_jax.storage import checksums, grid
from gockpt_jax.storage.aligned import PIECE_BYTES
from gockpt_jax.storage.checksum_files import Checksum
from gockpt_jax.storage.plain_array import PlainArray, PlainReads
from gockpt_jax.storage.stored_item import nbytes_of


class Read(NamedTuple):
    """One read: a box of a leaf, the chunks in it, and the file that is all of it, if one is."""

    name: str
    store: ts.TensorStore
    box: grid.Box
    chunks: list[Checksum]
    file: PlainArray | None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return nbytes_of(self.store, self.box)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory while it is read."""
        return self.nbytes if self.file is None else min(self.nbytes, PIECE_BYTES)


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
    if job.file is not None:
        return [checksums.digest_of(reads.stream(job.file, job.box))]
    values = np.asarray(job.store[job.box].read().result())
    boxes = [grid.within(chunk.box, job.box) for chunk in job.chunks]
    return [checksums.digest(values[box]) for box in boxes]


def _where(box: grid.Box, chunk: Checksum) -> str:
    start, stop = [s.start for s in box], [s.stop for s in box]
    return f"{start} to {stop}, written by process {chunk.process}"
