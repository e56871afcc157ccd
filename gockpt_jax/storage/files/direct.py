"""Values written past the page cache (`O_DIRECT`), by several threads, with a checksum each.

In zarr v2 without compression the value of a chunk is its bytes in C order and nothing else: a
file, or a stretch of one (`database.py`). So it can be written without TensorStore, whose `file`
driver always writes through the page cache (its `file_io_mode: direct` concerns reading, 0.1.86):
that costs a copy, a flush and 0.8 s of processor time per GB on a busy machine, and pushes the
user's data set out of the cache. Nothing is renamed, for Orbax renames the whole step.

A value is cut into pieces. Each is digested, and then written from where it lies if the disk can
take it there; else it is copied into a buffer first, and digested while it is in the processor's
cache.
"""

import concurrent.futures
import errno
import os
import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import xxhash

from gockpt_jax.storage.files.aligned import (
    BLOCK_BYTES,
    O_DIRECT,
    PIECE_BYTES,
    Buffers,
    memory_alignment,
    set_direct,
)
from gockpt_jax.storage.files.checksums import digest_of
from gockpt_jax.storage.files.data_file import DataFile
from gockpt_jax.storage.files.pieces import in_order
from gockpt_jax.storage.files.syncs import Syncs, first_error

# As many pieces are on their way: of 4 MiB, where they are copied, and of 8 MiB, where the disk
# takes them as they lie. The more of them, the larger the part of a disk that others use too; but
# copies cost processor time, and more threads then wait for each other (decision 14).
_THREADS = 8
_UNCOPIED_PIECE_BYTES = 2 * PIECE_BYTES
# While as many are on their way, others are copied: else the disk waits where processors are short.
_BUFFERS = 2 * _THREADS
# Each cuts, copies and digests one file at a time, faster than a disk writes.
_FILES = 8
# That stay open while they lack values, beside those that are being written or synced.
_KEPT_FILES = 256
# Smaller ones are not worth their own way past the cache, and are synced in batches.
SMALL_BYTES = 2**20

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Array = np.ndarray[Any, Any]


