"""Parts of an array that are contiguous in its file: what is read and written at once."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gockpt_jax.storage.files import grid
from gockpt_jax.storage.files.aligned import BLOCK_BYTES, PIECE_BYTES


def piece_shape(chunk: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of pieces of a chunk that are contiguous and at most 4 MiB large.

    Example:
      >>> piece_shape((16, 1024, 1024), 4), piece_shape((4, 8192, 8192), 4)
      ((1, 1024, 1024), (1, 128, 8192))
      >>> piece_shape((3000, 1000), 4)  # a block ends with each 128th row
      (1024, 1000)
    """
    shape, row_bytes = list(chunk), itemsize
    for axis in reversed(range(len(shape))):
        if row_bytes * shape[axis] > PIECE_BYTES:
            rows = PIECE_BYTES // row_bytes
            whole = BLOCK_BYTES // math.gcd(row_bytes, BLOCK_BYTES)  # rows that end with a block
            shape[axis] = rows - rows % whole or rows
            return (1,) * axis + tuple(shape[axis:])
        row_bytes *= shape[axis]
    return tuple(shape)


def in_order(
    values: np.ndarray[Any, Any], piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Cuts an array into views of at most 4 MiB that follow one another in C order.

    Args:
      values: Of any strides.
      piece_bytes: Instead of 4 MiB, where the values are contiguous.

    Yields:
      The first byte's offset of each in a file of the array's values, and the view.

    Example:
      >>> x = np.zeros((6, 2**20), np.float32)[:, ::2]
      >>> [(start // 2**20, part.shape) for start, part in in_order(x)]
      [(0, (2, 524288)), (4, (2, 524288)), (8, (2, 524288))]
    """
    if values.flags.c_contiguous:
        content = values.reshape(-1).view(np.uint8)
        for start in range(0, content.nbytes, piece_bytes):
            yield start, content[start : start + piece_bytes]
        return
    start = 0
    for cell in grid.cells(grid.whole(values.shape), piece_shape(values.shape, values.itemsize)):
        part = values[cell]
        yield start, part
        start += part.nbytes
