"""A link between device and host that is as slow as one says, for machines without a device.

On the CPU backend "device to host" is a view, so nothing that a checkpoint library is there for
would happen. Behind this link every mode's bytes take their time, one array after another, each
once it has been computed: stock's inside `ArrayHandler.serialize`, which returns when the state is
on the host; ours inside a pull, whose data is waited for. Nothing else of either changes.
"""

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gockpt_jax.transfer import pull

Sent = concurrent.futures.Future[None]


class Link:
    """One link, shared by all that is on its way.

    Args:
      bytes_per_sec: Its bandwidth.
    """

    def __init__(self, bytes_per_sec: float):
        self.bytes_per_sec = bytes_per_sec
        self.carried_bytes = 0
        self._free_at = 0.0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "bench-link")

    def send(self, arrays: Sequence[jax.Array]) -> Sent:
        """Puts arrays on the link, behind what is on it; returns at once."""
        return self._thread.submit(self._carry, list(arrays))

    def _carry(self, arrays: list[jax.Array]) -> None:
        jax.block_until_ready(arrays)
        num_bytes = sum(array.nbytes for array in arrays)
        self.carried_bytes += num_bytes
        # Counted from the end of the last one, so that short sleeps do not add up.
        start = max(self._free_at, time.perf_counter())
        self._free_at = start + num_bytes / self.bytes_per_sec
        time.sleep(max(0.0, self._free_at - time.perf_counter()))

    def close(self) -> None:
        """Waits for what is on its way."""
        self._thread.shutdown()


class _OnTheWay:
    """An array that is on the link; a pull waits for it as for any other."""

    def __init__(self, array: jax.Array, sent: Sent):
        self._array = array
        self._sent = sent
        self.nbytes = array.nbytes

    def is_ready(self) -> bool:
        """Whether it has arrived."""
        return self._sent.done()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._sent.result()
        return np.asarray(self._array, dtype)


@contextlib.contextmanager
def slow_pulls(link: Link | None) -> Iterator[None]:
    """Sends gockpt_jax's pulls over the link."""
    if link is None:
        yield
        return
    start = pull.start_buffer

    def start_on_link(source: jax.Array) -> Any:
        buffer = start(source)
        return _OnTheWay(buffer, link.send([buffer]))

    pull.start_buffer = start_on_link
    try:
        yield
    finally:
        pull.start_buffer = start
        link.close()
