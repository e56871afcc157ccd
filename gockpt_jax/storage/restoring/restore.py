"""Restores trees as stock does, after looking whether checkpoint and target fit together."""

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

from gockpt_jax.errors import NoCheckpointError, TargetError, VerifyError
from gockpt_jax.storage.files import item_files
from gockpt_jax.storage.inspecting.verdict import Verdict
from gockpt_jax.storage.inspecting.verify_files import check_files
from gockpt_jax.storage.restoring.array_reader import LIMIT_BYTES, direct_reads
from gockpt_jax.storage.restoring.known import Stored, known_arrays
from gockpt_jax.storage.restoring.one_replica import (
    SingleReplicaArgs,
    one_replica_reads,
    single_replica_args,
    without_others,
)
from gockpt_jax.storage.restoring.placed import shardings_of, stored_tree
from gockpt_jax.storage.restoring.target import check_target, explained, refuse_to_narrow

# Bytes that stock may read at one time, unless one leaf is larger; its own default is 96 GB of host
# memory. Not tuned by a benchmark yet.
_CONCURRENT_GB = 16
_OF_STANDARD = ("restore_concurrent_gb", "multiprocessing_options", "pytree_metadata_options")
"""Those options that stock's standard handler takes, too."""


def is_sent(args: Any) -> bool:
    """Whether one replica reads some of it and sends that to the others, which wait for it."""
    if isinstance(args, GoCkptRestore):
        return args.single_replica
    leaves = jax.tree.leaves(getattr(args, "restore_args", None))
    return any(isinstance(leaf, SingleReplicaArgs) for leaf in leaves)


def _restore_tree(directory: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """Restores with stock's tree handler.

    Args:
      directory: The item's.
      args: `ocp.args.PyTreeRestore`. Leaves with `SingleReplicaArrayRestoreArgs` are read by one
        replica, which sends them to the others, without a handler registered for that.
      options: Of `ocp.PyTreeCheckpointHandler`.
    """
    if is_sent(args):
        registry = one_replica_reads(options["type_handler_registry"])
        options = {**options, "type_handler_registry": registry}
        args = dataclasses.replace(args, restore_args=without_others(args))
    with contextlib.closing(ocp.PyTreeCheckpointHandler(**options)) as handler:
        return handler.restore(epath.Path(directory), args=args)


def _restore_into(directory: Any, args: "GoCkptRestore", options: Mapping[str, Any]) -> Any:
    """Restores with stock's tree handler what a target names, to where it says."""
    target = args.item
    make_args = (
        single_replica_args if args.single_replica else ocp.checkpoint_utils.construct_restore_args
    )
    shardings = shardings_of(directory, target, args.fallback_sharding, options)
    restore_args = make_args(target, shardings)
    if not args.strict:
        restore_args = jax.tree.map(_padded, restore_args)
    stock = ocp.args.PyTreeRestore(target, restore_args, partial_restore=args.partial_restore)
    return _restore_tree(directory, stock, options)


def _padded(args: Any) -> Any:
    return dataclasses.replace(args, strict=False) if hasattr(args, "strict") else args


def _restore_standard(
    directory: Any, args: Any, options: Mapping[str, Any], *, has_types: bool
) -> Any:
    """Restores as stock's standard handler does, which takes no handlers of types.

    Args:
      directory: The item's.
      args: `ocp.args.StandardRestore`.
      options: Of `ocp.PyTreeCheckpointHandler`.
      has_types: Whether the user has given handlers of types: then the tree handler restores also
        what no target names. It does the same wherever it is asked, but for layouts.
    """
    target, fallback = args.item, args.fallback_sharding
    if target is not None and not args.support_layout and _takes(target):
        asked = GoCkptRestore(target, args.strict, fallback_sharding=fallback)
        return _restore_into(directory, asked, options)
    if target is None and has_types:
        tree = stored_tree(directory, options)
        shardings = shardings_of(directory, tree, fallback, options)
        there = jax.tree.map(_as_it_was, tree, shardings)
        return _restore_tree(directory, ocp.args.PyTreeRestore(restore_args=there), options)
    stocks = {key: options[key] for key in _OF_STANDARD if key in options}
    with contextlib.closing(ocp.StandardCheckpointHandler(**stocks)) as handler:
        return handler.restore(epath.Path(directory), args=args)


def _as_it_was(stored: Any, sharding: Any) -> ocp.RestoreArgs:
    """Of a leaf without a sharding its handler knows what it is."""
    if sharding is None:
        return ocp.RestoreArgs()
    args: ocp.RestoreArgs = ocp.checkpoint_utils.construct_restore_args(stored, sharding)
    return args


def _takes(target: Any) -> bool:
    """Whether all leaves are such as stock's standard handler takes."""
    kinds = np.ndarray | int | float | str | jax.Array | jax.ShapeDtypeStruct
    return all(isinstance(leaf, kinds) for leaf in jax.tree.leaves(target))


def _complete(options: Mapping[str, Any], known: Mapping[str, Stored]) -> dict[str, Any]:
    """Options of `ocp.PyTreeCheckpointHandler`, with ours where the user gives none."""
    limit_gb = options.get("restore_concurrent_gb")
    limit_bytes = int(limit_gb * 10**9) if limit_gb else LIMIT_BYTES
    return {
        **options,
        "type_handler_registry": direct_reads(options.get("type_handler_registry"), limit_bytes),
        "restore_concurrent_gb": limit_gb or _concurrent_gb(known),
    }


def _concurrent_gb(known: Mapping[str, Stored]) -> int:
    """Stock's limit in its own unit; stock refuses leaves that are larger than its limit."""
    if not known:
        return 96
    largest = max(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in known.values())
    return max(_CONCURRENT_GB, int(largest / 1e9) + 2)


def _stand_in_sharding() -> jax.sharding.Sharding | None:
    """Where arrays go whose devices do not exist here: the host's memory, where that is all."""
    if jax.process_count() == 1 and jax.default_backend() == "cpu":
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return None


@dataclasses.dataclass
class GoCkptRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to restore: arguments of `GoCkptManager.restore`, like `ocp.args.StandardRestore`.

    Checkpoint and target are compared before anything is read, and one `TargetError` names all
    leaves that do not fit.

    Attributes:
      item: A tree of arrays or `jax.ShapeDtypeStruct`s to restore into, with their shardings;
        `None`: as it was saved.
      strict: Whether a stored shape other than the target's is an error (or padded, truncated).
      support_layout: Whether to restore device layouts.
      fallback_sharding: Placement of arrays whose stored sharding does not exist here. `None`: the
        first device, where one process runs on CPUs; an error elsewhere.
      partial_restore: Whether to leave out what the target does not name, such as all but the
        parameters.
      cast: Whether a stored dtype other than the target's is converted (or an error; Python's
        numbers take what loses nothing by its kind, such as an integer as a float). Stock's
        arguments always convert.
      single_replica: Whether one replica reads and sends to the others what is replicated over the
        first axis of the mesh, as with `ocp.type_handlers.SingleReplicaArrayRestoreArgs`. It is
        sent as a sum with zeros: -0.0 becomes 0.0, and denormals may, too.
      verify: Whether to re-read the item and compare it with its checksums first.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None
    partial_restore: bool = False
    cast: bool = False
    single_replica: bool = False
    verify: bool = False


