"""Staging: whole arrays, copied into fresh device buffers.

Blocks (`block.py`) stage what their programs can pack; what is left is copied here. The next step
donates the state's buffers, so no transfer may ever be started on them: on a GPU the step would
wait for the whole of it (docs/guarantees.md, invariant 3). The copies are ours, nobody donates
them, and the transfer may take as long as it likes.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gockpt_jax import _compat
from gockpt_jax.compiling import Programs, unwatched
from gockpt_jax.transfer.chunks import in_host_memory, is_key_type


def _copy(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [jax.random.key_data(x) if is_key_type(x.dtype) else jnp.copy(x) for x in arrays]


def stage(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies arrays on their devices; returns at once.

    Args:
      arrays: Of any shapes, dtypes and placements; typed keys become their uint32 key data.

    Returns:
      New arrays of the same placements, in the same order. One program copies all arrays whose
      meshes have the same devices in the same order.
    """
    staged: list[Any] = [None] * len(arrays)
    alike: dict[Any, list[int]] = defaultdict(list)  # by devices: one order of them per program
    for i, array in enumerate(arrays):
        # Of the one a program would put its copy on the device, of the other on the first device.
        if in_host_memory(array.sharding) or _compat.lies_as_pmap_left_it(array.sharding):
            data = jax.random.key_data(array) if is_key_type(array.dtype) else array
            with unwatched():
                staged[i] = jax.device_put(data, data.sharding, may_alias=False)
        else:
            alike[tuple(array.sharding.devices_indices_map(array.shape))].append(i)
    for positions in alike.values():
        together = [arrays[i] for i in positions]
        program = _programs.needed(tuple(map(_spec, together)))
        with unwatched():
            copies = program(together)
        for i, copied in zip(positions, copies, strict=True):
            staged[i] = copied
    for original, copied in zip(arrays, staged, strict=True):
        assert copied is not original, "a staged buffer may never be one that a step can donate"
    return staged


def _spec(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _compile(specs: Sequence[jax.ShapeDtypeStruct]) -> Any:
    # Not donating, so every result is a new buffer: an identity would return its arguments.
    program = jax.jit(_copy)
    if any(_compat.is_packed(spec.dtype) for spec in specs):
        # Compiled ahead it refuses placed sub-byte arrays (jax 0.10.2, CPU: "layouts disagree").
        return program
    with _compat.wide_numbers(spec.dtype for spec in specs):
        return program.lower([*specs]).compile()


_programs = Programs("gockpt-compile-copies", _compile)
