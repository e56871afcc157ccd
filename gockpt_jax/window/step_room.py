"""Room on the device for what armed steps retain: all of it while they run, then what follows."""

import contextlib
import threading
from collections.abc import Callable, Sequence

import jax

from gockpt_jax.transfer.budget import ByteBudget, Loan
from gockpt_jax.window.worker import Worker


class StepRoom:
    """What is taken of the device budget for an armed step, and given back in two parts.

    An armed step returns the retained values of all groups. Those that nothing follows are free
    once it has run, for nobody refers to them; so are the originals of copies. What follows is
    there until it has been pulled.

    Used on the trainer's thread. Another finds out that a step has run: the trainer never waits for
    the device, and whoever lands pulls may be waiting for an earlier one.

    Args:
      device: Budget for staged copies and retained values.
      watcher: Waits for the steps.
    """

    def __init__(self, device: ByteBudget, watcher: Worker):
        self._device = device
        self._watcher = watcher
        self._taken = Loan()

    def take(self, num_bytes: int) -> None:
        """Waits until all that a step retains, and copies of what follows, fit the budget."""
        self._device.acquire(num_bytes, self._taken)

    def give_back(self) -> None:
        """The step did not run after all."""
        self._device.repay(self._taken)

    def dispatched(self, results: Sequence[jax.Array], following_bytes: int) -> Callable[[], None]:
        """The step is in the device's queue, and what nothing follows is nobody's any more.

        Args:
          results: Some that are ready when it has run, and all that is copied of them: nobody
            refers to these for longer than until then.
          following_bytes: Held until it has been pulled.

        Returns:
          To be called, on any thread, when it has been.
        """
        followed, passed = Loan(), Loan()
        watched, has_run = list(results), threading.Event()

        def watch() -> None:
            with contextlib.suppress(Exception):  # that of a step is the trainer's
                jax.block_until_ready(watched)
            watched.clear()  # before the budget says that the memory is free
            self._device.repay(passed)
            has_run.set()

        def pulled() -> None:
            has_run.wait()  # not before `watched` is empty
            self._device.repay(followed)

        try:
            # More than was taken, if the compiler has put a value elsewhere than was foreseen.
            self._device.split(self._taken, following_bytes, followed, passed)
            self._watcher.submit(watch)
            return pulled
        except BaseException:  # an interrupt
            self._device.repay(passed)
            self._device.repay(followed)
            raise
