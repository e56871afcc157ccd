"""Arrays whose chunks are files of their values and nothing else: zarr v2 without compression.

Read without TensorStore, which reads whole chunks through the page cache and copies them twice: a
piece at a time, by several threads, past the page cache, and only what is wanted of a file. What is
held beside the arrays themselves is 4 MiB per thread.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import errno
import json
import math
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from gockpt_jax.storage import grid
from gockpt_jax.storage.aligned import BLOCK_BYTES, O_DIRECT, ThreadBuffer, set_direct, threads
from gockpt_jax.storage.pieces import piece_shape

_THREADS = 8
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Array = np.ndarray[Any, Any]


def is_stored_as_it_is(dtype: np.dtype[Any]) -> bool:
    """Whether zarr v2 stores what NumPy holds; of types below a byte, parts are undefined there."""
    is_known = dtype.kind in "biufc" or dtype.name == "bfloat16" or dtype.name.startswith("float8_")
    return is_known and dtype.isnative and sys.byteorder == "little"


@dataclasses.dataclass(frozen=True)
class PlainArray:
    """Where the values of an array lie.

    Attributes:
      folder: Of its chunks.
      shape: Of the array.
      chunk: The shape of a chunk; files at the array's edge are whole chunks too.
      dtype: Of its values, as stored.
    """

    folder: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def found_in(cls, folder: str) -> PlainArray | None:
        """Looks at what is stored in a folder; None where it is stored in another way."""
        try:
            with open(f"{folder}/.zarray", encoding="utf-8") as file:
                told: Mapping[str, Any] = json.load(file)
            dtype = jnp.dtype(str(told["dtype"]).removeprefix("<").removeprefix("|"))
            is_plain = (
                told["zarr_format"] == 2
                and told["compressor"] is None
                and not told.get("filters")
                and told.get("order") == "C"
                and told.get("dimension_separator", ".") == "."
                and is_stored_as_it_is(dtype)
            )
            array = cls(folder, tuple(told["shape"]), tuple(told["chunks"]), dtype)
            return array if is_plain else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def is_file(self, box: grid.Box) -> bool:
        """Whether a box is one chunk, and so all that is in one file."""
        return grid.shape_of(box) == self.chunk and grid.is_whole(box, self.chunk)

    def pieces(self, boxes: Sequence[grid.Box]) -> Iterator[_Piece]:
        """Cuts the files that hold boxes of the array into reads of at most 4 MiB.

        Args:
          boxes: Of the array, one at least; they may overlap.

        Yields:
          Each piece of a file at most once, whatever the number of boxes that have part in it.
        """
        hull = tuple(
            slice(min(s.start for s in axis), max(s.stop for s in axis))
            for axis in zip(*boxes, strict=True)
        )
        shape = piece_shape(self.chunk, self.dtype.itemsize)
        for cell in grid.cells(hull, self.chunk):
            origin = tuple(s.start - s.start % n for s, n in zip(cell, self.chunk, strict=True))
            path = f"{self.folder}/{grid.key(cell, self.chunk)}"
            for inner in grid.cells(grid.whole(self.chunk), shape):
                box = tuple(
                    slice(s.start + o, s.stop + o) for s, o in zip(inner, origin, strict=True)
                )
                if any(grid.overlap(box, wanted) is not None for wanted in boxes):
                    corner = tuple(s.start for s in inner)
                    start = int(np.ravel_multi_index(corner, self.chunk)) if inner else 0
                    yield _Piece(path, start * self.dtype.itemsize, box, self.dtype)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A range of a file.

    Attributes:
      path: Of the file.
      offset: Its first byte in the file.
      box: Which part of the array it is; it may reach over the array's edge.
      dtype: Of the array.
    """

    path: str
    offset: int
    box: grid.Box
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return grid.shape_of(self.box)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PlainReads:
    """Reads boxes of plain arrays; belongs to one restore.

    Args:
      past_cache: Whether to read past the page cache what is not in it. Not where other processes
        of this host read the same files: then one of them reads for all.
    """

    def __init__(self, past_cache: bool) -> None:
        self._pool = threads(_THREADS, "gockpt_read")
        self._buffer = ThreadBuffer()
        self._past_cache = past_cache

    def start(
        self, array: PlainArray, wanted: Sequence[tuple[grid.Box, _Array]]
    ) -> list[concurrent.futures.Future[None]]:
        """Starts reading boxes of an array into memory.

        Args:
          array: The array.
          wanted: Boxes, and C-contiguous arrays of their shapes to read them into.

        Returns:
          Futures of the reads. They raise the `OSError` of the file system; a file that is too
          short, or is not there, is one.
        """
        pieces = array.pieces([box for box, _ in wanted])
        return [self._pool.submit(self._read, piece, wanted) for piece in pieces]

    def stream(self, array: PlainArray, box: grid.Box) -> Iterator[_Bytes]:
        """Reads one chunk on the calling thread.

        Args:
          array: The array.
          box: A whole chunk of it, none at its edge.

        Yields:
          The bytes of the file in order, each time in the same 4 MiB of memory.
        """
        for piece in array.pieces([box]):
            yield self._fetch(piece, None)

    def close(self) -> None:
        """Ends the threads; drops what has not begun."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, piece: _Piece, wanted: Sequence[tuple[grid.Box, _Array]]) -> None:
        shares = [
            (b, out, both) for b, out in wanted if (both := grid.overlap(piece.box, b)) is not None
        ]
        box, out, both = shares[0]
        part = out[_index(both, box)]
        if len(shares) == 1 and both == piece.box and part.flags.c_contiguous:
            self._fetch(piece, part.reshape(-1).view(np.uint8))
            return
        found = self._fetch(piece, None).view(piece.dtype).reshape(piece.shape)
        for box, out, both in shares:
            np.copyto(out[_index(both, box)], found[_index(both, piece.box)])

    def _fetch(self, piece: _Piece, out: _Bytes | None) -> _Bytes:
        """Reads a piece into given memory, or into memory of this thread until its next piece."""
        fd = os.open(piece.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            past_cache = self._past_cache and O_DIRECT and not _is_cached(fd, piece)
            if past_cache and set_direct(fd, True):
                return self._fetch_direct(fd, piece, out)
            if out is None:
                out = self._buffer.memory[: piece.nbytes]
            _read_all(fd, out, piece.offset)
            return out
        except OSError as error:
            error.filename = piece.path
            raise
        finally:
            os.close(fd)

    def _fetch_direct(self, fd: int, piece: _Piece, out: _Bytes | None) -> _Bytes:
        skip = piece.offset % BLOCK_BYTES
        whole = 0  # bytes that can be read to where they belong
        if out is not None and not skip and not out.ctypes.data % BLOCK_BYTES:
            whole = piece.nbytes - piece.nbytes % BLOCK_BYTES
            _read_all(fd, out[:whole], piece.offset)
        rest = piece.nbytes - whole
        if not rest:
            assert out is not None
            return out
        buffer = self._buffer.memory
        blocks = -(-(skip + rest) // BLOCK_BYTES) * BLOCK_BYTES
        _read_all(fd, buffer[:blocks], piece.offset - skip + whole, at_least=skip + rest)
        found = buffer[skip : skip + rest]
        if out is None:
            return found
        out[whole:] = found
        return out


def _index(part: grid.Box, box: grid.Box) -> Any:
    """A part of a box's values, as a view even where it has no dimensions."""
    return (*grid.within(part, box), ...)


def _read_all(fd: int, out: _Bytes, offset: int, at_least: int | None = None) -> None:
    """Fills memory from a file; the file may end after `at_least` bytes."""
    done, needed = 0, out.nbytes if at_least is None else at_least
    while done < needed:
        count = os.preadv(fd, [out[done:].data], offset + done)
        if not count:
            raise OSError(errno.EIO, "the file of a chunk is too short: it is damaged")
        done += count


def _is_cached(fd: int, piece: _Piece) -> bool:
    """Whether most of a piece is in the page cache: then reading it there is faster."""
    start = piece.offset - piece.offset % mmap.ALLOCATIONGRANULARITY
    length = piece.offset + piece.nbytes - start
    try:
        with mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start) as pages:
            resident = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(pages, np.uint8)
            failed = _mincore(view.ctypes.data, length, resident.ctypes.data)
            del view  # the mapping cannot be closed under it
    except (OSError, ValueError):
        return True  # the system does not tell, or the file is shorter than that
    return not failed and 2 * int((resident & 1).sum()) >= resident.size
