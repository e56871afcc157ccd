"""When what a device has been given has run: one element, copied behind it, tells."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gockpt_jax import _compat
from gockpt_jax.compiling import Programs, unwatched
from gockpt_jax.transfer.chunks import in_host_memory, is_key_type


def probe(arrays: Iterable[Any]) -> jax.Array | None:
    """One element of the smallest array, copied on one device behind what makes the array.

    A later step may donate the array, and nobody the copy: it can be waited for on any thread.

    Args:
      arrays: Some results of one program.

    Returns:
      The copy, of shape (1, ...); `None` if none of them can be copied here, or any more.

    Example:
      >>> probe([jnp.zeros((8, 8)), jnp.full(2, 3.0)])
      Array([3.], dtype=float32)
    """
    found = min(filter(_is_plain, arrays), key=lambda array: array.size, default=None)
    if found is None or found.is_deleted() or not found.addressable_shards:
        return None
    shard = found.addressable_shards[0].data
    # As it lies there: it may be as the user has asked (`Format`).
    spec = jax.ShapeDtypeStruct(shard.shape, shard.dtype, sharding=shard.format)
    program = _programs.needed(spec)
    with unwatched():
        copied: jax.Array = program(shard)
    return copied


def _is_plain(x: Any) -> bool:
    return (
        isinstance(x, jax.Array) and x.size > 0 and not is_key_type(x.dtype)
        and not _compat.is_packed(x.dtype) and not in_host_memory(x.sharding)
    )  # fmt: skip


def _compile(spec: jax.ShapeDtypeStruct) -> Any:
    def first(x: jax.Array) -> jax.Array:  # computed in any case, or the result could be the shard
        return jnp.copy(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim))

    with _compat.wide_numbers([spec.dtype]):
        return jax.jit(first).lower(spec).compile()


_programs = Programs("gockpt-compile-copies", _compile)
