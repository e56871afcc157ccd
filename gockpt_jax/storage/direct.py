"""Whole files written past the page cache (`O_DIRECT`), by several threads, and synced.

In zarr v2 without compression the file of a chunk is the chunk's bytes in C order and nothing else,
so that it can be written without TensorStore. TensorStore's `file` driver always writes through the
page cache (its `file_io_mode: direct` concerns reading, 0.1.86): that costs a copy, a flush and
0.8 s of processor time per GB on a busy machine, and pushes the user's data set out of the cache.
What is durable when is the same: the file and its folder are synced before the chunk counts as
written. There is no rename, for Orbax renames the whole step.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import mmap
import os
import threading
from typing import Any

import numpy as np

# Eight threads with 4 MiB each: see `bench storage`. More memory than this is never taken.
_THREADS = 8
_MAX_FILES = 16
_PIECE_BYTES = 4 * 2**20
# Offsets, lengths and addresses must be multiples of the device's block, which is 4 KiB at most.
_BLOCK_BYTES = 4096
# 0 where the system has no such flag (macOS): then the same writes go through the page cache.
_O_DIRECT = getattr(os, "O_DIRECT", 0)

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class DirectFiles:
    """Writes files; belongs to one save. Takes at most 32 MiB, however much is written."""

    def __init__(self) -> None:
        # Threads start when there is work for them.
        self._files = _threads(_MAX_FILES, "gockpt_file")
        self._pieces = _threads(_THREADS, "gockpt_write")
        self._aligned = threading.local()

    def write(self, path: str, values: np.ndarray[Any, Any]) -> concurrent.futures.Future[None]:
        """Starts writing an array's values in C order; the future resolves when they are durable.

        Arrays in page-aligned memory are not copied. The future raises the `OSError` of the file
        system, with the file's name; the file is incomplete then.
        """
        return self._files.submit(self._write, path, values)

    def close(self) -> None:
        """Ends the threads, after what they were given."""
        self._files.shutdown()
        self._pieces.shutdown()

    def _write(self, path: str, values: np.ndarray[Any, Any] | None) -> None:
        assert values is not None
        try:
            self._write_file(path, np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        except OSError as error:
            failure = error.with_traceback(None)  # it would keep the bytes alive
        else:
            return
        values = None
        raise failure

    def _write_file(self, path: str, content: _Bytes) -> None:
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        fd, is_direct = _open(path)
        try:
            _reserve(fd, content.nbytes)
            whole = content.nbytes - content.nbytes % _BLOCK_BYTES if is_direct else content.nbytes
            self._write_pieces(fd, content[:whole])
            if whole < content.nbytes:
                _leave_direct_mode(fd)
                _write_all(fd, content[whole:].data, whole)
            os.fsync(fd)
        except OSError as error:
            error.filename = path
            raise
        finally:
            os.close(fd)
        _sync_folder(folder)

    def _write_pieces(self, fd: int, content: _Bytes) -> None:
        futures = [
            self._pieces.submit(self._write_piece, fd, content[start : start + _PIECE_BYTES], start)
            for start in range(0, content.nbytes, _PIECE_BYTES)
        ]
        # All of them end before the file is closed, whatever befell one.
        concurrent.futures.wait(futures)
        for future in futures:
            future.result()

    def _write_piece(self, fd: int, piece: _Bytes, start: int) -> None:
        if piece.ctypes.data % _BLOCK_BYTES:
            buffer = self._buffer()[: piece.nbytes]
            np.copyto(buffer, piece)
            piece = buffer
        _write_all(fd, piece.data, start)

    def _buffer(self) -> _Bytes:
        """This thread's aligned memory; private and in huge pages, or copying halves the speed."""
        buffer: _Bytes | None = getattr(self._aligned, "buffer", None)
        if buffer is None:
            memory = mmap.mmap(-1, _PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(AttributeError, OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            buffer = self._aligned.buffer = np.frombuffer(memory, np.uint8)
        return buffer


def _threads(count: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix=name)


def _open(path: str) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
    if _O_DIRECT:
        try:
            return os.open(path, flags | _O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # this file system has no direct mode
                raise
    return os.open(path, flags, 0o666), False


def _reserve(fd: int, nbytes: int) -> None:
    """Takes the room on the disk: a full one is known at once, and threads need not take turns."""
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise


def _leave_direct_mode(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)


def _write_all(fd: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(fd, content, offset)
        content, offset = content[written:], offset + written


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
