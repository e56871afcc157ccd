"""Restoring where one replica reads and sends to the others what they would read again."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from gockpt_jax.compiling import unwatched
from gockpt_jax.storage.writing.registry import RegistryView, look_up

SingleReplicaArgs = ocp.type_handlers.SingleReplicaArrayRestoreArgs


def single_replica_args(target: Any, shardings: Any) -> Any:
    """Restore arguments with which one replica reads what is replicated over the first mesh axis.

    Args:
      target: A tree of arrays or `ShapeDtypeStruct`s.
      shardings: Theirs; those with a `NamedSharding` are sent, unless they divide the leaf over
        that axis.
    """

    def args(leaf: Any, sharding: Any, plain: Any) -> Any:
        if not (_has_replicas(sharding) and _can_be_sent(leaf.dtype)):
            return plain
        return SingleReplicaArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    plain = ocp.checkpoint_utils.construct_restore_args(target, shardings)
    return jax.tree.map(args, target, shardings, plain)


def _has_replicas(sharding: Any) -> bool:
    """Whether there is one at each place of the mesh's first axis, as stock's handler expects."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return False
    first, *more = sharding.mesh.shape.values()
    if first == 1 or not more:  # nothing to send, or stock's finds no replica
        return False
    axes = [axis if isinstance(axis, tuple) else (axis,) for axis in sharding.spec]
    return sharding.mesh.axis_names[0] not in itertools.chain.from_iterable(axes)


def is_asked_for(restore_args: Any) -> bool:
    """Whether one replica is to read some of the leaves."""
    return any(isinstance(x, SingleReplicaArgs) for x in jax.tree.leaves(restore_args))


def without_others(args: Any) -> Any:
    """What one replica can send is left to it; the rest is read by all.

    Args:
      args: `ocp.args.PyTreeRestore`, some leaves of which ask for one replica.
    """
    if args.item is None:
        return args.restore_args
    plain = ocp.checkpoint_utils.construct_restore_args(args.item)

    def choose(leaf: Any, given: Any, other: Any) -> Any:
        can_be_sent = _can_be_sent(getattr(leaf, "dtype", np.float32))
        return other if isinstance(given, SingleReplicaArgs) and not can_be_sent else given

    return jax.tree.map(choose, args.item, args.restore_args, plain)


def _can_be_sent(dtype: Any) -> bool:
    """Not typed PRNG keys, nor what a sum makes wider (`bool`, `int8`) or that has no zero.

    Stock sends by summing over the replicas, of which all but one have zeros.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    if jnp.issubdtype(dtype, jnp.inexact):
        return bool(np.zeros((), dtype) == 0)  # `float8_e8m0fnu` has powers of two alone
    return bool(np.dtype(dtype).itemsize >= 4)


def one_replica_reads(others: Any) -> RegistryView:
    """Returns a registry view in which arrays are read by the handler below.

    Args:
      others: The registry for all other types; `None`: Orbax's global one.
    """
    reader = _ReplicaReader(look_up(others)("jax.Array"))
    return RegistryView(jax.Array, reader, others, by_name=True)


class _ReplicaReader(ocp.type_handlers.SingleReplicaArrayHandler):  # type: ignore[misc]
    """Stock's, for the leaves that ask for it; the others go to another handler."""

    def __init__(self, others: Any) -> None:
        super().__init__()
        is_like_us = isinstance(others, ocp.type_handlers.SingleReplicaArrayHandler)
        self._others = ocp.type_handlers.ArrayHandler() if is_like_us else others

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Reads arrays; the results are in the order of `infos`."""
        args = list(args or [ocp.RestoreArgs()] * len(infos))
        restored: dict[int, Any] = {}
        groups: dict[Any, list[int]] = {}
        for i, x in enumerate(args):  # stock sends all over the mesh of the first
            is_sent = isinstance(x, SingleReplicaArgs)
            mesh = getattr(x.sharding, "mesh", None) if is_sent else None
            groups.setdefault((is_sent, mesh), []).append(i)
        for (is_sent, _), mine in groups.items():
            read = super().deserialize if is_sent else self._others.deserialize
            with unwatched():
                arrays = await read([infos[i] for i in mine], [args[i] for i in mine])
            restored.update(zip(mine, arrays, strict=True))
        return [restored[i] for i in range(len(infos))]
