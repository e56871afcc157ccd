"""A restore on several processes: of one step, and over when all have read, or one has failed.

Orbax waits for them too, but only for some minutes, where it is told which processes take part.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from gockpt_jax.errors import ProcessError
from gockpt_jax.window.processes import MEETING_SECS, Processes

_MOST_CHARACTERS = 300  # of what another process is told

Found = TypeVar("Found", bound=tuple[int, Any, Any])


def one_step(find: Callable[[], Found], processes: Processes) -> Found:
    """What this process has found to restore, when all have found the same label.

    Args:
      find: Finds the label first, and raises if there is none; all processes call it.
      processes: Those that restore together.

    Raises:
      ProcessError: if others have found another, or nothing, or do not come.
    """
    if not processes.several:
        return find()
    found: Found | None = None
    failure: Exception | None = None
    try:
        found = find()
    except Exception as error:
        failure = error
    mine = _in_short(failure) if found is None else f"step {found[0]}"
    told = processes.gather("restoring", mine, MEETING_SECS)
    if found is None:
        assert failure is not None, "what has found nothing has raised"
        raise failure
    if len(set(told.values())) > 1:
        said = ", ".join(f"{text} on process {index}" for index, text in told.items())
        raise ProcessError(
            f"`restore` has not found the same on all processes: {said}. Nothing was restored. "
            "Restore the same label on all, such as one that the first tells the others."
        )
    return found


def together(read: Callable[[], Any], path: Any, processes: Processes) -> Any:
    """What this process has read, when all have: one may take far longer than another.

    Args:
      read: Reads this process's part; all processes call it.
      path: What is read.
      processes: Those that restore together.

    Raises:
      ProcessError: if another has failed, or does not come.
    """
    if not processes.several:
        return read()
    found: Any = None
    failure: Exception | None = None
    try:
        found = read()
    except Exception as error:
        failure = error
    mine = None if failure is None else _in_short(failure)
    elsewhere = processes.objection("restored", mine, MEETING_SECS)
    if failure is not None:
        raise failure
    if elsewhere is not None:
        raise ProcessError(
            f"{path} was not restored, for one process has failed: {elsewhere.rstrip('.')}. Look "
            "at its log; the checkpoint is as it was."
        )
    return found


def _in_short(failure: Exception | None) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:_MOST_CHARACTERS]
