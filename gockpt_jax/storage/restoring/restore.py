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
from gockpt_jax.storage.restoring.arguments import GoCkptRestore
from gockpt_jax.storage.restoring.one_replica import is_asked_for
from gockpt_jax.storage.restoring.placed import stand_in_sharding
from gockpt_jax.storage.restoring.stock import restore_tree, restore_unchecked, with_ours
from gockpt_jax.storage.restoring.stored import Stored, known_arrays
from gockpt_jax.storage.restoring.target import check_target, explained, refuse_to_narrow


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
        asked = GoCkptRestore(args.item, args.strict, args.support_layout, args.fallback_sharding)
        return restore_unchecked(directory, asked, options)


def _restore_checked(
    directory: Any, args: GoCkptRestore, options: Mapping[str, Any], known: Mapping[str, Stored]
) -> Any:
    """As our own arguments say, once checkpoint and target have been compared."""
    target, partial = args.item, args.partial_restore
    if any(isinstance(x, np.generic) for x in jax.tree.leaves(target)):
        target = jax.tree.map(_as_saved, target)
    if target is not None:
        check_target(
            directory, target, known,
            strict=args.strict, cast=args.cast, partial=partial, leaves_out=partial,
        )  # fmt: skip
    elif partial or args.single_replica:
        raise ValueError(
            "`partial_restore` and `single_replica` need a target: what is to be restored, and "
            "where. Pass `GoCkptRestore(target, ...)`."
        )
    elif not args.cast:
        refuse_to_narrow(directory, known)
    fallback = args.fallback_sharding or stand_in_sharding()
    args = dataclasses.replace(args, item=target, fallback_sharding=fallback)
    return restore_unchecked(directory, args, options)


def _as_saved(leaf: Any) -> Any:
    """NumPy's scalars are saved as arrays, so that is what they are restored into."""
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
