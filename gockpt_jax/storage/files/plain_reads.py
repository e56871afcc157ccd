"""Reads arrays whose chunks are stored as they are, without TensorStore.

TensorStore reads whole chunks through the page cache and copies them twice. Here several threads
read pieces past the page cache, and only what is wanted of a file; small pieces are read several at
a time, and at once where they follow one another in a file. What is held beside the arrays
themselves is 4 MiB per thread.
"""

import concurrent.futures
import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gockpt_jax.storage.files import grid
from gockpt_jax.storage.files.aligned import (
    BLOCK_BYTES,
    O_DIRECT,
    ThreadBuffer,
    set_direct,
)
from gockpt_jax.storage.files.database import Extent
from gockpt_jax.storage.files.plain_array import Piece, PlainArray
from gockpt_jax.transfer.budget import batches

_THREADS = 8
# What a thread takes at once where pieces are small; not all files, which would then wait for it.
_TOGETHER = 32
_TOGETHER_BYTES = 2**20
_LITTLE_BYTES = 64 * 1024  # asking whether that is in the page cache takes longer than reading it
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Array = np.ndarray[Any, Any]

Boxes = Sequence[tuple[grid.Box, _Array]]
"""Boxes of an array, and C-contiguous arrays of their shapes to read them into."""


class PlainReads:
    """Reads boxes of plain arrays; belongs to one restore.

    Args:
      past_cache: Whether to read past the page cache what is not in it. Not where other processes
        of this host read the same files: then one of them reads for all.
    """

    def __init__(self, past_cache: bool) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "gockpt_read")
        self._buffer = ThreadBuffer()
        self._past_cache = past_cache

    def start(
        self, wanted: Iterable[tuple[PlainArray, Boxes]]
    ) -> list[concurrent.futures.Future[None]]:
        """Starts reading boxes of arrays into memory.

        Args:
          wanted: Arrays, and what is wanted of each.

        Returns:
          Futures of the reads. They raise the `OSError` of the file system; a file that is too
          short, or is not there, is one.
        """
        pieces = (
            (piece, boxes)
            for array, boxes in wanted
            for piece in array.pieces([box for box, _ in boxes])
        )
        jobs = batches(pieces, lambda one: one[0].extent.nbytes, _TOGETHER_BYTES, _TOGETHER)
        return [self._pool.submit(self._read, job) for job in jobs]

    def stream(self, array: PlainArray, box: grid.Box) -> Iterator[_Bytes]:
        """Reads one chunk on the calling thread.

        Args:
          array: The array.
          box: A whole chunk of it, none at its edge.

        Yields:
          Its bytes in order, each time in the same 4 MiB of memory.
        """
        for piece in array.pieces([box]):
            yield self._fetch(piece.extent, None)

    def close(self) -> None:
        """Ends the threads; drops what has not begun."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, job: Sequence[tuple[Piece, Boxes]]) -> None:
        for run in _runs(job):
            first, last = run[0][0].extent, run[-1][0].extent
            out = _destination(*run[0]) if len(run) == 1 else None
            nbytes = last.offset + last.nbytes - first.offset
            found = self._fetch(Extent(first.path, first.offset, nbytes), out)
            if out is None:
                for piece, boxes in run:
                    start = piece.extent.offset - first.offset
                    _hand_out(found[start : start + piece.extent.nbytes], piece, boxes)

    def _fetch(self, extent: Extent, out: _Bytes | None) -> _Bytes:
        """Reads bytes into given memory, or into memory of this thread until its next read."""
        fd = os.open(extent.path, os.O_RDONLY)
        try:
            past_cache = self._past_cache and O_DIRECT and not _is_for_cache(fd, extent)
            if past_cache and set_direct(fd, True):
                try:
                    return self._fetch_direct(fd, extent, out)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    set_direct(fd, False)  # the file system asks for more than blocks
            if out is None:
                out = self._buffer.memory[: extent.nbytes]
            _read_all(fd, out, extent.offset)
            return out
        except OSError as error:
            error.filename = extent.path
            raise
        finally:
            os.close(fd)

    def _fetch_direct(self, fd: int, extent: Extent, out: _Bytes | None) -> _Bytes:
        skip = extent.offset % BLOCK_BYTES
        whole = 0  # bytes that can be read to where they belong
        if out is not None and not skip and not out.ctypes.data % BLOCK_BYTES:
            whole = extent.nbytes - extent.nbytes % BLOCK_BYTES
            _read_all(fd, out[:whole], extent.offset)
        rest = extent.nbytes - whole
        buffer = self._buffer.memory
        blocks = -(-(skip + rest) // BLOCK_BYTES) * BLOCK_BYTES
        _read_all(fd, buffer[:blocks], extent.offset - skip + whole, at_least=skip + rest)
        found = buffer[skip : skip + rest]
        if out is None:
            return found
        out[whole:] = found
        return out


def _runs(job: Iterable[tuple[Piece, Boxes]]) -> Iterator[list[tuple[Piece, Boxes]]]:
    """Takes together what follows one another in a file."""
    run: list[tuple[Piece, Boxes]] = []
    for one in job:
        if run and not run[-1][0].extent.is_before(one[0].extent):
            yield run
            run = []
        run.append(one)
    yield run


def _destination(piece: Piece, boxes: Boxes) -> _Bytes | None:
    """The memory for all of a piece, where that is one range of bytes."""
    shares = _shares(piece, boxes)
    box, out, both = shares[0]
    part = out[_index(both, box)]
    if len(shares) == 1 and both == piece.box and part.flags.c_contiguous:
        memory: _Bytes = part.reshape(-1).view(np.uint8)
        return memory
    return None


def _hand_out(found: _Bytes, piece: Piece, boxes: Boxes) -> None:
    values = found.view(piece.dtype).reshape(piece.shape)
    for box, out, both in _shares(piece, boxes):
        np.copyto(out[_index(both, box)], values[_index(both, piece.box)])


def _shares(piece: Piece, boxes: Boxes) -> list[tuple[grid.Box, _Array, grid.Box]]:
    """The boxes that a piece has part in, and which part."""
    return [
        (box, out, both) for box, out in boxes if (both := grid.overlap(piece.box, box)) is not None
    ]


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


def _is_for_cache(fd: int, extent: Extent) -> bool:
    """Whether reading by the page cache is faster: where most of it is there, or it is little."""
    if extent.nbytes <= _LITTLE_BYTES:
        return True
    start = extent.offset - extent.offset % mmap.ALLOCATIONGRANULARITY
    length = extent.offset + extent.nbytes - start
    try:
        with mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start) as pages:
            resident = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(pages, np.uint8)
            failed = _mincore(view.ctypes.data, length, resident.ctypes.data)
            del view  # the mapping cannot be closed under it
    except (OSError, ValueError):
        return True  # the system does not tell, or the file is shorter than that
    return not failed and 2 * int((resident & 1).sum()) >= resident.size
