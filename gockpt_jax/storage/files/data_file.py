"""A file of one or several values that several threads write, and when it is whole."""

import os
import threading
from collections.abc import Collection

from gockpt_jax.storage.files.aligned import is_past_cache
from gockpt_jax.storage.files.syncs import sync_and_close


class DataFile:
    """A file, and what it lacks.

    Attributes:
      path: Its path.
      nbytes: Its length in the end.
      lock: Held while it is begun, or one of its values counted.
      is_begun: Whether it is there, with its room on the disk.

    Args:
      offsets: Where the values begin that make it whole.
    """

    def __init__(self, path: str, nbytes: int, offsets: Collection[int]) -> None:
        self.path = path
        self.nbytes = nbytes
        self.lock = threading.Lock()
        self.is_begun = False
        self._missing = set(offsets)
        self._kept: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of it has been written."""
        return not self._missing

    def take(self, fd: int, offset: int, kept: threading.Semaphore) -> int | None:
        """Takes the open file of a write that has ended; gives one back when the file is whole.

        Where a write has gone through the page cache, its file stays open until then: only so does
        the system tell of failures that come later. It is synced where too many are open already.

        Args:
          fd: The open file; it is closed also where this fails.
          offset: Where the value begins that was written.
          kept: As many files may stay open.

        Raises:
          OSError: It could not be synced.
        """
        with self.lock:
            self._missing.remove(offset)
            if self._kept is None:
                if not self._missing:
                    return fd
                if is_past_cache(fd):
                    os.close(fd)
                elif kept.acquire(blocking=False):
                    self._kept = fd
                else:
                    sync_and_close(fd, self.path)
                return None
            os.close(fd)
            if self._missing:
                return None
            whole, self._kept = self._kept, None
            kept.release()
            return whole

    def close(self) -> None:
        """Closes a file that has not become whole."""
        if self._kept is not None:
            os.close(self._kept)
