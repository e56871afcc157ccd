"""Byte budgets: what may be in flight at once."""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax

from gockpt_jax.locks import shared_lock

_T = TypeVar("_T")


@dataclasses.dataclass(slots=True)
class Loan:
    """What somebody has of a budget.

    What it says and what the budget counts change in one statement: an interrupt comes before both
    or after, wherever it comes, and whoever has the loan gives back what was taken, once.
    """

    num_bytes: int = 0


class ByteBudget:
    """Counts bytes in flight and makes whoever exceeds the limit wait.

    One request larger than the whole limit is admitted alone, so that nothing waits for ever.

    Args:
      limit_bytes: The limit; `None` counts without limiting.

    Example:
      >>> budget = ByteBudget(10)
      >>> budget.acquire(8)
      >>> budget.release(5)
      >>> budget.used_bytes, budget.peak_bytes
      (3, 8)
    """

    def __init__(self, limit_bytes: int | None):
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._lock = shared_lock()  # taken itself: an interrupt in `Condition.__enter__` keeps it
        self._changed = threading.Condition(self._lock)

    def acquire(self, num_bytes: int, loan: Loan | None = None) -> None:
        """Takes bytes, waiting for room; onto a loan, if they are to be repaid."""
        with self._lock:
            self._changed.wait_for(lambda: self._fits(num_bytes))
            self._take(num_bytes, loan)

    def add(self, num_bytes: int, loan: Loan | None = None) -> None:
        """Counts bytes that are there already, without waiting; onto a loan, likewise."""
        with self._lock:
            self._take(num_bytes, loan)

    def release(self, num_bytes: int, loan: Loan | None = None) -> None:
        """Gives bytes back; of a loan, if they are on one, as many as it has left at most."""
        with self._lock:
            loan = Loan(num_bytes) if loan is None else loan
            num_bytes = min(num_bytes, loan.num_bytes)
            used_bytes, left = self.used_bytes - num_bytes, loan.num_bytes - num_bytes
            self.used_bytes, loan.num_bytes = used_bytes, left
            self._changed.notify_all()

    def hand_over(self, num_bytes: int, loan: Loan) -> None:
        """Takes bytes off a loan that go on being counted: whoever has them now releases them."""
        with self._lock:
            loan.num_bytes -= num_bytes

    def split(self, loan: Loan, num_bytes: int, one: Loan, other: Loan) -> None:
        """Makes two loans of one: of so many bytes, even if it has fewer, and of what is left."""
        with self._lock:
            more, left = max(0, num_bytes - loan.num_bytes), max(0, loan.num_bytes - num_bytes)
            used_bytes = self.used_bytes + more
            loan.num_bytes, one.num_bytes, other.num_bytes, self.used_bytes = (
                0, num_bytes, left, used_bytes,
            )  # fmt: skip
            self.peak_bytes = max(self.peak_bytes, used_bytes)

    def repay(self, loan: Loan) -> None:
        """Gives back what a loan has left."""
        with self._lock:
            self.used_bytes, loan.num_bytes = self.used_bytes - loan.num_bytes, 0
            self._changed.notify_all()

    def lent(self, num_bytes: int) -> "_Lent":
        """Takes bytes, waiting for room, for what is begun in a `with`, and ends on another thread.

        Returns:
          What to enter. It yields what gives the bytes back, to be called there; if it cannot be
          begun, they are given back as the `with` ends.
        """
        return _Lent(self, num_bytes)

    def reset_peak(self) -> None:
        """Measures the peak from now on."""
        with self._lock:
            self.peak_bytes = self.used_bytes

    def _fits(self, num_bytes: int) -> bool:
        if self.limit_bytes is None or self.used_bytes == 0:
            return True
        return self.used_bytes + num_bytes <= self.limit_bytes

    def _take(self, num_bytes: int, loan: Loan | None) -> None:
        loan = Loan() if loan is None else loan
        used_bytes = self.used_bytes + num_bytes
        peak_bytes = max(self.peak_bytes, used_bytes)
        # All or nothing: an interrupt comes behind a call, or before.
        num_bytes += loan.num_bytes
        self.used_bytes, self.peak_bytes, loan.num_bytes = used_bytes, peak_bytes, num_bytes


class _Lent:
    """`ByteBudget.lent`. An interrupt behind the `next` of a generator would leave what it took."""

    def __init__(self, budget: ByteBudget, num_bytes: int):
        self._budget = budget
        self._num_bytes = num_bytes
        self._loan = Loan()

    def __enter__(self) -> Callable[[], None]:
        try:
            self._budget.acquire(self._num_bytes, self._loan)
        except BaseException:
            self._give_back_now()
            raise
        return self._give_back

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            self._give_back_now()

    def _give_back(self) -> None:
        self._budget.repay(self._loan)

    def _give_back_now(self) -> None:
        try:
            self._give_back()
        except BaseException:  # an interrupt of the interrupted: nobody else would
            self._give_back()
            raise


def batches(
    things: Iterable[_T],
    nbytes: Callable[[_T], int],
    limit_bytes: int | None,
    limit: int | None = None,
) -> Iterator[list[_T]]:
    """Takes things together, in order.

    Args:
      things: Of any kind.
      nbytes: How large one is.
      limit_bytes: The most bytes of a batch, but for one thing that is larger; `None`: any.
      limit: The most things in a batch; `None`: any.

    Example:
      >>> list(batches([9, 1, 2, 3, 9, 1, 4], lambda n: n, 5))
      [[9], [1, 2], [3], [9], [1, 4]]
      >>> list(batches("abc", len, None, 2))
      [['a', 'b'], ['c']]
    """
    batch: list[_T] = []
    total = 0
    for thing in things:
        size = nbytes(thing)
        too_large = limit_bytes is not None and total + size > limit_bytes
        if batch and (too_large or len(batch) == limit):
            yield batch
            batch, total = [], 0
        batch.append(thing)
        total += size
    if batch:
        yield batch


def device_headroom_bytes(used: str = "peak_bytes_in_use") -> int | None:
    """Free bytes on the fullest local device, after the peak so far.

    Args:
      used: Of the allocator's figures the one that is not free; `"bytes_in_use"`: as of now.

    Returns:
      Nine tenths of what the allocator has never used; `None` where the platform does not tell
      (the CPU backend). The rest is left for fragmentation.
    """
    free = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats or used not in stats:
            return None
        free.append(stats["bytes_limit"] - stats[used])
    return int(max(0, min(free)) * 9 // 10)
