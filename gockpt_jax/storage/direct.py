"""Whole files written past the page cache (`O_DIRECT`), by several threads, and synced.

In zarr v2 without compression the file of a chunk is the chunk's bytes in C order and nothing else,
so that it can be written without TensorStore. TensorStore's `file` driver always writes through the
page cache (its `file_io_mode: direct` concerns reading, 0.1.86): that costs a copy, a flush and
0.8 s of processor time per GB on a busy machine, and pushes the user's data set out of the cache.
Nothing is renamed, for Orbax renames the whole step.

What is durable when: TensorStore syncs each file and its folder before its write ends, four times
per leaf. Here a file is synced beside the writes of the next ones, small files in batches, which a
journal takes at once, and each folder once, at the end: `sync` is what the save waits for.
"""

from __future__ import annotations

import concurrent.futures
import errno
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from gockpt_jax.storage.aligned import (
    BLOCK_BYTES,
    O_DIRECT,
    PIECE_BYTES,
    Aligned,
    set_direct,
    threads,
)

# Eight threads with 4 MiB each: see `bench storage`. More memory than this is never taken.
_THREADS = 8
_MAX_FILES = 16
_SYNC_THREADS = 32
# Smaller files are not worth their own way past the cache, and are synced in batches.
_SMALL_BYTES = 2**20
_BATCH_FILES = 256

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAX_INFLIGHT_BYTES = _THREADS * PIECE_BYTES
"""More than this is on no file's way to the disk at one time."""


class DirectFiles:
    """Writes files and makes them durable; belongs to one save.

    Takes at most 32 MiB, however much is written.
    """

    def __init__(self) -> None:
        # Threads start when there is work for them.
        self._files = threads(_MAX_FILES, "gockpt_file")
        self._pieces = threads(_THREADS, "gockpt_write")
        self._syncs = threads(_SYNC_THREADS, "gockpt_sync")
        self._aligned = Aligned()
        self._lock = threading.Lock()
        self._small: list[tuple[int, str]] = []  # written, open, to be synced
        self._syncing: list[concurrent.futures.Future[None]] = []
        self._open = threading.Semaphore(2 * _BATCH_FILES)
        self._folders: set[str] = set()

    def write(self, path: str, values: np.ndarray[Any, Any]) -> concurrent.futures.Future[None]:
        """Starts writing an array's values in C order.

        The future resolves when the values are needed no more; they are durable after `sync`.
        Arrays in page-aligned memory are not copied. The future raises the `OSError` of the file
        system, with the file's name; the file is incomplete then.

        A small file is written at once, into the page cache: handing thousands of them to threads
        takes longer, for each system call would give the interpreter away and wait for it again.
        """
        if values.nbytes >= _SMALL_BYTES:
            return self._files.submit(self._write, path, values)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            self._write(path, values)
        except OSError as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def written(self, path: str) -> None:
        """Has `sync` make a file durable that somebody else has written, without syncing it."""
        self._sync_later(os.open(path, os.O_RDONLY), path)

    def sync(self) -> None:
        """Waits until all files are durable, with the folders that they are in.

        Raises:
            OSError: A file could not be written after all, whatever its write had said.
        """
        self._sync_small()
        _first_error(self._syncing)
        _first_error([self._syncs.submit(_sync_folder, folder) for folder in self._folders])

    def close(self) -> None:
        """Ends the threads, after what they were given."""
        self._files.shutdown()
        self._pieces.shutdown()
        self._sync_small()  # closes them, where the save has failed
        self._syncs.shutdown()

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
        os.makedirs(os.path.dirname(path), exist_ok=True)
        is_small = content.nbytes < _SMALL_BYTES
        fd, is_direct = _open(path, is_small)
        try:
            if is_small:
                _write_all(fd, content.data, 0)
            else:
                self._write_large(fd, content, is_direct)
        except OSError as error:
            os.close(fd)
            error.filename = path
            raise
        if is_small:
            self._sync_later(fd, path)
        else:
            self._open.acquire()
            self._start_syncs([(fd, path)])

    def _write_large(self, fd: int, content: _Bytes, is_direct: bool) -> None:
        _reserve(fd, content.nbytes)
        whole = content.nbytes - content.nbytes % BLOCK_BYTES if is_direct else content.nbytes
        self._write_pieces(fd, content[:whole])
        if whole < content.nbytes:
            set_direct(fd, False)
            _write_all(fd, content[whole:].data, whole)

    def _write_pieces(self, fd: int, content: _Bytes) -> None:
        futures = [
            self._pieces.submit(self._write_piece, fd, content[start : start + PIECE_BYTES], start)
            for start in range(0, content.nbytes, PIECE_BYTES)
        ]
        _first_error(futures)  # all of them end before the file is closed, whatever befell one

    def _write_piece(self, fd: int, piece: _Bytes, start: int) -> None:
        if piece.ctypes.data % BLOCK_BYTES:
            buffer = self._aligned.buffer()[: piece.nbytes]
            np.copyto(buffer, piece)
            piece = buffer
        _write_all(fd, piece.data, start)

    def _sync_later(self, fd: int, path: str) -> None:
        """A file stays open until it is synced: only so does the system tell of its failures."""
        self._open.acquire()
        with self._lock:
            self._small.append((fd, path))
            is_batch = len(self._small) >= _BATCH_FILES
        if is_batch:
            self._sync_small()

    def _sync_small(self) -> None:
        with self._lock:
            batch, self._small = self._small, []
        self._start_syncs(batch)

    def _start_syncs(self, batch: list[tuple[int, str]]) -> None:
        with self._lock:
            for fd, path in batch:
                folder = os.path.dirname(path)
                self._folders |= {folder, os.path.dirname(folder)}  # the former may be new
                self._syncing.append(self._syncs.submit(self._sync_file, fd, path))

    def _sync_file(self, fd: int, path: str) -> None:
        try:
            _sync_and_close(fd, path)
        finally:
            self._open.release()


def _open(path: str, is_small: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
    fd = os.open(path, flags, 0o666)
    return fd, bool(O_DIRECT) and not is_small and set_direct(fd, True)


def _reserve(fd: int, nbytes: int) -> None:
    """Takes the room on the disk: a full one is known at once, and threads need not take turns."""
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise


def _write_all(fd: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(fd, content, offset)
        content, offset = content[written:], offset + written


def _sync_folder(folder: str) -> None:
    _sync_and_close(os.open(folder, os.O_RDONLY), folder)


def _sync_and_close(fd: int, path: str) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)


def _first_error(futures: Sequence[concurrent.futures.Future[None]]) -> None:
    """Waits for all, and raises what the first failing one raised."""
    concurrent.futures.wait(futures)
    for future in futures:
        future.result()
