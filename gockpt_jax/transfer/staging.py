"""Staging: a block of the state, copied into fresh device buffers.

The next step donates the state's buffers, so no transfer may ever be started on them: on a GPU the
step would wait for the whole of it (docs/guarantees.md, invariant 3). The copies are ours, nobody
donates them, and the transfer may take as long as it likes.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def is_typed_key(array: Any) -> bool:
    """Whether an array holds typed PRNG keys."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def device_bytes(array: jax.Array) -> int:
    """Bytes of an array on one device (every device holds one shard of the same size)."""
    itemsize: int = array.dtype.itemsize
    if is_typed_key(array):
        data = jax.eval_shape(jax.random.key_data, array)
        itemsize = math.prod(data.shape[array.ndim :]) * data.dtype.itemsize
    return math.prod(array.sharding.shard_shape(array.shape)) * itemsize


def owned_bytes(array: jax.Array) -> int:
    """Bytes of the shards that this process writes."""
    return device_bytes(array) * len([s for s in array.addressable_shards if s.replica_id == 0])


def _copy(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [jax.random.key_data(x) if is_typed_key(x) else jnp.copy(x) for x in arrays]


# Not donating, so every result is a new buffer: a jitted identity would return its arguments.
_copy_program = jax.jit(_copy)


def stage(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies arrays on their devices; returns at once.

    Args:
      arrays: Of any shapes, dtypes and placements; typed keys become their uint32 key data.

    Returns:
      New arrays of the same placements, in the same order. One program copies all arrays that live
      on the same devices.
    """
    by_devices: dict[Any, list[int]] = defaultdict(list)
    for i, array in enumerate(arrays):
        by_devices[frozenset(array.sharding.device_set)].append(i)
    staged: list[Any] = [None] * len(arrays)
    for positions in by_devices.values():
        copies = _copy_program([arrays[i] for i in positions])
        for i, copied in zip(positions, copies, strict=True):
            staged[i] = copied
    for original, copied in zip(arrays, staged, strict=True):
        assert copied is not original, "a staged buffer may never be one that a step can donate"
    return staged
