"""What copies and retained values may take of a device: an estimate, which copies may disprove."""

import contextlib
import logging
from collections.abc import Iterator

from gockpt_jax.checks import describe_bytes
from gockpt_jax.errors import is_out_of_memory
from gockpt_jax.transfer.budget import ByteBudget, device_headroom_bytes
from gockpt_jax.window.processes import Processes

_log = logging.getLogger("gockpt_jax")

_SMALL = 64  # of the budget less than one part of so many: it is not for want of a smaller budget


class DeviceBudget(ByteBudget):
    """Counts bytes on the fullest device, within a limit that is the same on all processes.

    Without a number of the user's it is what the steps leave free. Other programs may take of that
    later: a copy for which there was no room lowers the limit, of the save that it belongs to and
    of all behind it; beside other processes of those behind it only, for what is staged is a
    program of them all (docs/decisions/0037).

    Args:
      limit_bytes: The user's; `None`: what the steps leave free, where devices tell.
      processes: Those that stage alike.
    """

    def __init__(self, limit_bytes: int | None, processes: Processes):
        super().__init__(limit_bytes)
        self._processes = processes
        self._is_measured = limit_bytes is not None
        self._found: int | None = None  # what a copy that failed here has shown

    def measure(self, *, stepped: bool) -> None:
        """Asks the devices, unless it has been done, or the user has said a number.

        Once, after a step and before anything of ours: the allocator's peak has no way back, and
        would soon count our own copies.

        Args:
          stepped: Whether a step has run.
        """
        if not self._is_measured:
            self.limit_bytes = self._processes.least("device_headroom", device_headroom_bytes())
            self._is_measured = stepped
            self.agree()

    def agree(self) -> None:
        """Lowers the limit to the least that copies have shown on any process; asks all."""
        less = self._processes.least("device_room", self._found)
        if less is not None and (self.limit_bytes is None or less < self.limit_bytes):
            self.limit_bytes = less

    def allows_less(self, num_bytes: int, beside_bytes: int, error: BaseException) -> bool:
        """Lowers the limit of a device that had no room for a block, unless that cannot help.

        Args:
          num_bytes: Of the block.
          beside_bytes: Of what was in flight when it was tried.
          error: What its copy raised.

        Returns:
          Whether smaller parts of it may be copied now.
        """
        if not self.heed(num_bytes, beside_bytes, error) or self._processes.several:
            return False
        self.agree()
        return True

    @contextlib.contextmanager
    def heeded(self, num_bytes: int) -> Iterator[None]:
        """What finds no room in here is not tried again in the same way: later saves have less.

        Args:
          num_bytes: Of what is tried; counted already.
        """
        beside_bytes = self.used_bytes - num_bytes
        try:
            yield
        except BaseException as error:
            self.heed(num_bytes, beside_bytes, error)
            raise

    def heed(self, num_bytes: int, beside_bytes: int, error: BaseException) -> bool:
        """Takes note of less room than was thought, for later saves.

        What was in flight had room, and so has what is free, if the device tells: of what did not
        fit a fourth at least, and three at most. What is small and alone says nothing of the rest.

        Args:
          num_bytes: Of what did not fit.
          beside_bytes: Of what was in flight when it was tried: an allocator waits before it fails.
          error: What that raised.

        Returns:
          Whether it was for want of memory, and there is less than was known.
        """
        known = [x for x in (self.limit_bytes, self._found) if x is not None]
        before = min(known, default=max(self.peak_bytes, beside_bytes + num_bytes))
        is_small = beside_bytes + num_bytes <= before // _SMALL
        if num_bytes == 0 or is_small or not is_out_of_memory(error):
            return False
        part, free = num_bytes // 4, device_headroom_bytes("bytes_in_use") or 0
        less = beside_bytes + max(part, min(3 * part, free))
        if less >= before:
            return False
        self._found = less
        _log.warning(
            "a device had no room for %s: from now on saves take at most %s of it at once, "
            "whatever `device_budget_bytes` said, and stall for longer",
            describe_bytes(num_bytes), describe_bytes(less),
        )  # fmt: skip
        return True
