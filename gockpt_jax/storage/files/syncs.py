"""Makes written files durable, beside the writes of others.

TensorStore syncs each file and its folder before its write ends, four times per leaf. Here a large
file is synced beside the writes of the next ones, small ones in batches, which a journal takes at
once, and each folder once, at the end.
"""

import concurrent.futures
import os
import threading
from collections.abc import Sequence
from typing import TypeVar

# A sync mostly waits. One thread for each file would wait for the interpreter instead.
_THREADS = 16
_BATCH_FILES = 256

_Open = tuple[int, str]
_T = TypeVar("_T")


class Syncs:
    """Files that have been written and are to be synced; belongs to one save.

    A file stays open until it is synced: only so does the system tell of its failures.
    """

    def __init__(self) -> None:
        # Threads start when there is work for them.
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "gockpt_sync")
        self._lock = threading.Lock()
        self._small: list[_Open] = []
        self._started: list[concurrent.futures.Future[None]] = []
        self._open = threading.Semaphore(2 * _BATCH_FILES)
        self._folders: set[str] = set()

    def add(self, fd: int, path: str, *, is_small: bool = True) -> None:
        """Takes over an open file: it is synced now, or with others of its kind."""
        self._open.acquire()
        folder = os.path.dirname(path)
        with self._lock:
            self._folders |= {folder, os.path.dirname(folder)}  # the former may be new
            if is_small:
                self._small.append((fd, path))
            else:
                self._start([(fd, path)])
            # Small ones go with a large one, in the same entry of the journal.
            if not is_small or len(self._small) >= _BATCH_FILES:
                self._start_small()

    def add_folders(self, folder: str, root: str) -> None:
        """Takes note of a folder that is new, as those between it and the root may be."""
        with self._lock:
            while len(folder) > len(root):
                self._folders.add(folder)
                folder = os.path.dirname(folder)

    def finish(self) -> None:
        """Waits until all files are durable, with the folders that they are in; none follows.

        Raises:
          OSError: A file could not be written after all, whatever its write had said.
        """
        with self._lock:
            self._start_small()
        # Beside the last files: their names are in the folders by now.
        shares = _shares(sorted(self._folders))
        first_error([*self._started, *(self._pool.submit(_sync_folders, part) for part in shares)])

    def close(self) -> None:
        """Ends the threads; closes the files, also where the save has failed."""
        with self._lock:
            self._start_small()
        self._pool.shutdown()

    def _start_small(self) -> None:
        batch, self._small = self._small, []
        for share in _shares(batch):
            self._start(share)

    def _start(self, files: Sequence[_Open]) -> None:
        self._started.append(self._pool.submit(self._sync_files, files))

    def _sync_files(self, files: Sequence[_Open]) -> None:
        failure: OSError | None = None
        for fd, path in files:
            try:
                sync_and_close(fd, path)
            except OSError as error:
                failure = failure or error
            finally:
                self._open.release()
        if failure is not None:
            raise failure


def first_error(futures: Sequence[concurrent.futures.Future[None]]) -> None:
    """Waits for all, and raises what the first failing one raised."""
    concurrent.futures.wait(futures)
    for future in futures:
        future.result()


def _shares(items: Sequence[_T]) -> list[Sequence[_T]]:
    """An equal part for each thread."""
    return [items[n::_THREADS] for n in range(min(_THREADS, len(items)))]


def _sync_folders(folders: Sequence[str]) -> None:
    for folder in folders:
        sync_and_close(os.open(folder, os.O_RDONLY), folder)


def sync_and_close(fd: int, path: str) -> None:
    """Makes a file or a folder durable; its error names it."""
    try:
        os.fsync(fd)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)
