"""What a manager and its `save` are given, as stock's manager takes it."""

import contextlib
import copy
import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orbax.checkpoint as ocp

from gockpt_jax.checks import as_count, of_kind
from gockpt_jax.storage.saving.refused import refuse_no_json

_WRITTEN_LATER = (ocp.args.JsonSave, ocp.args.ProtoSave)


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
      ValueError: if steps would have names that Orbax does not find.
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
    for name, (value, kind, what_to_do) in expected.items():
        if value is not None:
            of_kind(name, value, kind, what_to_do)
    _refuse_patterns(options)
    refuse_no_json("metadata", metadata)
    if logger is not None and not hasattr(logger, "log_entry"):
        raise TypeError(
            f"`logger` must have a method `log_entry`, as Orbax's have; got {logger!r}."
        )


def _refuse_patterns(options: ocp.CheckpointManagerOptions | None) -> None:
    """Orbax looks for steps by a pattern in which it puts their prefix as it is."""
    names = getattr(options, "step_name_format", None) or options
    prefix = getattr(getattr(names, "write_name_format", names), "step_prefix", None)
    if prefix is not None and not _finds_itself(prefix):
        raise ValueError(
            f"`step_prefix` is {prefix!r}: Orbax would save steps of such names and not find them "
            "again, for it takes a part of it for a pattern or a path. Pass a prefix without."
        )


def _finds_itself(prefix: str) -> bool:
    with contextlib.suppress(re.error):
        found = re.search(f"^{prefix}_(1)$", f"{prefix}_1")
        return found is not None and found.groups() == ("1",) and "/" not in prefix
    return False


def _kinds(values: Sequence[Any]) -> str:
    return " and ".join(f"a `{type(value).__name__}`" for value in values)


def refuse_unnamed(
    call: Literal["save", "restore"], what: str, by_position: Sequence[Any], items: Any, kwargs: Any
) -> None:
    """Refuses Orbax's old form, in which a state or a target comes as it is.

    Raises:
      TypeError: if something has come by position, or by a name of that form.
    """
    example = f"`{call}(step, args=GoCkpt{call.capitalize()}(state))`"
    if by_position:
        raise TypeError(
            f"`{call}` takes the {what} by name, as in {example}; "
            f"got a `{type(by_position[0]).__name__}` without a name."
        )
    for name, given in (("items", items), (f"{call}_kwargs", kwargs)):
        if given is not None:
            raise TypeError(
                f"`{name}=` is Orbax's old form, which is not supported: write `args=...` in its "
                f"place, as in {example}."
            )


def as_label(step: Any) -> int:
    """Orbax would write the checkpoints of other labels, and never find them again."""
    advice = "Pass the label of the state, for example the loop's index."
    return as_count("step", step, advice, least=0, no_integer=TypeError)


def as_asked_label(step: Any) -> int:
    """The label of a checkpoint to be found; there is none of a negative one, and that is told.

    Raises:
      TypeError: if it is no integer.
    """
    try:
        return as_label(step)
    except ValueError:
        return operator.index(step)


def as_they_are(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a save of which the caller changes nothing any more that is written later.

    Stock writes JSON, protobufs, metrics and metadata on other threads, after `save` has returned.

    Args:
      arguments: Of `ocp.CheckpointManager.save`; `args` is a `Composite`.
    """
    items = dict(arguments["args"].items())
    items |= {name: _copied(x) for name, x in items.items() if isinstance(x, _WRITTEN_LATER)}
    others = {key: _copied(x) for key, x in arguments.items() if key != "args"}
    return others | {"args": ocp.args.Composite(**items)}


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
