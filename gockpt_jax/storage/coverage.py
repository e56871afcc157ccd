"""Where chunks lie in their leaf: whether they cover it once, and in which zarr chunk each is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gockpt_jax.storage.checksum_files import Checksum


def cell_of(grid: Sequence[int], chunk: Checksum, shape: Sequence[int]) -> Any:
    """The zarr chunk that a chunk lies in; `None` if it lies in several."""
    start = tuple(a // n * n for a, n in zip(chunk.start, grid, strict=True))
    stop = tuple(min(a + n, s) for a, n, s in zip(start, grid, shape, strict=True))
    inside = all(b <= end for b, end in zip(chunk.stop, stop, strict=True))
    return (start, stop) if inside else None


def cover_fault(shape: Sequence[int], chunks: Sequence[Checksum]) -> str | None:
    """Says whether chunks cover an array once; counts in a grid of all their edges."""
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
    count = np.zeros([len(axis) - 1 for axis in edges], np.uint8)
    for chunk in chunks:
        count[
            tuple(
                slice(place[a], place[b])
                for place, a, b in zip(places, chunk.start, chunk.stop, strict=True)
            )
        ] += 1
    wrong = np.argwhere(count != 1)
    if not len(wrong):
        return None
    corner = tuple(axis[j] for axis, j in zip(edges, wrong[0], strict=True))
    which = "missing" if not count[tuple(wrong[0])] else "there twice"
    return f"the chunk at {corner} of its shape {tuple(shape)} is {which}"
