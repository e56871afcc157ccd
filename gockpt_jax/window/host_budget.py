"""The one budget for what saves hold in the memory of this process, and what it has room for.

Counted in it are chunks on the host, from when they are sent for at the seal, or have landed in a
window, until they have been written; retained values until they have been replayed; what replay and
the audit take beside them; and what the writer copies. Nobody waits for it: room is asked for when
a window opens, and where there is none the window opens later, or the save is a snapshot
(docs/decisions/0019).
"""

import logging

import jax

from gockpt_jax.checks import describe_bytes
from gockpt_jax.errors import HostBudgetError
from gockpt_jax.options import WindowOptions
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.host_memory import (
    PINNED_LIMIT,
    PinnedPool,
    host_headroom_bytes,
    is_in_memory,
    pinned_pool,
)
from gockpt_jax.window.cost import STEPS_IN_FLIGHT

_log = logging.getLogger("gockpt_jax")


class HostBudget(ByteBudget):
    """Counts what saves hold on the host, and says what there is room for.

    Without a number of the user's the limit is what the largest save so far needs, and a tenth; but
    never more than the host has left, nor than XLA pins for transfers. It grows with what is saved,
    and the host is asked anew before a window opens, so memory that something else has taken
    meanwhile is not promised.

    Args:
      options: The user's.

    Attributes:
      directory: Where checkpoints go, if that is known: files in memory take from the same.

    Example:
      >>> budget = HostBudget(WindowOptions(host_budget_bytes=100))
      >>> budget.add(60)
      >>> budget.why_no_room(40), budget.why_no_room(40, following_bytes=10)
      (None, 'the host budget had no room: 60 B of 100 B were taken, and 60 B are needed')
    """

    def __init__(self, options: WindowOptions):
        super().__init__(options.host_budget_bytes)
        self.directory: str | None = None
        self._is_given = options.host_budget_bytes is not None
        self._write_bytes = options.write_limit_bytes
        self._sampled = 0.0 if options.audit is None else options.audit.fraction
        # One is written and one waits while the next is taken.
        self._others = 2 if options.on_busy == "newest" else 0
        self._state_bytes = 0
        self._following_bytes = 0

    def room_bytes(self, state_bytes: int) -> int | None:
        """What the chunks of one save may take in all, for the plan; `None`: nothing is known.

        Args:
          state_bytes: Of the state, in this process.
        """
        if self._is_given:
            return self.limit_bytes
        left = self._left_bytes(state_bytes)
        return None if left is None else max(0, left - self._beside_bytes(state_bytes))

    def why_no_room(
        self, state_bytes: int, following_bytes: int = 0, *, freed_bytes: int = 0
    ) -> str | None:
        """Why a save cannot be taken in beside what is held now; `None` if it can.

        Args:
          state_bytes: Of what it saves, in this process.
          following_bytes: What follows it after one step of its window.
          freed_bytes: Of what is held now, what would be given back before.
        """
        used_bytes = max(0, self.used_bytes - freed_bytes)
        needed = self._needed_bytes(state_bytes, following_bytes)
        if not self._is_given:
            usual_bytes = self._expect(state_bytes, following_bytes)
            # The host is asked only if its answer matters: that takes a millisecond.
            if used_bytes + needed <= usual_bytes:
                self._keep_within_host()
        if self.limit_bytes is None or used_bytes + needed <= self.limit_bytes:
            return None
        taken = f"{describe_bytes(used_bytes)} of {describe_bytes(self.limit_bytes)}"
        return (
            f"the host budget had no room: {taken} were taken, and {describe_bytes(needed)} are "
            "needed"
        )

    def waiting_limit_bytes(self, state_bytes: int, following_bytes: int) -> int | None:
        """What may wait for replay in a window that has been admitted; `None`: no limit.

        What it was promised, and what there is room for besides. Whatever it saves is still to
        come, so that room is not free to be taken.

        Args:
          state_bytes: Of what it saves, in this process.
          following_bytes: What follows it after one step of its window.
        """
        if self.limit_bytes is None:
            return None
        left = self.limit_bytes - self.used_bytes - self._needed_bytes(state_bytes, following_bytes)
        return STEPS_IN_FLIGHT * following_bytes + max(0, left)

    def admit_save(self, state_bytes: int) -> None:
        """Takes note of a save that is made at any rate.

        Without a number of the user's none is refused: it needs no more than one of stock's, and
        what the host has left is an estimate.

        Args:
          state_bytes: Of what it saves, in this process.

        Raises:
          HostBudgetError: if the user's number cannot hold it even alone.
        """
        is_larger = not self._is_given and state_bytes > self._state_bytes
        if is_larger:
            self._expect(state_bytes)
            self._keep_within_host()
        if self.limit_bytes is None or state_bytes <= self.limit_bytes:
            return
        if self._is_given:
            raise HostBudgetError(
                f"`host_budget_bytes={self.limit_bytes}` cannot hold what this process saves, "
                f"{state_bytes} bytes. Give that at least, and more where saves shall be "
                "windows (`report.reason` says how much), or None for the default."
            )
        if is_larger:
            self._warn_of(state_bytes)

    def _warn_of(self, state_bytes: int) -> None:
        """Tells of a save that takes more than there is."""
        left = describe_bytes(self.limit_bytes or 0)
        takes, pool = f"a save takes {describe_bytes(state_bytes)}", _pool()
        if pool is not None and state_bytes > pool.limit_bytes:
            _log.warning(
                "%s of pinned memory, and XLA has %s for transfers: the rest leaves through "
                "ordinary memory, which is many times slower. Set `%s=%d` before JAX starts",
                takes, describe_bytes(pool.limit_bytes), PINNED_LIMIT, pool.gib_for(state_bytes),
            )  # fmt: skip
        else:
            _log.warning(
                "%s of the host's memory, which has %s left: the system may end the job for want "
                "of it. Give the job more, or `save` less",
                takes, left,
            )  # fmt: skip

    def _expect(self, state_bytes: int, following_bytes: int = 0) -> int:
        """Sets the default limit for the largest save so far, and returns it."""
        self._state_bytes = max(self._state_bytes, state_bytes)
        self._following_bytes = max(self._following_bytes, following_bytes)
        states = (1 + self._others) * self._state_bytes + self._sampled_bytes(self._state_bytes)
        following = STEPS_IN_FLIGHT * self._following_bytes
        self.limit_bytes = (states + following + self._write_bytes) * 11 // 10
        return self.limit_bytes

    def _keep_within_host(self) -> None:
        left = self._left_bytes(self._state_bytes)
        if left is not None and self.limit_bytes is not None:
            self.limit_bytes = min(self.limit_bytes, left)

    def _needed_bytes(self, state_bytes: int, following_bytes: int) -> int:
        beside = 0 if self._is_given else self._beside_bytes(state_bytes)
        return state_bytes + STEPS_IN_FLIGHT * following_bytes + beside

    def _beside_bytes(self, state_bytes: int) -> int:
        """What a save takes beside chunks and retained values: write buffers, the audit's sample.

        Replay's scratch is a few MiB; it comes out of the tenth on top.
        """
        # Chunks that are compressed count twice.
        return min(self._write_bytes, 2 * state_bytes) + self._sampled_bytes(state_bytes)

    def _sampled_bytes(self, state_bytes: int) -> int:
        return int(self._sampled * state_bytes)

    def _left_bytes(self, state_bytes: int) -> int | None:
        """What saves may take of this host's memory, what they hold now included."""
        pool, free = _pool(), host_headroom_bytes()
        known = [] if pool is None else [pool.limit_bytes]
        if free is not None:
            free += self.used_bytes
            if self.directory is not None and is_in_memory(self.directory):
                free -= state_bytes  # the checkpoint itself
            known.append(max(0, free))
        return min(known, default=None)


def _pool() -> PinnedPool | None:
    return pinned_pool(jax.local_devices())
