"""Asks stock's handlers for what is stored, as its arguments of a restore say."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.storage.inspecting.stored_item import StoredItem
from gockpt_jax.storage.restoring.arguments import GoCkptRestore
from gockpt_jax.storage.restoring.array_reader import LIMIT_BYTES, direct_reads
from gockpt_jax.storage.restoring.one_replica import (
    is_asked_for,
    one_replica_reads,
    single_replica_args,
    without_others,
)
from gockpt_jax.storage.restoring.placed import metadata_of, shardings_of
from gockpt_jax.storage.restoring.stored import Stored

# Bytes that stock may read at one time, unless one leaf is larger; its own default is 96 GB of host
# memory. Not tuned by a benchmark yet.
_CONCURRENT_GB = 16
_RESTORED_INTO = (
    np.ndarray, int, float, str, jax.Array, jax.ShapeDtypeStruct, ocp.metadata.value.Metadata,
)  # fmt: skip


def with_ours(options: Mapping[str, Any], known: Mapping[str, Stored]) -> dict[str, Any]:
    """Options of `ocp.PyTreeCheckpointHandler`, with ours where the user gives none.

    Args:
      options: The user's.
      known: What is known of the arrays that are to be restored.
    """
    limit_gb = options.get("restore_concurrent_gb")
    limit_bytes = int(limit_gb * 10**9) if limit_gb else LIMIT_BYTES
    registry = direct_reads(options.get("type_handler_registry"), limit_bytes)
    # `None` is Orbax's global one to us, and an error to Orbax.
    heard = {} if registry is None else {"type_handler_registry": registry}
    return {**options, **heard, "restore_concurrent_gb": limit_gb or _concurrent_gb(known)}


def _concurrent_gb(known: Mapping[str, Stored]) -> int:
    """Stock's limit in its own unit; stock refuses leaves that are larger than its limit."""
    if not known:
        return 96
    largest = max(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in known.values())
    return max(_CONCURRENT_GB, int(largest / 1e9) + 2)


def restore_tree(directory: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """Restores with stock's tree handler.

    Args:
      directory: The item's.
      args: `ocp.args.PyTreeRestore`. Leaves with `SingleReplicaArrayRestoreArgs` are read by one
        replica, which sends them to the others, without a handler registered for that.
      options: Of `ocp.PyTreeCheckpointHandler`, `with_ours`.
    """
    if is_asked_for(args.restore_args):
        registry = one_replica_reads(options.get("type_handler_registry"))
        options = {**options, "type_handler_registry": registry}
        args = dataclasses.replace(args, restore_args=without_others(args))
    with contextlib.closing(ocp.PyTreeCheckpointHandler(**options)) as handler:
        return handler.restore(epath.Path(directory), args=args)


def restore_unchecked(directory: Any, args: GoCkptRestore, options: Mapping[str, Any]) -> Any:
    """Restores with stock's tree handler what its standard one would, and parts, and texts.

    Args:
      directory: The item's.
      args: Of which nothing is checked.
      options: As in `restore_tree`.

    Raises:
      ValueError: The target has leaves of a type into which nothing is restored.
    """
    target, partial = args.item, args.partial_restore
    if target is None:
        return _restore_as_saved(directory, args.fallback_sharding, options)
    for path, leaf in jax.tree_util.tree_leaves_with_path(target):
        if not (isinstance(leaf, _RESTORED_INTO) or (partial and leaf is ocp.PLACEHOLDER)):
            key = jax.tree_util.keystr(path)
            raise ValueError(f"Unsupported type: {type(leaf)} for key: {key}.")
    shardings = shardings_of(
        directory, target, args.fallback_sharding, options, layouts=args.support_layout
    )
    construct = ocp.checkpoint_utils.construct_restore_args
    there = (single_replica_args if args.single_replica else construct)(target, shardings)
    if not args.strict:
        there = jax.tree.map(_padded, there)
    stock = ocp.args.PyTreeRestore(target, there, partial_restore=partial)
    return restore_tree(directory, stock, options)


def _padded(args: Any) -> Any:
    return dataclasses.replace(args, strict=False) if hasattr(args, "strict") else args


def _restore_as_saved(
    directory: Any, fallback: jax.sharding.Sharding | None, options: Mapping[str, Any]
) -> Any:
    """Restores all of it, where no target says what it is."""
    tree, leaves = metadata_of(directory, options).tree, StoredItem(directory).leaves

    def args(stored: Any, sharding: Any, name: str) -> Any:
        if sharding is not None:
            return ocp.checkpoint_utils.construct_restore_args(stored, sharding)
        # Of arrays whose place nobody knows stock makes NumPy's; what else there is, its own
        # handler knows.
        lay_somewhere = name in leaves and leaves[name].value_type == "jax.Array"
        return ocp.RestoreArgs(restore_type=np.ndarray if lay_somewhere else None)

    names = ocp.tree.get_param_names(tree, include_empty_nodes=False)
    there = jax.tree.map(args, tree, shardings_of(directory, tree, fallback, options), names)
    return restore_tree(directory, ocp.args.PyTreeRestore(restore_args=there), options)
