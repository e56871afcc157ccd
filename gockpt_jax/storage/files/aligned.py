"""Memory and modes of files for reads and writes past the page cache (`O_DIRECT`)."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from typing import Any

import numpy as np

# Offsets, lengths and addresses must be multiples of the device's block, which is 4 KiB as a rule;
# what asks for more refuses them with `EINVAL`, and is gone to by the page cache.
BLOCK_BYTES = 4096
# What one thread hands to the disk at once.
PIECE_BYTES = 4 * 2**20
# 0 where the system has no such flag (macOS): then the same calls go through the page cache.
O_DIRECT = getattr(os, "O_DIRECT", 0)

# Of statx(2).
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STX_DIO_MEM_ALIGN = 152
_libc = ctypes.CDLL(None)

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ThreadBuffer(threading.local):
    """Memory of each thread's own: a piece, with the blocks that it begins and ends in."""

    def __init__(self) -> None:
        self.memory = aligned_empty(PIECE_BYTES + 2 * BLOCK_BYTES)


class Buffers:
    """A number of pieces, for whichever thread; made when they are first needed."""

    def __init__(self, count: int) -> None:
        self._free: queue.LifoQueue[_Bytes | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(None)

    def take(self) -> _Bytes:
        """Waits for one that nobody has."""
        buffer = self._free.get()
        return aligned_empty(PIECE_BYTES) if buffer is None else buffer

    def give_back(self, buffer: _Bytes) -> None:
        """Somebody else may have it."""
        self._free.put(buffer)


def aligned_empty(nbytes: int) -> _Bytes:
    """Page-aligned memory; private and in huge pages, or copying into it halves the speed."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:nbytes]


def memory_alignment(fd: int) -> int:
    """What `O_DIRECT` asks of the addresses of memory, for this file.

    Since 6.1 Linux tells: 4 bytes for NVMe disks, 512 for most others. A block, where it does not.
    """
    found = np.zeros(64, np.uint32)  # struct statx
    try:
        failed = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found.ctypes)
    except AttributeError:  # not Linux
        return BLOCK_BYTES
    mask, alignment = int(found[0]), int(found[_STX_DIO_MEM_ALIGN // 4])
    return alignment if not failed and mask & _STATX_DIOALIGN and alignment else BLOCK_BYTES


def set_direct(fd: int, direct: bool) -> bool:
    """Has a file that is open go past the page cache, or not; False where it has no such mode."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT if direct else flags & ~O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def is_past_cache(fd: int) -> bool:
    """Whether what is written to an open file goes past the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT)
