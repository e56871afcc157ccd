"""Programs of the transfer, compiled once per process on a thread of their own.

Never on the trainer's thread: under its `set_mesh`, JAX refuses programs for other devices than the
mesh's. Called there, a compiled program does not look at it.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Hashable
from typing import Any


class Programs:
    """Compiled programs by what they are for; a manager that is opened again meets the same.

    Example:
      >>> programs = Programs("a thread's name")
      >>> programs.wanted("six", lambda: 2 * 3).result()
      6
    """

    def __init__(self, thread_name: str):
        self._name = thread_name
        self._found: dict[Hashable, concurrent.futures.Future[Any]] = {}
        self._queue: list[tuple[Hashable, Callable[[], Any]]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wanted(self, key: Hashable, compile_it: Callable[[], Any]) -> Any:
        """A future of the program; one that failed to compile is tried again when next wanted.

        Args:
          key: What it is for.
          compile_it: Called on the thread, unless it has been before.
        """
        with self._lock:
            if key not in self._found:
                self._found[key] = concurrent.futures.Future()
                self._queue.append((key, compile_it))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name)
                    self._thread.start()
            return self._found[key]

    def needed(self, key: Hashable, compile_it: Callable[[], Any]) -> Any:
        """The program itself, before all that are only wanted; waits for it."""
        found = self.wanted(key, compile_it)
        if not found.done():
            with self._lock:
                self._queue.sort(key=lambda entry: entry[0] != key)
        return found.result()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                key, compile_it = self._queue.pop(0)
                found = self._found[key]
            try:
                found.set_result(compile_it())
            except BaseException as error:  # handed to whoever asks for the program
                with self._lock:
                    del self._found[key]
                found.set_exception(error)
