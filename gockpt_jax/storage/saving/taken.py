"""An item whose state has been taken from the devices, and which is written now or later."""

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gockpt_jax.storage.saving.refused import LookUp, refuse_tree
from gockpt_jax.storage.writing.host_array import HostArray, HostShard
from gockpt_jax.telemetry.save_record import PendingReport
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.window.slots import ChunkSlot, give_back


@dataclasses.dataclass
class TakenSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Arguments of a save whose state is on the host, or on its way there.

    No step can change it any more. It is written once, or released.

    Attributes:
      save: What the stock tree handler is given; its arrays are `HostArray`s.
      pending: The report of the save that it belongs to.
      error: Why it could not be taken, beside other processes: they write it, and fail, together.
    """

    save: ocp.args.PyTreeSave
    pending: PendingReport
    error: Exception | None = None

    @property
    def arrays(self) -> list[HostArray]:
        """The leaves that were arrays on devices."""
        return [x for x in jax.tree.leaves(self.save.item) if isinstance(x, HostArray)]

    def failure(self) -> BaseException | None:
        """What went wrong on the way to the host, as far as it is known by now."""
        if self.error is not None:
            return self.error
        for array in self.arrays:
            for shard in array.shards:
                if not shard.released and shard.data.done() and shard.data.exception() is not None:
                    return shard.data.exception()
        return None

    def release(self) -> None:
        """Gives the bytes back, those on their way as soon as they have landed."""
        for array in self.arrays:
            array.release()


def put_together(structure: Any, leaves: Sequence[Any]) -> Any:
    """A tree of what stands for its arrays.

    Raises:
      TypeError: if a node takes nothing but arrays.
    """
    try:
        return jax.tree.unflatten(structure, leaves)
    except Exception as error:
        raise TypeError(
            "the state given to `save` has a node whose class looks at its leaves as it is made, "
            "and takes arrays only; nothing of the state was saved. As JAX asks of custom "
            "pytrees, have `tree_unflatten` take any object, or save the node's fields, as in "
            f"`{{'scale': state.scale.value}}`. The class says: {error}"
        ) from error


def as_tree_save(args: Any, item: Any, audit: Mapping[str, Any] | None) -> ocp.args.PyTreeSave:
    """The same arguments for the stock tree handler, with another tree of the same structure.

    The audit's figures go beside the user's metadata, where that is a dictionary. They are not
    known yet: Orbax writes metadata after the last chunk, when the replayer has filled them in.
    """
    metadata = copy.deepcopy(args.custom_metadata)  # stock writes it later
    if audit is not None and isinstance(metadata, dict | None):
        metadata = {"gockpt_jax": {"audit": audit}, **(metadata or {})}
    if isinstance(args, ocp.args.PyTreeSave):
        return dataclasses.replace(args, item=item, custom_metadata=metadata)
    return ocp.args.PyTreeSave(item, save_args=args.save_args, custom_metadata=metadata)


def leaves_to_save(args: Any, look_up: LookUp) -> tuple[list[Any], Any]:
    """The leaves of a tree as they shall be saved, and its structure.

    Of NumPy's scalars, and of tensors, `ocp.args.StandardSave` makes arrays, and so do ours.

    Args:
      args: Of the save.
      look_up: Finds the handler of a leaf's type.

    Raises:
      TypeError: if its metadata is no JSON.
      ValueError: if it cannot be stored as it is, or two leaves would be written as one.
    """
    tree: Any  # untyped in JAX's stubs
    leaves, tree = jax.tree.flatten(args.item)
    if not isinstance(args, ocp.args.PyTreeSave):
        leaves = [
            np.asarray(x)
            if hasattr(x, "__array__") and not isinstance(x, np.ndarray | jax.Array)
            else x
            for x in leaves
        ]
    refuse_tree(args, leaves, look_up)
    return leaves, tree


def host_array(array: jax.Array, slots: Sequence[ChunkSlot], host: ByteBudget | None) -> HostArray:
    """What stands for an array whose chunks are on the host, or will be.

    Args:
      array: Alive.
      slots: Where its chunks will be found.
      host: Is given their bytes back, each as soon as it has been written; if anybody is.
    """
    shards = []
    for slot in slots:
        release = None if host is None else functools.partial(give_back, [slot], host)
        shards.append(HostShard(slot.index, slot.data, release))
    return HostArray.like(array, shards)
