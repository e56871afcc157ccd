"""Where a manager resumes from; if there is nothing, it says so: never a silent fresh start."""

import functools
import logging
import re
from collections.abc import Collection, Iterable
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.errors import NoCheckpointError
from gockpt_jax.storage.inspecting.directory import Directory, Step, look_into
from gockpt_jax.storage.inspecting.verify_step import verify_step
from gockpt_jax.storage.managing.naming import METRICS
from gockpt_jax.storage.restoring.together import raised_by_all, require_whole
from gockpt_jax.window.processes import Processes

_log = logging.getLogger("gockpt_jax")

# What other libraries leave: Flax's files, PyTorch's, safetensors'.
_FOREIGN = re.compile(r"checkpoint(_\d+)?|.*\.(safetensors|distcp|msgpack|ckpt|pt|pth)")
# A tree of another name may be anything, such as weights to start from.
_NUMBERED = re.compile(r".*\d")


def newest_in(root: epath.Path) -> int | None:
    """The newest label in another directory than the manager's, as stock finds it."""
    steps = ocp.utils.checkpoint_steps(root) if root.is_dir() else []
    return max(steps, default=None)


def nothing_in(root: epath.Path) -> NoCheckpointError:
    """The error for a directory without a whole checkpoint of this manager."""
    return _no_checkpoint(root, f"{root}: there is no checkpoint to restore")


def refuse_fresh_start(root: Any) -> None:
    """Raises where a manager without a step would start anew beside somebody's checkpoints.

    Raises:
      NoCheckpointError: There are checkpoints in the directory that the manager does not see.
    """
    found = _look(epath.Path(root))
    if found is None:
        return
    steps = [s for s in found.steps if s.trees and _NUMBERED.fullmatch(s.path.name)]
    if found.kind != "root" or steps or _foreign(found):
        raise nothing_in(epath.Path(root))
    if found.leftovers:
        _log.warning(
            "%s has no checkpoint yet: found %s. Training starts from its beginning.",
            root,
            found.describe(),
        )


def no_step(root: epath.Path, name: str) -> NoCheckpointError:
    """The error for a step that is not there."""
    return _no_checkpoint(root, f"{root} has no step `{name}`")


def not_yet(path: epath.Path) -> NoCheckpointError:
    """The error for a step whose save is under way."""
    return NoCheckpointError(
        f"{path} is not there yet: its save is under way. Call `wait_until_finished` first."
    )


def items_of(path: epath.Path, root: epath.Path) -> list[str]:
    """The names of a step's items.

    Raises:
      NoCheckpointError: There is no such step.
    """
    if not path.is_dir():
        raise no_step(root, path.name)
    return [entry.name for entry in path.iterdir() if entry.is_dir()]


def require_items(path: epath.Path, names: Iterable[str], items: Collection[str]) -> None:
    """Refuses to restore of a step what it does not have.

    Raises:
      NoCheckpointError: One of the items is not there.
    """
    for name in names:
        if name not in items:
            raise no_item(path, name, items)


def no_item(path: epath.Path, name: str, items: Collection[str]) -> NoCheckpointError:
    """The error for a step whose state has another name."""
    if not items:
        return NoCheckpointError(f"{path} has no item `{name}`: it is empty. Remove it.")
    held = ", ".join(f"`{item}`" for item in sorted(items))
    example = next(iter(sorted(set(items) - {METRICS})), name)
    return NoCheckpointError(
        f"{path} has no item `{name}`; it has {held}. Name the one that you mean:"
        f" `restore(step, args=ocp.args.Composite({example}=GoCkptRestore(target)))`."
    )


def require_whole_step(path: epath.Path, processes: Processes) -> None:
    """Verifies a step and all trees in it, before any of it is restored.

    Args:
      path: The step's.
      processes: Those that restore together.

    Raises:
      VerifyError: One of them is not what was written.
    """
    for step in look_into(path).steps or (Step(path, {}, ()),):  # too little may be left of it
        raised_by_all(step.path, functools.partial(_require_no_faults, step), processes)
        for name in step.trees:
            require_whole(step.items[name], processes)


def _require_no_faults(step: Step) -> None:
    beside = verify_step(step)
    if beside.faults:
        raise beside.error()


def _no_checkpoint(root: epath.Path, what: str) -> NoCheckpointError:
    found = _look(root)
    held = "it does not exist" if found is None else found.describe()
    if found is not None and found.kind == "root":
        held = f"found {held}"
    return NoCheckpointError(f"{what}: {held}. {_advice(found)}")


def _look(root: epath.Path) -> Directory | None:
    try:
        return look_into(root)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _foreign(found: Directory) -> list[str]:
    return [name for name in found.others if _FOREIGN.fullmatch(name)]


def _advice(found: Directory | None) -> str:
    if found is None:
        return "Give the directory that was trained in."
    if found.kind == "item":
        return "Restore it with `ocp.StandardCheckpointer().restore(path, target)`."
    if found.kind == "step":
        return f"Give the directory above it, {found.path.parent}."
    if found.steps:
        return (
            "Give a label that is there, or the `step_prefix` and `step_name_format` it was saved"
            " with; to start anew, use another directory."
        )
    if _foreign(found):
        return "That is not an Orbax layout: convert it, or use another directory to start anew."
    return "Start from the beginning, or give the directory that was trained in."
