"""What a directory of checkpoints holds: whole steps, their items, leftovers, and what is foreign.

Only looks; needs no options of the manager that wrote it.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.files.item_files import FOLDER, LATER_FILES, STEP_METADATA, TEMPORARY
from gockpt_jax.storage.inspecting.stored_item import METADATA_FILE

_MOST_NAMES = 5


@dataclasses.dataclass(frozen=True)
class Step:
    """One checkpoint: a directory with an item in each of its directories.

    Attributes:
      path: The directory.
      items: The directories of its items by name; an item that is no part of a step is its own
        step, and its name is empty.
      trees: The names of those items that are trees of arrays.
      faults: What is wrong with it beside its items.
      metadata: The content of its `_CHECKPOINT_METADATA`.
    """

    path: epath.Path
    items: Mapping[str, epath.Path]
    trees: tuple[str, ...]
    faults: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Directory:
    """A directory that was looked into.

    Attributes:
      path: The directory.
      kind: `item`, `step`, or `root` of any number of steps.
      steps: In the order of their numbers; the newest is the last.
      leftovers: Directories of saves that were never committed.
      others: All else by name.
    """

    path: epath.Path
    kind: str
    steps: tuple[Step, ...] = ()
    leftovers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def describe(self) -> str:
        """Says what was found, in a few words for an error."""
        if self.kind != "root":
            return f"it is itself the {self.kind} of a checkpoint, not a directory of steps"
        parts = [f"the checkpoints {some_of([s.path.name for s in self.steps])}"] * bool(self.steps)
        if self.leftovers:
            parts.append(f"saves that never ended: {some_of(self.leftovers)}")
        if self.others:
            parts.append(f"what is no checkpoint of Orbax's: {some_of(self.others)}")
        return " and ".join(parts) if parts else "nothing"


def no_checkpoint(path: Any, found: Directory) -> str:
    """What to tell of a path without one."""
    return (
        f"{path} holds no checkpoint: found {found.describe()}. Give the directory of a manager, "
        "of a step, or of an item."
    )


def some_of(names: Any) -> str:
    """Names for a reader: the first of them, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(f"`{name}`" for name in names[:_MOST_NAMES]) + more


def look_into(path: Any) -> Directory:
    """Finds out what a directory holds.

    Raises:
      FileNotFoundError: There is no such directory.
      NotADirectoryError: It is a file.
    """
    if not os.fspath(path):  # a variable of the shell's that is not set: `.` is not meant
        raise FileNotFoundError(
            "expected the path of a directory of checkpoints, got an empty one."
        )
    bucket.prepare(path)
    path = epath.Path(path)
    if not path.is_dir():
        if path.exists():
            raise NotADirectoryError(f"{path}: expected a directory of checkpoints, found a file.")
        hint = " Shells expand `~` where it is not quoted." * str(path).startswith("~")
        raise FileNotFoundError(
            f"{path}: expected a directory of checkpoints, there is no such directory.{hint}"
        )
    if is_tree(path):
        return Directory(path, "item", (Step(path, {"": path}, ("",)),))
    if (path / STEP_METADATA).exists() or _is_damaged_step(path):
        return Directory(path, "step", (_step(path),))
    steps, leftovers, others = [], [], []
    entries = sorted(path.iterdir())
    are_steps = _steps_among(entries)
    for entry in entries:
        is_step = entry in are_steps
        if TEMPORARY in entry.name or (is_step and not _is_committed(entry)):
            leftovers.append(entry.name)
        elif is_step:
            steps.append(_step(entry))
        else:
            others.append(entry.name)
    steps.sort(key=lambda step: _number(step.path.name))
    return Directory(path, "root", tuple(steps), tuple(leftovers), tuple(others))


def is_tree(path: epath.Path) -> bool:
    """Whether a directory is an item that holds a tree of arrays, or what is left of one."""
    return bool((path / METADATA_FILE).exists() or (path / FOLDER).exists())


