"""Named exceptions. Each derives from the builtin a caller would already catch."""

import inspect
import re
import types
import warnings

import jax


class StepMismatchError(ValueError):
    """The state cannot be found among a wrapped step's arguments or results."""


class WrapError(TypeError):
    """`wrap` was given something that is not a train step."""


class ReplayError(RuntimeError):
    """Replay could not bring a chunk to the sealed version; the save fails, nothing is written."""


class AuditError(RuntimeError):
    """Replay made other values than the device; the save fails, nothing of it becomes visible."""


class VerifyError(ValueError):
    """A checkpoint is not what was written, or has no checksums that could tell."""


class TargetError(ValueError):
    """A checkpoint does not fit the target to restore into; the message names every leaf."""


class NoCheckpointError(FileNotFoundError):
    """There is nothing to resume from; the message says what the directory holds instead."""


class StorageError(OSError):
    """A save could not be written; nothing of it is visible, earlier checkpoints are intact."""


class HostBudgetError(ValueError):
    """The host budget cannot hold the state; nothing was saved, earlier checkpoints are intact."""


class DeviceMemoryError(RuntimeError):
    """A device has no memory for a save's copies; nothing of it is visible, training can go on."""


class ProcessError(RuntimeError):
    """A process of the job failed or did not come, so none saves; the message names it and why."""


class SaveFailedWarning(UserWarning):
    """A save failed, and training goes on as `WindowOptions(on_save_error="warn")` says."""


class SnapshotOnlyWarning(UserWarning):
    """Saves cannot be windows: a step cannot be armed, or a handler of stock's takes the state.

    The message names the remedy.
    """


_BETWEEN = frozenset({"gockpt_jax", "contextlib", "orbax", "asyncio", "nest_asyncio", "jax"})
"""Packages through which the user's own line may have called us."""


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the line of the user's that has called us."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and _package(frame) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the runtime had no memory: the device's, or pinned memory of the host.

    By the status that its text begins with: behind another one it is somebody else's, such as that
    of a service that the user's callback has asked.
    """
    is_ours = isinstance(error, jax.errors.JaxRuntimeError)
    return is_ours and str(error).startswith("RESOURCE_EXHAUSTED")


def without_specs(error: Exception) -> str:
    """TensorStore's errors without a page of its specification, and of places in its source."""
    noise = r" \[(tensorstore_spec|source locations)='.*?'\](?= \[|$)"
    return re.sub(noise, "", str(error), flags=re.DOTALL)


def in_a_line(error: BaseException) -> str:
    """An error in a line: JAX's hold whole arrays at times, or a page of the compiler's."""
    first, _, rest = str(error).partition("\n")
    if first.endswith(":") and rest:  # it only announces what the others tell
        first = " ".join(rest.split())
    return f"{type(error).__name__}: {first if len(first) < 300 else first[:300] + '...'}"
