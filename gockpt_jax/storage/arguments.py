"""What a manager is given, as stock's manager takes it; and what it gives back."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.storage.handler import GoCkptHandler, GoCkptSave
from gockpt_jax.storage.restore import GoCkptRestore
from gockpt_jax.storage.taken import TakenSave

ITEM = "state"
METRICS = "metrics"


def registry(given: Any, handler: GoCkptHandler) -> Any:
    """The user's handlers, and ours for our own and for stock arguments.

    `None` stands for items of any name; what is registered for a name alone does not find it.
    """
    registry = ocp.DefaultCheckpointHandlerRegistry(given)
    arguments = (
        GoCkptSave,
        GoCkptRestore,
        TakenSave,
        ocp.args.PyTreeSave,
        ocp.args.PyTreeRestore,
        ocp.args.StandardSave,
        ocp.args.StandardRestore,
    )
    for item, args in itertools.product((ITEM, None), arguments):
        if not registry.has(item, args):
            registry.add(item, args, handler)
    return registry


def absolute(directory: Any) -> Any:
    """Local paths made absolute, as Orbax demands; addresses of buckets as they are."""
    path = epath.Path(directory)
    return path if "://" in str(directory) else path.absolute()


def step_path(root: Any, step: int, options: ocp.CheckpointManagerOptions) -> Any:
    """Where a step is, or would be."""
    names = options.step_name_format or ocp.path.step.standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
    )
    return ocp.path.step.build_step_path(epath.Path(root), names, step)


def as_label(step: Any) -> int:
    """Orbax would write the checkpoints of other labels, and never find them again."""
    try:
        label = operator.index(step)
    except TypeError:
        label = -1
    if isinstance(step, bool) or label < 0:
        kind = ValueError if isinstance(step, int) else TypeError
        raise kind(
            f"`step` must be a non-negative integer, got {step!r}. Pass the label of the state, "
            "for example the loop's index."
        )
    return label


def as_composite(args: Any) -> Any:
    """Bare arguments are those of the item `state`."""
    if args is None or isinstance(args, ocp.args.Composite):
        return args
    if not isinstance(args, ocp.args.CheckpointArgs):
        raise TypeError(
            f"`args` must be checkpoint arguments, got a `{type(args).__name__}`. Write "
            "`args=GoCkptSave(state)`, or `args=GoCkptRestore(state)` to restore."
        )
    return ocp.args.Composite(**{ITEM: args})


def only_item(composite: Any, *, asked_for: bool) -> Any:
    """What a bare call gets back: the item itself, where it is the only one."""
    if asked_for or set(composite.keys()) - {METRICS} == {ITEM}:
        return composite[ITEM]
    return composite
