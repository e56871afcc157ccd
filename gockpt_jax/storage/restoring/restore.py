"""Restores trees as stock does, after looking whether checkpoint and target fit together."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.errors import NoCheckpointError, TargetError, VerifyError
from gockpt_jax.storage.files import item_files
from gockpt_jax.storage.inspecting.verdict import Verdict
from gockpt_jax.storage.inspecting.verify_files import check_files
from gockpt_jax.storage.restoring.known import Stored, known_arrays
from gockpt_jax.storage.restoring.one_replica import is_asked_for
from gockpt_jax.storage.restoring.placed import stand_in_sharding
from gockpt_jax.storage.restoring.stock import (
    restore_into,
    restore_standard,
    restore_tree,
    with_ours,
)
from gockpt_jax.storage.restoring.target import check_target, explained, refuse_to_narrow


@dataclasses.dataclass
class GoCkptRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to restore: arguments of `GoCkptManager.restore`, like `ocp.args.StandardRestore`.

    Checkpoint and target are compared before anything is read, and one `TargetError` names all
    leaves that do not fit.

    Attributes:
      item: A tree of arrays or `jax.ShapeDtypeStruct`s to restore into, with their shardings;
        `None`: as it was saved.
      strict: Whether a stored shape other than the target's is an error (or padded, truncated).
      support_layout: Whether to restore into the device layouts of `item`.
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


def is_sent(args: Any) -> bool:
    """Whether one replica reads some of it and sends that to the others, which wait for it."""
    if isinstance(args, GoCkptRestore):
        return args.single_replica
    return is_asked_for(getattr(args, "restore_args", None))


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
    options = with_ours(options, known)
    if isinstance(args, GoCkptRestore):
        return _restore_checked(directory, args, options, known)
    if isinstance(args, ocp.args.PyTreeRestore):
        plain = args.transforms is None and args.legacy_transform_fn is None
        partial = args.partial_restore
        rules = {"cast": True, "strict": False, "partial": partial, "leaves_out": True}
        with explained(directory, args.item if plain else None, known, **rules):
            return restore_tree(directory, args, options)
    with explained(directory, args.item, known, cast=True, strict=args.strict):
        return restore_standard(directory, args, options)


def _restore_checked(
    directory: Any, args: GoCkptRestore, options: Mapping[str, Any], known: Mapping[str, Stored]
) -> Any:
    """As our own arguments say, once checkpoint and target have been compared."""
    target, partial, single = args.item, args.partial_restore, args.single_replica
    if any(isinstance(x, np.generic) for x in jax.tree.leaves(target)):
        target = jax.tree.map(_as_saved, target)
    if target is not None:
        check_target(
            directory, target, known,
            strict=args.strict, cast=args.cast, partial=partial, leaves_out=partial,
        )  # fmt: skip
    elif partial or single:
        raise ValueError(
            "`partial_restore` and `single_replica` need a target: what is to be restored, and "
            "where. Pass `GoCkptRestore(target, ...)`."
        )
    elif not args.cast:
        refuse_to_narrow(directory, known)
    fallback = args.fallback_sharding or stand_in_sharding()
    if partial or single:
        return restore_into(
            directory, target, fallback, options,
            strict=args.strict, layouts=args.support_layout, partial=partial,
            single_replica=single,
        )  # fmt: skip
    stock = ocp.args.StandardRestore(target, args.strict, args.support_layout, fallback)
    return restore_standard(directory, stock, options)


def _as_saved(leaf: Any) -> Any:
    """NumPy's scalars are saved as arrays, so that is what they are restored into."""
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
