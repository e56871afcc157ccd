"""What no checkpoint can hold is refused before anything of a save is made, all of it at once.

Orbax would make the directory of the save first, and some of it is found on a thread of its own
when training has gone on: the save would fail as if the disk were at fault.
"""

import collections
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from gockpt_jax.storage.restoring.arguments import GoCkptRestore
from gockpt_jax.storage.writing.leaf_names import refuse_shared
from gockpt_jax.transfer.chunks import is_key_type

LookUp = Callable[[Any], Any]
"""Of stock's registry: the handler of a type; raises ValueError if there is none."""

_STOCKS = (ocp.type_handlers.NumpyHandler, ocp.type_handlers.ScalarHandler)
_MOST_PATHS = 8
_OF_RESTORES = (GoCkptRestore, ocp.args.PyTreeRestore, ocp.args.StandardRestore)


def refuse_tree(args: Any, leaves: Sequence[Any], look_up: LookUp) -> None:
    """Refuses a tree that cannot be stored as it is.

    Args:
      args: What `save` was given for it.
      leaves: Of the tree, as they shall be stored.
      look_up: Finds the handler of a leaf's type.

    Raises:
      TypeError: if its metadata is no JSON.
      ValueError: if a leaf has no values (any more), or none that can be stored; names all of them.
    """
    structure: Any = jax.tree.structure(args.item)  # untyped in JAX's stubs
    if structure.num_leaves == 0 and structure.num_nodes <= 1:
        raise ValueError(
            f"Found empty item: there is nothing in the `{type(args.item).__name__}` given to "
            "`save`. Give it the tree of the arrays to be stored."
        )
    _refuse_leaves(args.item, leaves, look_up)
    refuse_shared(args.item)
    refuse_no_json("custom_metadata", args.custom_metadata)
    if args.save_args is not None:
        _refuse_save_args(args.item, args.save_args)


def _refuse_save_args(tree: Any, save_args: Any) -> None:
    try:
        jax.tree.map(lambda *_: None, tree, save_args)
    except ValueError as error:
        raise ValueError(
            "`save_args` must be a tree of `ocp.SaveArgs` like the one to be stored, such as "
            f"`jax.tree.map(lambda _: ocp.SaveArgs(), state)`: {error}"
        ) from error
    for asked in jax.tree.leaves(save_args):
        dtype = getattr(asked, "dtype", None)
        if dtype is not None and not _is_stored(dtype):
            raise ValueError(
                f"`save_args` asks for the dtype {dtype!r}, which TensorStore does not store. Ask "
                "for another one, or for none."
            )