def restore(directory: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """Restores an item as any of the arguments says.

    Args:
      directory: The item's.
      args: `GoCkptRestore`, or stock's `StandardRestore` or `PyTreeRestore`.
      options: Of `ocp.PyTreeCheckpointHandler`.

    Raises:
      NoCheckpointError: There is no such item, or none any more.
      TargetError: Checkpoint and target do not fit together; names all leaves.
      TypeError: These are no arguments of a restore.
      VerifyError: The checkpoint cannot be read, and is not what was written.
    """
    if not isinstance(args, GoCkptRestore | ocp.args.PyTreeRestore | ocp.args.StandardRestore):
        raise TypeError(
            f"`restore` takes arguments of a restore, such as `GoCkptRestore(target)`, got a "
            f"`{type(args).__name__}`."
        )
    try:
        return _restore(directory, args, options)
    except VerifyError:
        raise
    except Exception as error:  # what seems not to fit may be damaged, too
        if (damage := _damage(directory)) is not None:
            raise damage from error
        if not isinstance(error, TargetError):
            error.add_note(
                f"While {directory} was restored. Whether its values can be read, and are what was "
                f"written, `gockpt_jax verify {directory}` tells."
            )
        raise


def _damage(directory: Any) -> VerifyError | NoCheckpointError | None:
    """The error for an item whose files are not those that were committed."""
    path = epath.Path(directory)
    if not path.exists():
        return NoCheckpointError(
            f"{path} is not there. If it was, it has been deleted while it was restored, as by the "
            "retention of a job that saves there: `reload()`, and restore the `latest_step()`."
        )
    if not (path / item_files.FOLDER).exists():
        return None
    faults, _ = check_files(path)
    return Verdict(str(path), tuple(faults)).error() if faults else None


def _restore(directory: Any, args: Any, options: Mapping[str, Any]) -> Any:
    known = known_arrays(epath.Path(directory))
    has_types = options.get("type_handler_registry") is not None
    options = _complete(options, known)
    if isinstance(args, GoCkptRestore):
        return _restore_checked(directory, args, options, known, has_types=has_types)
    if isinstance(args, ocp.args.PyTreeRestore):
        plain = args.transforms is None and args.legacy_transform_fn is None
        partial = args.partial_restore
        rules = {"cast": True, "strict": False, "partial": partial, "leaves_out": True}
        with explained(directory, args.item if plain else None, known, **rules):
            return _restore_tree(directory, args, options)
    with explained(directory, args.item, known, cast=True, strict=args.strict):
        return _restore_standard(directory, args, options, has_types=has_types)


def _restore_checked(
    directory: Any, args: GoCkptRestore, options: Mapping[str, Any], known: Mapping[str, Stored],
    *, has_types: bool,
) -> Any:  # fmt: skip
    """As our own arguments say, once checkpoint and target have been compared."""
    target = args.item
    if any(isinstance(x, np.generic) for x in jax.tree.leaves(target)):
        target = jax.tree.map(_as_saved, target)
    if target is not None:
        partial = args.partial_restore
        check_target(
            directory, target, known,
            strict=args.strict, cast=args.cast, partial=partial, leaves_out=partial,
        )  # fmt: skip
    elif not args.cast:
        refuse_to_narrow(directory, known)
    fallback = args.fallback_sharding or _stand_in_sharding()
    args = dataclasses.replace(args, item=target, fallback_sharding=fallback)
    has_texts = not args.support_layout and any(
        isinstance(leaf, str) for leaf in jax.tree.leaves(target)
    )  # which stock's standard handler does not take
    if not (args.partial_restore or args.single_replica or has_texts):
        stock = ocp.args.StandardRestore(target, args.strict, args.support_layout, fallback)
        return _restore_standard(directory, stock, options, has_types=has_types)
    if target is None:
        raise ValueError(
            "`partial_restore` and `single_replica` need a target: what is to be restored, and "
            "where. Pass `GoCkptRestore(target, ...)`."
        )
    return _restore_into(directory, args, options)


def _as_saved(leaf: Any) -> Any:
    """NumPy's scalars are saved as arrays, so that is what they are restored into."""
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
