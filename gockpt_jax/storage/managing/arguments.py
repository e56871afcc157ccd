"""What a manager is given, as stock's manager takes it; and what it gives back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.errors import SnapshotOnlyWarning, warn
from gockpt_jax.options import as_count, of_kind
from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.restoring.restore import GoCkptRestore
from gockpt_jax.storage.saving.handler import GoCkptHandler, GoCkptSave
from gockpt_jax.storage.saving.refused import refuse_no_json
from gockpt_jax.storage.saving.taken import TakenSave

ITEM = "state"
UNNAMED = "default"
"""What Orbax calls an item that was saved without a name."""
METRICS = "metrics"
_WRITTEN_LATER = (ocp.args.JsonSave, ocp.args.ProtoSave)


def registry(given: Any, item_handlers: Any, handler: GoCkptHandler) -> Any:
    """The user's handlers, and ours for our own and for stock arguments.

    `None` stands for items of any name; what is registered for a name alone does not find it.

    Args:
      given: A registry of the user's, or `None`.
      item_handlers: Handlers by the names of their items, or the one of the bare item, as in
        `ocp.CheckpointManager`.
      handler: Ours.

    Raises:
      ValueError: if one of the user's handlers has no arguments registered.

    Warns:
      SnapshotOnlyWarning: if one of them takes trees of arrays, which ours does through windows.
    """
    registry = ocp.DefaultCheckpointHandlerRegistry(given)
    if item_handlers is not None and not isinstance(item_handlers, Mapping):
        item_handlers = {ITEM: item_handlers}
    for item, users in (item_handlers or {}).items():
        for args in dict.fromkeys(_arguments_of(item, users)):
            registry.add(item, args, users)
    _warn_of_tree_handlers(registry)
    arguments = (
        GoCkptSave,
        GoCkptRestore,
        TakenSave,
        ocp.args.PyTreeSave,
        ocp.args.PyTreeRestore,
        ocp.args.StandardSave,
        ocp.args.StandardRestore,
    )
    # Orbax finalizes an item by the first handler under its name, whoever has written it.
    is_users = any(item in (ITEM, None) for item, _ in registry.get_all_entries())
    for item, args in itertools.product((None,) if is_users else (ITEM, None), arguments):
        if not registry.has(item, args):
            registry.add(item, args, handler)
    return registry


def _arguments_of(item: str, handler: Any) -> tuple[Any, Any]:
    if isinstance(handler, type) or not ocp.args.has_registered_args(handler):
        raise ValueError(
            f"`item_handlers`: item `{item}` needs a handler with checkpoint arguments, got "
            f"{handler!r}. Make one, such as `ocp.JsonCheckpointHandler()`; arguments are "
            "registered with `ocp.args.register_with_handler`."
        )
    save, restore = ocp.args.get_registered_args_cls(handler)
    return save, restore


def _warn_of_tree_handlers(registry: Any) -> None:
    """The user's word is kept, but it may come from a loop that was written for stock."""
    of_trees = (ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler, GoCkptHandler)
    entries = registry.get_all_entries().items()
    items = sorted({str(item) for (item, _), users in entries if isinstance(users, of_trees)})
    if items:
        warn(
            f"The handlers that were given for {', '.join(f'`{item}`' for item in items)} know "
            "nothing of this manager's windows: `save` waits until the state is on the host. Leave "
            "them out; `pytree_options` takes what they were made with, such as `use_zarr3`.",
            SnapshotOnlyWarning,
        )


def check_all(
    by_position: Sequence[Any], *, options: Any, metadata: Any, logger: Any, pytree_options: Any
) -> None:
    """Refuses what a manager cannot be made of.

    Args:
      by_position: What was given after the directory, without a name.
      options: Like the rest, what was given by this name, or `None`.
      metadata: Likewise.
      logger: Likewise.
      pytree_options: Likewise.

    Raises:
      TypeError: if one of them is something else.
    """
    if by_position:
        raise TypeError(
            f"`GoCkptManager` takes the directory alone by position, got {_kinds(by_position)} "
            "after it. Write `GoCkptManager(directory, options=options)` and `save(step, "
            "args=GoCkptSave(state))`. Orbax's old form, `(directory, checkpointers, options)`, "
            "is not supported: handlers of other items go into `item_handlers={name: handler}`."
        )
    advice = "What stock's manager is set by comes as `options`; `WindowOptions` come as `window`."
    expected: dict[str, tuple[Any, type, str]] = {
        "options": (options, ocp.CheckpointManagerOptions, advice),
        "metadata": (metadata, Mapping, "Pass a dictionary of JSON."),
        "pytree_options": (pytree_options, Mapping, "Such as `{'use_zarr3': True}`."),
    }
    for name, (value, kind, advice) in expected.items():
        if value is not None:
            of_kind(name, value, kind, advice)
    refuse_no_json("metadata", metadata)
    if logger is not None and not hasattr(logger, "log_entry"):
        raise TypeError(
            f"`logger` must have a method `log_entry`, as Orbax's have; got {logger!r}."
        )


def _kinds(values: Sequence[Any]) -> str:
    return " and ".join(f"a `{type(value).__name__}`" for value in values)