def _is_damaged_step(path: epath.Path) -> bool:
    """Whether a directory without metadata is a step and not one of steps.

    Among steps there may be a tree to start from, and `run_7` may be the name of a run. But steps,
    and trees that are no items of a step, have metadata of their own.
    """
    if _number(path.name)[0] < 0:
        return False
    return not _has_steps(path) and any(is_tree(folder) for folder in _folders(path))


def _has_steps(path: epath.Path) -> bool:
    return any((folder / STEP_METADATA).exists() for folder in _folders(path))


def _folders(path: epath.Path) -> list[epath.Path]:
    return [p for p in _entries(path) if p.is_dir() and TEMPORARY not in p.name]


def _entries(path: epath.Path) -> list[epath.Path]:
    """What is in a directory; nothing in one that a job has deleted, or renamed, meanwhile."""
    try:
        return sorted(path.iterdir())
    except FileNotFoundError:
        return []


def _steps_among(entries: Sequence[epath.Path]) -> set[epath.Path]:
    """Directories that hold what steps hold, and of the others those that are called like them.

    Of a damaged step nothing else may be left. But `logs_1` is none beside `5`, nor is `run_7`.
    """
    folders = [entry for entry in entries if entry.is_dir()]
    shown = {folder for folder in folders if _shows_a_step(folder)}
    prefixes = {_prefix(folder.name) for folder in shown if TEMPORARY not in folder.name}

    def is_called_so(name: str) -> bool:
        is_numbered = re.search(r"(^|_)\d+$", name) is not None
        return is_numbered and (not prefixes or _prefix(name) in {"", *prefixes})

    called = {folder for folder in folders if is_called_so(folder.name)} - shown
    return shown | {folder for folder in called if not _has_steps(folder)}  # that is a run


def _shows_a_step(path: epath.Path) -> bool:
    return (
        bool((path / STEP_METADATA).exists()) or is_tree(path) or any(map(is_tree, _folders(path)))
    )


def _prefix(name: str) -> str:
    return name.rstrip("0123456789")


def _is_committed(path: epath.Path) -> bool:
    return not bucket.is_bucket(path) or bool((path / bucket.MARKER).exists())


def _number(name: str) -> tuple[int, str]:
    digits = re.search(r"(\d+)$", name)
    return (int(digits[1]) if digits else -1, name)


def _step(path: epath.Path) -> Step:
    if is_tree(path):  # saved by a checkpointer, without a manager
        return Step(path, {"": path}, ("",))
    faults: list[str] = []
    metadata: dict[str, Any] = {}
    try:
        metadata = dict(json.loads((path / STEP_METADATA).read_text()))
        if not metadata.get("commit_timestamp_nsecs"):
            faults.append(f"`{STEP_METADATA}` names no time of commit: the save never ended")
    except FileNotFoundError:
        faults.append(f"`{STEP_METADATA}` is missing: this is no whole checkpoint")
    except OSError as error:
        faults.append(f"`{STEP_METADATA}` cannot be read: {error}")
    except (ValueError, TypeError) as error:
        faults.append(f"`{STEP_METADATA}` is damaged: {error!r}")
    if not _is_committed(path):
        faults.append(f"`{bucket.MARKER}` is missing: the save never ended")
    handlers = metadata.get("item_handlers")
    named = handlers if isinstance(handlers, Mapping) else {}
    folders = {p.name: p for p in _entries(path) if p.is_dir()}
    items = {name: p for name, p in folders.items() if name in named or TEMPORARY not in name}
    trees = tuple(name for name, folder in items.items() if is_tree(folder))
    for name in sorted(items.keys() - set(trees)):  # nobody could tell whether it is one
        try:
            _entries(items[name])
        except OSError as error:
            faults.append(f"the item `{name}` cannot be read: {error}")
    if isinstance(handlers, Mapping):
        faults += [f"the item `{name}` is missing" for name in sorted(handlers.keys() - items)]
        faults += [f"`{name}` is foreign: no item" for name in sorted(items.keys() - handlers)]
    faults += [
        f"`{entry.name}` is foreign: no part of a checkpoint"
        for entry in _entries(path)
        if not entry.is_dir() and entry.name not in LATER_FILES
    ]
    return Step(path, items, trees, tuple(faults), metadata)
