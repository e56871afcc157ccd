"""A link between device and host that is as slow as one says, for machines without a device.

On the CPU backend "device to host" is a view, so nothing that a checkpoint library is there for
would happen. Behind this link every mode's bytes take their time, one after another, as on a real
link: stock's inside `ArrayHandler.serialize`, which returns when the state is on the host; ours
where a pull's result is waited for. Both sleep; nothing else of either changes.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from gockpt_jax.transfer import pull


class Link:
    """One link, shared by all that is on its way.

    Args:
      bytes_per_sec: Its bandwidth.
    """

    def __init__(self, bytes_per_sec: float):
        self.bytes_per_sec = bytes_per_sec
        self.carried_bytes = 0
        self._free_at = 0.0
        self._lock = threading.Lock()

    def start(self, num_bytes: int) -> float:
        """Puts bytes on the link; returns when they will have arrived (`time.perf_counter`)."""
        with self._lock:
            now = time.perf_counter()
            self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_sec
            self.carried_bytes += num_bytes
            return self._free_at

    def carry(self, num_bytes: int) -> None:
        """Puts bytes on the link and waits for them."""
        wait_until(self.start(num_bytes))


def wait_until(arrival: float) -> None:
    """Sleeps until `time.perf_counter()` says so."""
    time.sleep(max(0.0, arrival - time.perf_counter()))


@contextlib.contextmanager
def slow_pulls(link: Link | None) -> Iterator[None]:
    """Sends gockpt_jax's pulls over the link."""
    if link is None:
        yield
        return
    patch = contextlib.ExitStack()
    with patch:
        _replace(patch, "__init__", lambda original: _starting(original, link))
        _replace(patch, "is_ready", _ready)
        _replace(patch, "result", _arrived)
        yield


def _replace(patch: contextlib.ExitStack, name: str, make: Any) -> None:
    original = getattr(pull.Pull, name)
    setattr(pull.Pull, name, make(original))
    patch.callback(setattr, pull.Pull, name, original)


def _starting(original: Any, link: Link) -> Any:
    def init(self: Any, indices: Any, shards: Any, *rest: Any) -> None:
        original(self, indices, shards, *rest)
        self.arrival = link.start(sum(shard.nbytes for shard in shards))

    return init


def _ready(original: Any) -> Any:
    def is_ready(self: Any) -> bool:
        return time.perf_counter() >= self.arrival and original(self)

    return is_ready


def _arrived(original: Any) -> Any:
    def result(self: Any) -> Any:
        found = original(self)
        wait_until(self.arrival)
        return found

    return result
