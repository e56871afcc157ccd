"""Boxes of an array, and the cells of its zarr chunk grid that they are made of."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

Box = tuple[slice, ...]
"""A part of an array: a slice of step 1 per dimension, with explicit start and stop."""


def explicit(index: Any, shape: Sequence[int]) -> Box:
    """The box that an index takes of an array; its slices may leave out starts and stops.

    Example:
      >>> explicit((slice(None), slice(2, None)), (4, 8))
      (slice(0, 4, None), slice(2, 8, None))
    """
    bounds = (s.indices(n) for s, n in zip(index, shape, strict=True))
    return tuple(slice(start, max(start, stop)) for start, stop, _ in bounds)


def whole(shape: Sequence[int]) -> Box:
    """All of an array."""
    return tuple(slice(0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of a box's values."""
    return tuple(s.stop - s.start for s in box)


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; `None` if that is nothing."""
    both = tuple(
        slice(max(s.start, t.start), min(s.stop, t.stop)) for s, t in zip(a, b, strict=True)
    )
    return both if all(s.start < s.stop for s in both) else None


def cells(box: Box, chunk: Sequence[int]) -> Iterator[Box]:
    """Cuts a box at the edges of the chunk grid, in C order.

    Args:
      box: Of the leaf.
      chunk: The chunk shape; the grid starts at the leaf's origin.

    Yields:
      Boxes that cover `box` once; each lies in one chunk.

    Example:
      >>> [tuple((s.start, s.stop) for s in cell) for cell in cells((slice(1, 5),), (2,))]
      [((1, 2),), ((2, 4),), ((4, 5),)]
    """

    def cut(whole: slice, length: int) -> list[slice]:
        first = whole.start - whole.start % length
        starts = range(first, whole.stop, length)
        return [slice(max(n, whole.start), min(n + length, whole.stop)) for n in starts]

    yield from itertools.product(*map(cut, box, chunk))


def within(cell: Box, box: Box) -> Box:
    """Returns where a cell lies in the data of the box that it was cut from."""
    return tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(cell, box, strict=True))


def is_whole(box: Box, chunk: Sequence[int]) -> bool:
    """Whether a box is made of whole chunks: nobody else writes any part of them."""
    return all(s.start % n == 0 and s.stop % n == 0 for s, n in zip(box, chunk, strict=True))


def key(cell: Box, chunk: Sequence[int]) -> str:
    """Returns the name of a chunk in zarr v2, `"1.0"` for example."""
    return ".".join(str(s.start // n) for s, n in zip(cell, chunk, strict=True)) or "0"
