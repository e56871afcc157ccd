"""The cells of an array's zarr chunk grid, of which its boxes are made.

Whoever has to do with a grid has to do with boxes, so these are here, too.
"""

import itertools
from collections.abc import Iterator, Sequence

from gockpt_jax.transfer.boxes import Box as Box
from gockpt_jax.transfer.boxes import explicit as explicit
from gockpt_jax.transfer.boxes import overlap as overlap
from gockpt_jax.transfer.boxes import shape_of as shape_of
from gockpt_jax.transfer.boxes import whole as whole
from gockpt_jax.transfer.boxes import within as within


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

    def cut(side: slice, length: int) -> list[slice]:
        first = side.start - side.start % length
        starts = range(first, side.stop, length)
        return [slice(max(n, side.start), min(n + length, side.stop)) for n in starts]

    yield from itertools.product(*map(cut, box, chunk))


def is_whole(box: Box, chunk: Sequence[int]) -> bool:
    """Whether a box is made of whole chunks: nobody else writes any part of them."""
    return all(s.start % n == 0 and s.stop % n == 0 for s, n in zip(box, chunk, strict=True))


def key(cell: Box, chunk: Sequence[int]) -> str:
    """Returns the name of a chunk in zarr v2, `"1.0"` for example."""
    return ".".join(str(s.start // n) for s, n in zip(cell, chunk, strict=True)) or "0"