def _refuse_leaves(tree: Any, leaves: Sequence[Any], look_up: LookUp) -> None:
    faults = [_fault(leaf, look_up) for leaf in leaves]
    if not any(faults):
        return
    found: dict[str, list[str]] = collections.defaultdict(list)
    paths = jax.tree_util.tree_leaves_with_path(tree)
    for fault, (path, _) in zip(faults, paths, strict=True):
        if fault is not None:
            found[fault].append(jax.tree_util.keystr(path) or "all of it")
    lines = [f"  {_some(names)}: {fault}" for fault, names in found.items()]
    raise ValueError(
        "the state given to `save` cannot be stored, so nothing of it was; training and earlier "
        "checkpoints are as they were.\n" + "\n".join(lines)
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_PATHS
    return ", ".join(names[:_MOST_PATHS]) + (f" and {more} more" if more > 0 else "")


def _fault(leaf: Any, look_up: LookUp) -> str | None:
    """What is wrong with a leaf, and what to do; `None` if it can be stored."""
    if isinstance(leaf, jax.Array):
        return _fault_of_jax_array(leaf)
    kind = type(leaf)
    try:
        handler = look_up(kind)
    except ValueError:
        handler = None
    if handler is None or leaf is ocp.PLACEHOLDER:
        return (
            f"of type `{kind.__name__}`, for which Orbax has no handler. Leave it out, make an "
            "array of it, or register one with `ocp.type_handlers.register_type_handler`."
        )
    if type(handler) in _STOCKS:
        return _fault_of_values(np.asarray(leaf))
    return None


def _fault_of_jax_array(array: jax.Array) -> str | None:
    if isinstance(array, jax.core.Tracer):
        return (
            "traced, without a value. Call `save` between the steps: outside of `jit`, `grad`, "
            "`vmap` and the loops of JAX."
        )
    if array.is_deleted():
        return (
            "donated to a later step, or deleted. Save what the step returned, before the next "
            "step."
        )
    if jax.process_count() > 1 and array.is_fully_addressable:
        return (
            "in one of several processes only. Make a global array of it, for example with "
            "`jax.make_array_from_process_local_data`."
        )
    return _fault_of_values(array)


def _fault_of_values(array: Any) -> str | None:
    if not (_is_stored(array.dtype) or is_key_type(array.dtype)):  # of keys, their data is
        return (
            f"of dtype `{array.dtype}`, which TensorStore does not store. Convert it to another "
            "one, or leave it out."
        )
    if not array.size:
        return (
            f"of shape {array.shape}. Arrays with zero size cannot be stored, stock Orbax refuses "
            "them too: leave it out."
        )
    return None


@functools.cache
def _is_stored(dtype: Any) -> bool:
    try:
        ts.dtype(np.dtype(dtype).name)
    except (TypeError, ValueError):
        return False
    return True


def refuse_no_json(name: str, value: Any) -> None:
    """Refuses what no JSON can be made of.

    Raises:
      TypeError: if it holds something else than JSON.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` must be JSON: numbers, strings, lists and dictionaries of Python's; "
            f"{error}. Convert what it holds, as in `float(loss)` or `array.tolist()`."
        ) from error


def refuse_save(offered: Mapping[str, Any], *, metrics_are_written: bool) -> None:
    """Refuses a save of which nothing could be found again.

    Args:
      offered: What `save` was given, by name; `args` is a `Composite`.
      metrics_are_written: Whether `metrics` go into the checkpoint.

    Raises:
      TypeError: if an item is not given as arguments of a save, or what is to be JSON is none.
      ValueError: if there are no items, or their names are none of directories.
    """
    items = dict(offered["args"].items())
    if not items:
        raise ValueError("`args` holds no item. Write `ocp.args.Composite(state=...)`.")
    for name, args in items.items():
        if not isinstance(args, ocp.args.CheckpointArgs) or isinstance(args, _OF_RESTORES):
            raise TypeError(
                f"`args`: item `{name}` must be arguments of a save, got a "
                f"`{type(args).__name__}`. Write `GoCkptSave(state)`."
            )
        # TensorStore takes `\` for `/`, and `epath` lists no names that end with `~`.
        if name in ("", ".", "..") or {"/", "\\"} & set(name) or name.endswith("~"):
            raise ValueError(
                f"`args`: {name!r} cannot be an item's name, which is that of a directory. Give it "
                "another one."
            )
    refuse_no_json("custom_metadata", offered.get("custom_metadata"))
    if metrics_are_written:
        refuse_no_json("metrics", offered.get("metrics"))


def refuse_unranked(metrics: Any, options: ocp.CheckpointManagerOptions) -> None:
    """Refuses metrics by which Orbax could not tell the best checkpoints.

    Where one has to go it asks `best_fn` when it has begun to write, and of these metrics again in
    every save that follows.

    Raises:
      TypeError: if what `best_fn` returns cannot be compared.
      Exception: what `best_fn` raises.
    """
    best_fn: Any = options.best_fn
    if best_fn is None or metrics is None:
        return
    value = best_fn(metrics)
    try:
        bool(value < value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`best_fn` returned {value!r} for the `metrics` given to `save`, which cannot be "
            f"compared with that of other checkpoints: {error}. Have it return a number, as in "
            "`float(metrics['loss'])`, or save without `metrics`."
        ) from error
