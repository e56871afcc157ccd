"""What a session says to a user whose saves could be windows, or more of them could leave early."""

import logging
from collections.abc import Sequence

from gockpt_jax.checks import counted
from gockpt_jax.errors import SnapshotOnlyWarning, warn

_log = logging.getLogger("gockpt_jax")

NOT_OURS = (
    "no windows: the handlers given to the manager took all items of the last save, or its trees "
    "are in a `Composite` within a `Composite`, which Orbax saves by itself"
)
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


def of_demoted(reasons: Sequence[str]) -> str:
    """What `explain` says of leaves that an audit has made late."""
    return "".join(f"\nnot early any more, with what is updated with it: {why}" for why in reasons)


def of_beside(number: int) -> str:
    """What `explain` says of them, behind all else."""
    if number == 0:
        return ""
    return (
        f"\nbeside the state the last save was given {counted(number, 'array')} that no wrapped "
        "step had returned as its state, to be copied at the save. If a step updates them, name "
        "their arguments in `wrap(step, state=...)`."
    )
