"""How fast bytes leave the devices, learned from the transfers themselves."""

import collections
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

_MIN_SAMPLE_BYTES = 32 * 2**20
"""Less than this per sample would measure latency."""
_MIN_SAMPLE_SECS = 1e-3
"""A transfer that takes no time is a view of memory that is the host's already."""
_MIN_SAMPLES, _MAX_SAMPLES = 3, 32
_MAX_GAP_SECS = 1e-3


class _Watched(threading.local):
    """Transfers that came one behind the other, as the worker that landed them saw them: its own.

    Attributes:
      since: When the first of them that has not been counted began; `None`: not watched.
      num_bytes: Of those, of one device.
      last_end: When the last has come.
    """

    since: float | None = None
    num_bytes: int = 0
    last_end: float = float("-inf")


class LinkMeter:
    """The median rate at which one device's bytes reach the host.

    Only what was watched from its beginning counts: whoever lands a pull comes before its source is
    ready, waits for that, and then for the transfer; or comes at once after one that was watched,
    which it stands behind. A pull that was late to be looked at has taken an unknown time.

    Example:
      >>> meter = LinkMeter()
      >>> for secs in (0.1, 0.1, 0.2):
      ...     meter.pulled(10**9, secs)
      >>> f"{meter.bytes_per_sec:.1e}"
      '1.0e+10'
    """

    def __init__(self) -> None:
        self._rates: collections.deque[float] = collections.deque(maxlen=_MAX_SAMPLES)
        self._watched = _Watched()

    @property
    def bytes_per_sec(self) -> float | None:
        """The rate of one device while all send; `None` until enough has been seen."""
        rates = self._rates.copy()  # another thread may add one
        return statistics.median(rates) if len(rates) >= _MIN_SAMPLES else None

    def pulled(self, num_bytes: int, secs: float) -> None:
        """Told of a transfer: bytes of one device, and the time they took."""
        if num_bytes >= _MIN_SAMPLE_BYTES and secs >= _MIN_SAMPLE_SECS:
            self._rates.append(num_bytes / secs)

    def begin(self, sources: Sequence[Any], is_done: bool) -> None:
        """Called on the worker thread when it comes for a pull.

        Args:
          sources: The device buffers that are moved; waited for.
          is_done: Whether all of it has arrived already.
        """
        watched, now = self._watched, time.perf_counter()
        if not is_done and not all(source.is_ready() for source in sources):
            jax.block_until_ready(list(sources))
            watched.since, watched.num_bytes = time.perf_counter(), 0
        elif is_done or now - watched.last_end > _MAX_GAP_SECS:
            watched.since = None

    def end(self, chunks: Sequence[Any], num_devices: int) -> None:
        """Called when the pull has arrived, as chunks with `nbytes` from as many devices."""
        watched = self._watched
        if watched.since is None:
            return
        watched.last_end = time.perf_counter()
        watched.num_bytes += sum(c.nbytes for c in chunks) // max(num_devices, 1)
        if watched.num_bytes >= _MIN_SAMPLE_BYTES:
            self.pulled(watched.num_bytes, watched.last_end - watched.since)
            watched.since, watched.num_bytes = watched.last_end, 0


LINK = LinkMeter()
"""Of this process: the link is the machine's, so all managers learn of it together."""
