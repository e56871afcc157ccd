"""A failed save reaches the trainer: as an error, or as a warning with which training goes on."""

from gockpt_jax.errors import (
    DeviceMemoryError,
    ReplayError,
    SaveFailedWarning,
    is_out_of_memory,
    warn,
    without_specs,
)
from gockpt_jax.options import OnSaveError


def surface(error: BaseException, on_save_error: OnSaveError) -> None:
    """Raises an error of a save, or warns of it.

    Args:
      error: What went wrong, with its cause.
      on_save_error: The user's choice. Interrupts are raised all the same.
    """
    if on_save_error == "raise" or not isinstance(error, Exception):
        raise error
    told, cause = f"{type(error).__name__}: {error}", error.__cause__
    is_told = isinstance(cause, Exception) and str(cause) != "" and without_specs(cause) in told
    if cause is not None and not is_told:
        told = f"{told.rstrip('.')}, from {cause!r}."
    warn(told, SaveFailedWarning)


def window_failed(failure: BaseException) -> ReplayError:
    """What the trainer is told of an error on the worker thread, in a window that was open."""
    error = ReplayError(
        f"a window failed on the worker thread: {failure!r}. Earlier checkpoints are intact and "
        "training can go on; the next predicted save opens a new window."
    )
    error.__cause__ = failure
    return error


def named(step: int, error: BaseException) -> BaseException:
    """The error to raise for a failed save: a `DeviceMemoryError` where a device was full.

    Args:
      step: The save's label.
      error: What failed. Anything else is returned as it is.
    """
    what = str(error).partition("\n")[0].rstrip(".")
    if not is_out_of_memory(error):
        return error
    found = DeviceMemoryError(
        f"save of step {step}: the device has no memory for the copies that it takes: {what}. "
        "Nothing of this save is visible, earlier checkpoints are intact, and training can go on. "
        "Allow saves less with `WindowOptions(device_budget_bytes=...)`: what exceeds "
        "`device_budget_bytes` leaves in parts, or in windows of more steps (`max_steps`). The "
        "next save tries anew."
    )
    found.__cause__ = error
    return found
