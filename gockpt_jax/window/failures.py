"""A failed save reaches the trainer: as an error, or as a warning with which training goes on."""

from gockpt_jax.errors import ReplayError, SaveFailedWarning, warn
from gockpt_jax.options import OnSaveError


def surface(error: BaseException, on_save_error: OnSaveError) -> None:
    """Raises an error of a save, or warns of it.

    Args:
      error: What went wrong, with its cause.
      on_save_error: The user's choice. Interrupts are raised all the same.
    """
    if on_save_error == "raise" or not isinstance(error, Exception):
        raise error
    cause = f", from {error.__cause__!r}" if error.__cause__ is not None else ""
    warn(f"{type(error).__name__}: {error}{cause}", SaveFailedWarning)


def window_failed(failure: BaseException) -> ReplayError:
    """What the trainer is told of an error on the worker thread, in a window that was open."""
    error = ReplayError(
        f"a window failed on the worker thread: {failure!r}. Earlier checkpoints are intact and "
        "training can go on; the next predicted save opens a new window."
    )
    error.__cause__ = failure
    return error