def root_of(directory: Any) -> Any:
    """Local paths made absolute, as Orbax demands; addresses of buckets as they are.

    Raises:
      TypeError: if it is no path.
      ValueError: if it is empty: an unset variable would name the working directory.
      NotADirectoryError: if there is something else.
      StorageError: if nobody knows what the address means.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"`directory` must be a path, got {directory!r}. Pass the directory of the checkpoints "
            "as a string or as a `pathlib.Path`."
        )
    if not os.fspath(directory):
        raise ValueError(
            "`directory` is empty. Pass the directory of the checkpoints; `.` is the working one."
        )
    bucket.prepare(directory)
    path = epath.Path(directory)
    if "://" in str(directory):
        return path
    path = path.expanduser().absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir():
        raise NotADirectoryError(
            f"`directory` is {path}, but {there} is a file. Pass a directory, or one to be made."
        )
    return path


def step_path(root: Any, step: int, options: ocp.CheckpointManagerOptions) -> Any:
    """Where a step is, or would be."""
    if options.step_name_format is not None:  # it may read by other names than it writes
        with contextlib.suppress(ValueError):
            return epath.Path(options.step_name_format.find_step(root, step).path)
    return ocp.path.step.build_step_path(epath.Path(root), step_names(options), step)


def step_names(options: ocp.CheckpointManagerOptions) -> Any:
    """Orbax's `NameFormat` of the steps."""
    return options.step_name_format or ocp.path.step.standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
    )


def as_label(step: Any) -> int:
    """Orbax would write the checkpoints of other labels, and never find them again."""
    advice = "Pass the label of the state, for example the loop's index."
    return as_count("step", step, advice, least=0, no_integer=TypeError)


def _require_arguments(args: Any) -> None:
    if not isinstance(args, ocp.args.CheckpointArgs):
        raise TypeError(
            f"`args` must be checkpoint arguments, got a `{type(args).__name__}`. Write "
            "`args=GoCkptSave(state)`, or `args=GoCkptRestore(state)` to restore."
        )


def as_they_are(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a save of which the caller changes nothing any more that is written later.

    Stock writes JSON, protobufs, metrics and metadata on other threads, after `save` has returned.

    Args:
      arguments: Of `ocp.CheckpointManager.save`; `args`, if given, is a `Composite`.
    """
    found = {key: x if key == "args" else _copied(x) for key, x in arguments.items()}
    if found.get("args") is not None:
        items = dict(found["args"].items())
        items |= {name: _copied(x) for name, x in items.items() if isinstance(x, _WRITTEN_LATER)}
        found["args"] = ocp.args.Composite(**items)
    return found


def _copied(value: Any) -> Any:
    """JSON that nobody else can change; what is none, stock refuses or `best_fn` knows."""
    if isinstance(value, ocp.args.JsonSave):
        return dataclasses.replace(value, item=_copied(value.item))
    if isinstance(value, ocp.args.ProtoSave):
        return copy.deepcopy(value)
    if isinstance(value, dict | list):  # of the same class, which `best_fn` may know
        found = copy.copy(value)
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            found[key] = _copied(x)
        return found
    if isinstance(value, tuple):
        made: Any = getattr(value, "_make", tuple)
        return made(map(_copied, value))
    return value


class Naming:
    """Whether the caller names its items, and so what it gets back: the item, or a `Composite`.

    A bare tree is named `state` on disk, and so may be an item that the caller named. Who has used
    names and never left them out gets them back, as in stock. Any other bare item is named as stock
    names it.

    Args:
      registry: All handlers.
      handler: Ours.
      is_named: Whether the manager was made with names of items.

    Attributes:
      registry: All handlers.
    """

    def __init__(self, registry: Any, handler: GoCkptHandler, is_named: bool):
        self.registry = registry
        self._handler = handler
        self._is_named = is_named
        self._is_bare = False

    def item_of(self, args: Any) -> str:
        """The name of a bare item.

        Raises:
          TypeError: if these are no arguments of a checkpoint.
        """
        _require_arguments(args)
        if any(item == ITEM for item, _ in self.registry.get_all_entries()):
            return ITEM if self.registry.has(ITEM, args) else UNNAMED
        is_ours = self.registry.has(None, args) and self.registry.get(None, args) is self._handler
        return ITEM if is_ours else UNNAMED

    def note(self, args: Any) -> None:
        """Remembers whether items are named; of a call that saves nothing, too.

        Raises:
          TypeError: if these are no arguments of a checkpoint.
        """
        if isinstance(args, ocp.args.Composite):
            self._is_named = True
        elif args is not None:
            _require_arguments(args)
            self._is_bare = True

    def name(self, args: Any) -> Any:
        """Arguments by the names of their items."""
        self.note(args)
        if args is None or isinstance(args, ocp.args.Composite):
            return args
        return ocp.args.Composite(**{self.item_of(args): args})

    def unname(self, composite: Any) -> Any:
        """What a call without arguments gives: the bare item itself, where it is the only one."""
        is_alone = set(composite.keys()) - {METRICS} == {ITEM}
        return composite[ITEM] if is_alone and (self._is_bare or not self._is_named) else composite
