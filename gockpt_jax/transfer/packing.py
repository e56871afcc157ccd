"""The program that stages a block: each device packs the rows that it holds into flat buffers."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from gockpt_jax import _compat
from gockpt_jax.transfer.chunks import Chunk, Source, row_size
from gockpt_jax.transfer.layout import Buffer, plain_mesh

# How wide the floats are that a backend moves by arithmetic, which need not keep a NaN's payload:
# two bytes, the CPU's takes 16 bits through 32, and four where a TPU's joins arrays by padding and
# taking the larger (it cannot take 64 bits for integers). Where it is not needed, integers cost a
# second copy.
_ARITHMETIC_BYTES = {"tpu": 4}


def compile_packing(
    taken: Sequence[Source], parts: Sequence[tuple[Chunk, int]], buffers: Sequence[Buffer],
    layouts: Sequence[Layout | None] = (),
) -> Any:  # fmt: skip
    """Compiles the program that packs rows of some arrays.

    Rows of one array are cut from one argument: the TPU's compiler adds all arguments up, also
    those that are one array, and refuses what exceeds the device.

    Args:
      taken: The arrays that it takes.
      parts: The chunks in all buffers, in order, each with the number of its array.
      buffers: What it returns; nobody else's memory.
      layouts: Of each array, how the user has it lie in memory; none, if all lie as JAX has them.
    """
    mesh = buffers[0].place.mesh
    packing = functools.partial(_pack, parts, buffers)
    if mesh is not None:
        packing = jax.shard_map(
            packing, mesh=mesh, in_specs=tuple(_spec(s.travels_by) for s in taken),
            out_specs=tuple(_out_spec(b) for b in buffers), check_vma=False,
        )  # fmt: skip
    places = [
        _plain(s) if x is None else Format(x, _plain(s))
        for s, x in zip(taken, layouts or (None,) * len(taken), strict=True)
    ]
    specs = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place)
        for s, place in zip(taken, places, strict=True)
    ]

    def _copy(*arrays: jax.Array) -> tuple[jax.Array, ...]:  # its name in profiles
        return packing(*arrays)

    # Not donating, and every result is computed, so every result is a new buffer.
    with _compat.wide_numbers(b.dtype for b in buffers):
        return jax.jit(_copy).lower(*specs).compile()


def on_its_devices(source: Source) -> bool:
    """Whether an array is on its program's devices, wherever on them."""
    a, b = source.sharding, source.travels_by
    if isinstance(a, NamedSharding) and isinstance(b, NamedSharding):
        return a.mesh is b.mesh or tuple(a.mesh.devices.flat) == tuple(b.mesh.devices.flat)
    return bool(a == b)


def _spec(sharding: Any) -> PartitionSpec:
    spec: PartitionSpec = sharding.spec
    return spec


def _out_spec(buffer: Buffer) -> PartitionSpec:
    axes = (*buffer.place.sharded, *(buffer.place.split if buffer.is_sliced else ()))
    return PartitionSpec(axes) if axes else PartitionSpec()


def _plain(source: Source) -> jax.sharding.Sharding:
    """Where the program finds an array, on a mesh without the user's types of axes.

    From jax 0.12 on a `shard_map` over a mesh of other types does not lower.
    """
    found = source.sharding if on_its_devices(source) else source.travels_by
    if not isinstance(found, NamedSharding):
        return found
    return NamedSharding(plain_mesh(found.mesh), found.spec, memory_kind=found.memory_kind)


def _pack(
    parts: Sequence[tuple[Chunk, int]], buffers: Sequence[Buffer], *shards: jax.Array
) -> tuple[jax.Array, ...]:
    """What one device does: its shards' rows, one after another in each buffer."""
    platform = buffers[0].place.devices[0].platform
    rows = iter([_take(chunk, shards[number], platform) for chunk, number in parts])
    together = [_as_they_are([next(rows) for _ in b.chunks], platform) for b in buffers]
    return tuple(map(_fill, buffers, together))


def joined(rows: Sequence[jax.Array], dtype: Any, platform: str) -> jax.Array:
    """Flat arrays, as `as_bits` has made them of one dtype's, one after another in a new one."""
    together = jnp.concatenate(_as_they_are([*rows], platform))
    return together if together.dtype == dtype else lax.bitcast_convert_type(together, dtype)


def _as_they_are(rows: list[jax.Array], platform: str) -> list[jax.Array]:
    """Rows to be joined: a compiler may join the floats first, and take the whole for integers."""
    return lax.optimization_barrier(rows) if platform in _ARITHMETIC_BYTES and rows[1:] else rows


def _fill(buffer: Buffer, rows: Sequence[jax.Array]) -> jax.Array:
    parts: list[jax.Array] = []
    ends = (*buffer.offsets[1:], buffer.size)
    for row, offset, end in zip(rows, buffer.offsets, ends, strict=True):
        parts.append(row)
        if padding := end - offset - row.size:
            parts.append(jnp.zeros(padding, row.dtype))
    flat = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    if buffer.is_sliced:
        number = lax.axis_index(buffer.place.split)
        # The last one is moved back to where it ends with the buffer, as `Buffer.slice_start` says.
        flat = lax.dynamic_slice(flat, (number * buffer.slice_size,), (buffer.slice_size,))
    elif len(parts) == 1:  # computed in any case, or the result could be the argument
        flat = jnp.copy(flat)
    return flat if flat.dtype == buffer.dtype else lax.bitcast_convert_type(flat, buffer.dtype)


def _take(chunk: Chunk, shard: jax.Array, platform: str) -> jax.Array:
    if chunk.source.is_key:
        shard = jax.random.key_data(shard)
    shard = to_be_cut(shard, platform)
    if not chunk.is_whole:
        row = row_size(shard.shape, chunk.start, chunk.stop)
        axis = next(a for a in range(shard.ndim + 1) if math.prod(shard.shape[a:]) == row)
        shard = lax.reshape(shard, (shard.size // row, *shard.shape[axis:]))
        shard = lax.slice_in_dim(shard, chunk.start // row, chunk.stop // row)
    return lax.reshape(as_bits(shard, platform), (chunk.size,))


def to_be_cut(x: jax.Array, platform: str) -> jax.Array:
    """Floats as integers, where a backend cuts by arithmetic, too.

    The CPU's does. A TPU's would make a copy of the whole array for it.
    """
    return x if platform in _ARITHMETIC_BYTES else as_bits(x, platform)


def as_bits(x: jax.Array, platform: str) -> jax.Array:
    """Floats as integers, where a backend would join them by arithmetic."""
    by_arithmetic = _ARITHMETIC_BYTES.get(platform, 2)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > by_arithmetic:
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
