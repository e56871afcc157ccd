"""A leaf's zarr chunk grid: the cells that a box of the leaf is made of."""

import itertools
from collections.abc import Iterator, Sequence

Box = tuple[slice, ...]


def cells(box: Box, chunk: Sequence[int]) -> Iterator[Box]:
    """Cuts a box at the edges of the chunk grid, in C order.

    Args:
      box: Explicit starts and stops, step 1.
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
