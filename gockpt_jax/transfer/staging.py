"""Staging: whole arrays, copied into fresh device buffers.

Blocks (`block.py`) stage what their programs can pack; what is left is copied here. The next step
donates the state's buffers, so no transfer may ever be started on them: on a GPU the step would
wait for the whole of it (docs/guarantees.md, invariant 3). The copies are ours, nobody donates
them, and the transfer may take as long as it likes.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gockpt_jax import _compat
from gockpt_jax.transfer.chunks import in_host_memory, is_key_type


def _copy(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [jax.random.key_data(x) if is_key_type(x.dtype) else jnp.copy(x) for x in arrays]


# Compiled copy programs by what they copy. Kept for the process: a manager that is opened again, or
# a second one, meets the same blocks.
_programs: dict[Hashable, Any] = {}


def stage(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies arrays on their devices; returns at once.

    Args:
      arrays: Of any shapes, dtypes and placements; typed keys become their uint32 key data.

    Returns:
      New arrays of the same placements, in the same order. One program copies all arrays that live
      on the same devices.
    """
    staged: list[Any] = [None] * len(arrays)
    for i, array in enumerate(arrays):
        if in_host_memory(array.sharding):  # a program would put its result on the device
            data = jax.random.key_data(array) if is_key_type(array.dtype) else array
            staged[i] = jax.device_put(data, data.sharding, may_alias=False)
    for positions in _by_devices(arrays, staged):
        together = [arrays[i] for i in positions]
        for i, copied in zip(positions, _program(together)(together), strict=True):
            staged[i] = copied
    for original, copied in zip(arrays, staged, strict=True):
        assert copied is not original, "a staged buffer may never be one that a step can donate"
    return staged


def _by_devices(arrays: Sequence[Any], staged: Sequence[Any]) -> Iterable[list[int]]:
    """Positions of those that are not staged yet."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, array in enumerate(arrays):
        if staged[i] is None:
            groups[frozenset(array.sharding.device_set)].append(i)
    return groups.values()


def _spec(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _program(arrays: Sequence[Any]) -> Any:
    """The program that copies arrays like these; arrays or specifications of them."""
    key = tuple((a.shape, a.dtype, a.sharding) for a in arrays)
    if key not in _programs:
        # Not donating, so every result is a new buffer: an identity would return its arguments.
        # Two threads may both come here; they compile the same program, and either will do.
        program = jax.jit(_copy)
        # Compiled ahead it refuses placed sub-byte arrays (jax 0.10.2, CPU: "layouts disagree").
        packed = any(_compat.is_packed(a.dtype) for a in arrays)
        with _compat.wide_numbers(a.dtype for a in arrays):
            _programs[key] = (
                program if packed else program.lower([_spec(a) for a in arrays]).compile()
            )
    return _programs[key]
