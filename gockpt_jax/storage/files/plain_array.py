"""Arrays whose chunks are stored as their values and nothing else: zarr v2 without compression.

A chunk is a file, or lies in one, if it is an OCDBT database's.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from gockpt_jax.storage.files import grid
from gockpt_jax.storage.files.database import Extent, Extents, Values, files_in, values_by_array
from gockpt_jax.storage.files.pieces import piece_shape


def is_stored_as_it_is(dtype: np.dtype[Any]) -> bool:
    """Whether zarr v2 stores what NumPy holds; of types below a byte, parts are undefined there."""
    is_known = dtype.kind in "biufc" or dtype.name == "bfloat16" or dtype.name.startswith("float8_")
    return is_known and dtype.isnative and sys.byteorder == "little"


@dataclasses.dataclass(frozen=True)
class PlainArray:
    """Where the values of an array lie.

    Attributes:
      shape: Of the array.
      chunk: The shape of a chunk; those at the array's edge are stored as whole chunks, too.
      dtype: Of its values, as stored.
      extents: Where a chunk lies, by its key.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype[Any]
    extents: Extents

    @classmethod
    def found_in(cls, folder: str) -> "PlainArray | None":
        """Looks at what is stored in a folder; None where it is stored in another way."""
        try:
            with open(f"{folder}/.zarray", "rb") as file:
                return cls._told(file.read(), files_in(folder))
        except OSError:
            return None

    @classmethod
    def found_among(cls, values: Values) -> "PlainArray | None":
        """Looks at what a database has of an array; None where it is stored in another way."""
        try:
            told = values[".zarray"]
            text = told if isinstance(told, bytes) else _content(told)
        except (KeyError, OSError):
            return None
        extents = {key: extent for key, extent in values.items() if isinstance(extent, Extent)}
        array = cls._told(text, extents.__getitem__)
        if array is None:
            return None
        nbytes = math.prod(array.chunk) * array.dtype.itemsize
        cells = grid.cells(grid.whole(array.shape), array.chunk)
        found = (extents.get(grid.key(cell, array.chunk)) for cell in cells)
        return array if all(x is not None and x.nbytes == nbytes for x in found) else None

    @classmethod
    def _told(cls, text: bytes, extents: Extents) -> "PlainArray | None":
        try:
            told: Mapping[str, Any] = json.loads(text)
            dtype = jnp.dtype(str(told["dtype"]).removeprefix("<").removeprefix("|"))
            is_plain = (
                told["zarr_format"] == 2
                and told["compressor"] is None
                and not told.get("filters")
                and told.get("order") == "C"
                and told.get("dimension_separator", ".") == "."
                and is_stored_as_it_is(dtype)
            )
            array = cls(tuple(told["shape"]), tuple(told["chunks"]), dtype, extents)
            return array if is_plain else None
        except (ValueError, TypeError, KeyError):
            return None

    def is_chunk(self, box: grid.Box) -> bool:
        """Whether a box is one chunk, and so all of what is stored under one key."""
        return grid.shape_of(box) == self.chunk and grid.is_whole(box, self.chunk)

    def pieces(self, boxes: Sequence[grid.Box]) -> "Iterator[Piece]":
        """Cuts the chunks that hold boxes of the array into reads of at most 4 MiB.

        Args:
          boxes: Of the array, one at least; they may overlap.

        Yields:
          Each piece of a chunk at most once, whatever the number of boxes that have part in it.
        """
        hull = tuple(
            slice(min(s.start for s in axis), max(s.stop for s in axis))
            for axis in zip(*boxes, strict=True)
        )
        shape = piece_shape(self.chunk, self.dtype.itemsize)
        for cell in grid.cells(hull, self.chunk):
            origin = tuple(s.start - s.start % n for s, n in zip(cell, self.chunk, strict=True))
            extent = self.extents(grid.key(cell, self.chunk))
            offset = extent.offset
            for inner in grid.cells(grid.whole(self.chunk), shape):
                box = tuple(
                    slice(s.start + o, s.stop + o) for s, o in zip(inner, origin, strict=True)
                )
                nbytes = math.prod(grid.shape_of(box)) * self.dtype.itemsize
                if any(grid.overlap(box, wanted) is not None for wanted in boxes):
                    yield Piece(Extent(extent.path, offset, nbytes), box, self.dtype)
                offset += nbytes


class PlainArrays:
    """Those of an item's arrays that are plain.

    Args:
      folder: The item's, local.
      use_ocdbt: Whether its chunks are in a database; else each is a file.
    """

    def __init__(self, folder: str, use_ocdbt: bool) -> None:
        self._folder = folder
        self._in_database = values_by_array(folder) if use_ocdbt else None

    def find(self, name: str) -> "PlainArray | None":
        """Where an array's values lie; None where it is stored in another way."""
        if self._in_database is None:
            return PlainArray.found_in(f"{self._folder}/{name}")
        return PlainArray.found_among(self._in_database.get(name, {}))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A range of a file.

    Attributes:
      extent: Where its bytes lie.
      box: Which part of the array it is; it may reach over the array's edge.
      dtype: Of the array.
    """

    extent: Extent
    box: grid.Box
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its values."""
        return grid.shape_of(self.box)


def _content(extent: Extent) -> bytes:
    with open(extent.path, "rb") as file:
        file.seek(extent.offset)
        return file.read(extent.nbytes)
