"""What a session says to a user whose saves could be windows, or more of them could leave early."""

import logging
from collections.abc import Collection, Iterable

from gockpt_jax.checks import counted
from gockpt_jax.errors import SnapshotOnlyWarning, warn
from gockpt_jax.training.traced import TracedStep

_log = logging.getLogger("gockpt_jax")

NOT_OURS = "no windows: the handlers given to the manager took all items of the last save"
NOT_WRAPPED = "no wrapped step has run; if steps have, call what `wrap(train_step)` returned"
_UNUSED = (
    "Two saves have come, and no wrapped step has run, so all saves are snapshots. Call what "
    "`wrap` returned, as in `train_step = manager.wrap(train_step)`."
)
_NONE_WRAPPED = (
    "Two saves have come, and no step has been wrapped, so all saves are snapshots. For windows "
    "train with `train_step = manager.wrap(train_step)`; without them nothing is to be done."
)


def tell_of_no_step(*, has_wrapped: bool) -> None:
    """Told at the second save, if no wrapped step has run by then.

    By a warning if the user has wrapped one. If not, a line is logged: there may be none, as where
    checkpoints are converted, and a warning may be made an error there.
    """
    if has_wrapped:
        warn(_UNUSED, SnapshotOnlyWarning)
    else:
        _log.warning(_NONE_WRAPPED)


def num_beside(items: Iterable[Collection[int]], steps: Iterable[TracedStep]) -> int:
    """How many arrays of a save no wrapped step has returned as its state; 0 if nobody can tell.

    Args:
      items: Of each item of the save, the ids of its arrays.
      steps: All that have run.
    """
    given, returned = set[int]().union(*items), set[int]()
    for step in steps:
        program = step.program
        leaves = None if program is None else program.returned.leaves(step.last.new_state)
        if leaves is None:  # of this one it is not known, or not any more
            return 0
        returned.update(map(id, leaves))
    return len(given - returned)


def of_beside(number: int) -> str:
    """What `explain` says of them, behind all else."""
    if number == 0:
        return ""
    return (
        f"\nbeside the state the last save was given {counted(number, 'array')} that no wrapped "
        "step had returned as its state, to be copied at the save. If a step updates them, name "
        "their arguments in `wrap(step, state=...)`."
    )
