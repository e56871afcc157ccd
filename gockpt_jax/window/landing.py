"""How what was staged comes to the host: the trainer's thread sends it, the worker's lands it."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax

from gockpt_jax.transfer.pull import Pull
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.worker import Failed, Task

_T = TypeVar("_T")


def landing_task(
    wait: Callable[[], _T], take: Callable[[_T], object], has_landed: Callable[[], None],
    heed: Failed, failed: Failed,
) -> tuple[Task, Failed]:  # fmt: skip
    """For `Worker.submit`: waits for what is on its way to the host, and takes it in.

    Args:
      wait: Waits for it; nobody else holds what this one does, so that it is free behind it.
      take: Takes it in.
      has_landed: Gives back what it had of the device budget; may be called again.
      heed: Is told of an error first: a runtime may find out only now that it had no room.
      failed: Is told then.
    """
    on_its_way = [wait]

    def task() -> None:
        found = on_its_way.pop()()
        has_landed()
        take(found)

    def not_landed(error: BaseException) -> None:
        # These would keep it on the device, which has to be free before the budget says so.
        on_its_way.clear()
        error.with_traceback(None)
        try:
            has_landed()
            heed(error)
        finally:
            failed(error)

    return task, not_landed


def send(
    start: Callable[[], Pull[_T]], take: Callable[[_T], object], failed: Failed, num_bytes: int,
    resources: Resources,
) -> bool:  # fmt: skip
    """Stages something as the device budget has room, and has the worker land it.

    The budget is an estimate: other programs may have taken the device's memory since.

    Args:
      start: Stages it, and starts its pull.
      take: Takes in what comes.
      failed: Is told of what went wrong instead.
      num_bytes: Of what is staged.
      resources: The session's.

    Returns:
      Whether it is on its way. If not, the device had less room, and parts of it may be tried.
    """
    device, beside_bytes = resources.device, 0
    try:
        with device.lent(num_bytes) as give_back:
            beside_bytes = device.used_bytes - num_bytes
            heed = functools.partial(device.heed, num_bytes, beside_bytes)
            resources.worker.submit(*landing_task(start().result, take, give_back, heed, failed))
        return True
    except jax.errors.JaxRuntimeError as error:
        if not device.allows_less(num_bytes, beside_bytes, error):
            raise
        return False  # the error goes with it, which holds what was copied
