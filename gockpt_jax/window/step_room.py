"""Room on the device for what armed steps retain: all of it while they run, then what follows."""

import contextlib
import threading
from collections.abc import Callable, Iterator

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

    @property
    def taken_bytes(self) -> int:
        """What has been taken for a step that is not in the device's queue yet."""
        return self._taken.num_bytes

    def take(self, num_bytes: int) -> None:
        """Waits until all that a step retains, and copies of what follows, fit the budget."""
        self._device.acquire(num_bytes, self._taken)

    def give_back(self) -> None:
        """The step did not run after all."""
        self._device.repay(self._taken)

    @contextlib.contextmanager
    def dispatched(self, results: list[jax.Array]) -> Iterator[Callable[[int], Callable[[], None]]]:
        """The step is in the device's queue; what nothing follows is nobody's any more.

        Args:
          results: Some that are ready when it has run, and all that is copied of them, also inside
            the block: nobody refers to these for longer than until then.

        Yields:
          To be called with the bytes that follow, which are held until they have been pulled. It
          returns what is to be called, on any thread, when they have been. A block that does not
          come to its end leaves nothing behind: all is free once the step has run.
        """
        followed, passed, has_run = Loan(), Loan(), threading.Event()
        freed = [passed]

        def watch() -> None:
            with contextlib.suppress(Exception):  # that of a step is the trainer's
                jax.block_until_ready(results)
            free()

        def free(_: BaseException | None = None) -> None:
            results.clear()  # before the budget says that the memory is free
            for loan in freed:
                self._device.repay(loan)
            has_run.set()

        def pulled() -> None:
            has_run.wait()  # not before `results` is empty
            self._device.repay(followed)

        def follows(num_bytes: int) -> Callable[[], None]:
            # More than was taken, if the compiler has put a value elsewhere than was foreseen.
            self._device.split(self._taken, num_bytes, followed, passed)
            self._watcher.submit(watch, free)
            return pulled

        try:
            yield follows
        except BaseException:  # whoever was to give something back may never hear of it
            taken, self._taken = self._taken, Loan()
            freed += [taken, followed]
            self._watcher.submit(watch, free)
            raise
