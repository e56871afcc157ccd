"""Questions about transfers alone: how fast each way to the host is, what it copies and costs."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.transfer.asked import Asked
from bench.transfer.raw_link import raw_link_secs
from gockpt_jax.transfer.block import block_of
from gockpt_jax.transfer.chunks import Chunk, Source

# Ways to the host: each starts a transfer and returns what waits for its end.

Way = Callable[[Asked, jax.Array], Any]


def _pinned_put(asked: Asked, x: jax.Array) -> np.ndarray:
    return np.asarray(jax.block_until_ready(jax.device_put(x, asked.pinned)))


def _async_copy(asked: Asked, x: jax.Array) -> np.ndarray:
    x.copy_to_host_async()
    return np.asarray(x)


def _plain_asarray(asked: Asked, x: jax.Array) -> np.ndarray:
    return np.asarray(x)


def _put_on_cpu(asked: Asked, x: jax.Array) -> Any:
    return jax.block_until_ready(jax.device_put(x, jax.local_devices(backend="cpu")[0]))


def _host_output(asked: Asked, x: jax.Array) -> np.ndarray:
    return np.asarray(jax.block_until_ready(_mover(asked.pinned, x.shape, x.sharding)(x)))


@functools.cache
def _mover(place: Any, shape: tuple[int, ...], where: Any) -> Any:
    """Compiled, but not run: its first transfer shall be a cold one, too."""
    given = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
    return jax.jit(jnp.copy, out_shardings=place).lower(given).compile()


def _library(asked: Asked, x: jax.Array) -> Any:
    """As the library does it: staged into a fresh buffer, pulled, seen as an array."""
    block = block_of([Chunk.whole(Source.of(x))])
    return block.start_pull(block.stage([x])).result()


WAYS: Mapping[str, Way] = {
    "library": _library,
    "pinned_put": _pinned_put,
    "copy_to_host_async": _async_copy,
    "asarray": _plain_asarray,
    "host_output": _host_output,
    "put_on_cpu": _put_on_cpu,
}


def ask_ways(asked: Asked) -> None:
    """GB/s of every way by size: the first of a size is cold, the others are warm."""
    asked.note(
        "pull_gbps/WAY/SIZE: from the call until the host has the bytes; ways take turns. cold: "
        "that way's first transfer of that size; ways into pinned memory share one pool, for whose "
        "growth the first of them (library) pays, unless a question before (pinning, overlap) has. "
        "The source is a new array each time, since JAX keeps the host's copy."
    )
    failed: set[str] = set()

    def attempt(name: str, ask: Callable[..., None], *args: Any) -> None:
        if name in failed or asked.is_over:
            return
        try:
            ask(asked, name, *args)
        except Exception as error:
            failed.add(name)
            asked.note(f"{name}: {type(error).__name__}: {str(error)[:200]}")

    for mib in asked.scale.sizes_mib:
        for name in WAYS:
            attempt(name, _compile_way, mib)
        for n in range(asked.scale.repeats + 1):
            for name in WAYS:
                attempt(name, _ask_way, mib, n)


def _compile_way(asked: Asked, name: str, mib: float) -> None:
    x = asked.fresh(mib)
    if name == "library":
        block_of([Chunk.whole(Source.of(x))]).programs()
    if name == "host_output":
        _mover(asked.pinned, x.shape, x.sharding)


def _ask_way(asked: Asked, name: str, mib: float, n: int) -> None:
    x = asked.fresh(mib, n)
    start = time.perf_counter()
    kept = WAYS[name](asked, x)
    secs = time.perf_counter() - start
    state = "warm" if n else "cold"
    asked.add(f"pull_gbps/{name}/{mib:g}MiB/{state}", x.nbytes / secs / 1e9)
    del kept, x


def ask_raw_link(asked: Asked) -> None:
    """GB/s of the driver's own copy into pinned memory, without JAX."""
    if asked.device.platform == "cpu":
        asked.note("raw_link: there is no link on the CPU backend.")
        return
    for mib in asked.scale.sizes_mib:
        if asked.is_over:
            return
        x = asked.fresh(mib)
        secs = raw_link_secs(x.unsafe_buffer_pointer(), x.nbytes, asked.scale.repeats)
        asked.add(f"raw_link_gbps/{mib:g}MiB", *(x.nbytes / s / 1e9 for s in secs))


def ask_pointers(asked: Asked) -> None:
    """Whether pinned memory, its NumPy view and the CPU backend's array are one memory (1) or not.

    And whether a staged copy is another memory than its source (0).
    """
    x = asked.fresh(1)
    pinned = jax.block_until_ready(jax.device_put(x, asked.pinned))
    view = np.asarray(pinned)
    at = pinned.unsafe_buffer_pointer()
    asked.add("same_memory/pinned_to_numpy", float(view.ctypes.data == at))
    cpu = jax.local_devices(backend="cpu")[0]
    there = jax.block_until_ready(jax.device_put(view, cpu))
    asked.add("same_memory/numpy_to_cpu", float(there.unsafe_buffer_pointer() == view.ctypes.data))
    asked.note(f"pinned memory starts at a multiple of {at & -at} bytes.")
    copied = jax.block_until_ready(jax.jit(jnp.copy)(x))
    same = copied.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    asked.add("same_memory/staged_copy", float(same))


def ask_dispatch(asked: Asked) -> None:
    """What starting transfers costs the trainer's thread: 100 small ones, one of their size."""
    count = 100
    small = [asked.fresh(1 / 64, n) for n in range(count)]
    large = asked.fresh(count / 64)
    for n in range(asked.scale.repeats + 1):
        if asked.is_over:
            return
        for name, arrays in (("small", small), ("packed", [large])):
            start = time.perf_counter()
            moved = [jax.device_put(x, asked.pinned) for x in arrays]
            secs = time.perf_counter() - start
            jax.block_until_ready(moved)
            if n:
                asked.add(f"dispatch_us_per_put/{name}", 1e6 * secs / len(arrays))