class DirectFiles:
    """Writes files and makes them durable; belongs to one save.

    Attributes:
      copied_bytes: What it takes at most, however much is written: 64 MiB, or half of the limit,
        so that the next file is begun while one is written.

    Args:
      folder: Of the save. What is below it is made where it is needed; itself it is not, for what
        has been written would be missing from it.
      limit_bytes: Of the save's bytes in flight.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = folder
        buffers = max(1, min(_BUFFERS, limit_bytes // (2 * PIECE_BYTES)))
        self.copied_bytes = buffers * PIECE_BYTES
        # Threads start when there is work for them.
        self._files = concurrent.futures.ThreadPoolExecutor(_FILES, "gockpt_file")
        self._pieces = concurrent.futures.ThreadPoolExecutor(_THREADS, "gockpt_write")
        self._buffers = Buffers(buffers)
        self._syncs = Syncs()
        self._shared: dict[str, DataFile] = {}
        self._kept = threading.Semaphore(_KEPT_FILES)

    def share(self, path: str, nbytes: int, offsets: Collection[int]) -> None:
        """Announces a file of several values, which begin at these offsets."""
        self._shared[path] = DataFile(path, nbytes, offsets)

    def write(self, path: str, values: _Array, offset: int = 0) -> concurrent.futures.Future[str]:
        """Starts writing an array's values in C order.

        The future resolves to their digest (`checksums.digest`) when they are needed no more; they
        are durable after `sync`. It raises the `OSError` of the file system, with the file's name;
        the file is incomplete then.

        Few values are written at once, into the page cache: handing thousands of such to threads
        takes longer, for each system call would give the interpreter away and wait for it again.
        """
        file = self._shared.get(path) or DataFile(path, values.nbytes, [offset])
        if values.nbytes >= SMALL_BYTES:
            return self._files.submit(self._write, file, values, offset)
        done: concurrent.futures.Future[str] = concurrent.futures.Future()
        try:
            done.set_result(self._write(file, values, offset))
        except Exception as error:
            done.set_exception(error.with_traceback(None))  # it would keep the values
        return done

    def sync(self) -> None:
        """Waits until all files are durable, with the folders that they are in.

        Raises:
          OSError: A file could not be written after all, whatever its write had said.
          RuntimeError: A file lacks a value. It has room for it, which reads as zeros.
        """
        if lacking := [file.path for file in self._shared.values() if not file.is_whole]:
            told = f"not all values were written of {', '.join(lacking)}"
            raise RuntimeError(f"{told}; nothing of this save is visible. Please report it.")
        self._syncs.finish()

    def close(self) -> None:
        """Ends the threads, after what they were given."""
        self._files.shutdown()
        self._pieces.shutdown()
        for file in self._shared.values():
            file.close()
        self._syncs.close()

    def _write(self, file: DataFile, values: _Array | None, offset: int) -> str:
        assert values is not None
        try:
            return self._write_values(file, values, offset)
        except Exception as error:
            failure = error.with_traceback(None)  # it would keep the bytes alive
        values = None
        raise failure

    def _write_values(self, file: DataFile, values: _Array, offset: int) -> str:
        fd = self._open(file)
        try:
            if values.nbytes < SMALL_BYTES:
                content = _flat(values)
                digest = digest_of([content])
                _write_all(fd, content.data, offset)
            else:
                digest = self._write_large(fd, values, offset)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                error.filename = file.path
            raise
        if (whole := file.take(fd, offset, self._kept)) is not None:
            self._syncs.add(whole, file.path, is_small=file.nbytes < SMALL_BYTES)
        return digest

    def _open(self, file: DataFile) -> int:
        """Opens a file for one write of it, of which the first makes it and takes its room."""
        with file.lock:
            if file.is_begun:
                return os.open(file.path, os.O_WRONLY)
            fd = self._create(file.path)
            try:
                if file.nbytes >= SMALL_BYTES:
                    _reserve(fd, file.nbytes)
            except BaseException as error:
                os.close(fd)
                if isinstance(error, OSError):
                    error.filename = file.path
                raise
            file.is_begun = True
            return fd

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            if not os.path.isdir(self._folder):
                raise
            folder = os.path.dirname(path)  # this is its first file
            os.makedirs(folder, exist_ok=True)
            self._syncs.add_folders(folder, self._folder)
            return os.open(path, flags, 0o666)

    def _write_large(self, fd: int, values: _Array, offset: int) -> str:
        parts = list(in_order(values))
        is_direct = O_DIRECT and not any((offset + start) % BLOCK_BYTES for start, _ in parts)
        is_direct = is_direct and set_direct(fd, True)
        alignment = memory_alignment(fd) if is_direct else 1
        if _is_taken(values, alignment):
            parts = list(in_order(values, _UNCOPIED_PIECE_BYTES))
        end = values.nbytes - (values.nbytes % BLOCK_BYTES if is_direct else 0)
        digest = xxhash.xxh3_128()
        written: list[concurrent.futures.Future[None]] = []
        try:
            for start, part in parts:
                content, buffer = self._as_taken(part, alignment)
                digest.update(content.data)  # before its buffer is another's
                content = content[: max(0, end - start)]
                written.append(
                    self._pieces.submit(self._write_piece, fd, content, offset + start, buffer)
                )
        finally:
            # All end before the file is closed, whatever befell one.
            concurrent.futures.wait(written)
        first_error(written)
        if end < values.nbytes:  # less than a block
            set_direct(fd, False)
            rest = _flat(parts[-1][1])[end - values.nbytes :]
            _write_all(fd, rest.data, offset + end)
        return str(digest.hexdigest())

    def _as_taken(self, part: _Array, alignment: int) -> tuple[_Bytes, _Bytes | None]:
        """The bytes of a part as the disk takes them, and the buffer, if they are in one."""
        if _is_taken(part, alignment):
            return _flat(part), None
        buffer = self._buffers.take()
        content = buffer[: part.nbytes]
        np.copyto(content.view(part.dtype).reshape(part.shape), part)
        return content, buffer

    def _write_piece(self, fd: int, content: _Bytes, start: int, buffer: _Bytes | None) -> None:
        try:
            _write_all(fd, content.data, start)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EFAULT):
                raise
            # The file system asks for more than blocks; or the memory is a driver's, of which it
            # lets nobody else take pages, and pulled chunks are written from where they lie.
            set_direct(fd, False)
            _write_all(fd, content.data, start)
        finally:
            if buffer is not None:
                self._buffers.give_back(buffer)


def _is_taken(values: _Array, alignment: int) -> bool:
    """Whether the disk takes these as they lie."""
    return values.flags.c_contiguous and values.ctypes.data % alignment == 0


def _flat(values: _Array) -> _Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


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
