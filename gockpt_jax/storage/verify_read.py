"""One read of a verification: what is on the disk of a chunk, against its checksum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from gockpt_jax.storage import checksums, grid
from gockpt_jax.storage.aligned import PIECE_BYTES
from gockpt_jax.storage.checksums import Chunk
from gockpt_jax.storage.plain_array import PlainArray, PlainReads
from gockpt_jax.storage.stored_item import Span, nbytes_of


class Read(NamedTuple):
    """One read: a box of a leaf, the chunks in it, and the file that is all of it, if one is."""

    name: str
    store: ts.TensorStore
    span: Span
    chunks: list[Chunk]
    file: PlainArray | None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return nbytes_of(self.store, self.span)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory while it is read."""
        return self.nbytes if self.file is None else min(self.nbytes, PIECE_BYTES)


def _key(span: Span) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(s.start for s in span), tuple(s.stop for s in span)


def check(reads: PlainReads, job: Read) -> list[str]:
    """Reads a box and digests the chunks in it."""
    try:
        digests = _digests(reads, job)
    except Exception as error:
        where = _where(_key(job.span), job.chunks)
        return [f"`{job.name}`, {where}, cannot be read: {short(error)}"]
    return [
        f"`{job.name}`, {_where((chunk.start, chunk.stop), [chunk])}, is damaged: its values have"
        " changed"
        for chunk, digest in zip(job.chunks, digests, strict=True)
        if chunk.digest != digest
    ]


def _digests(reads: PlainReads, job: Read) -> list[str]:
    if job.file is not None:
        return [checksums.digest_of(reads.stream(job.file, job.span))]
    values = np.asarray(job.store[job.span].read().result())
    boxes = [grid.within(chunk.box, job.span) for chunk in job.chunks]
    return [checksums.digest(values[box]) for box in boxes]


def _where(span: Any, chunks: Sequence[Chunk]) -> str:
    return f"{list(span[0])} to {list(span[1])}, written by process {chunks[0].process}"


def short(error: Exception) -> str:
    """TensorStore's message without the places in its own source."""
    return str(error).partition(" [source locations=")[0].partition(" [tensorstore_spec=")[0]
