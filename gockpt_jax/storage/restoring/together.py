"""A restore on several processes: it is over when all have read, or one has failed.

Orbax waits for them too, but only for some minutes, where it is told which processes take part.
"""

from collections.abc import Callable
from typing import Any

from gockpt_jax.errors import ProcessError
from gockpt_jax.window.processes import MEETING_SECS, Processes

_MOST_CHARACTERS = 300  # of what another process is told


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
    mine = None
    if failure is not None:
        mine = " ".join(f"{type(failure).__name__}: {failure}".split())[:_MOST_CHARACTERS]
    elsewhere = processes.objection("restored", mine, MEETING_SECS)
    if failure is not None:
        raise failure
    if elsewhere is not None:
        raise ProcessError(
            f"{path} was not restored, for one process has failed: {elsewhere.rstrip('.')}. Look "
            "at its log; the checkpoint is as it was."
        )
    return found
