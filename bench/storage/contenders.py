"""Who saves and restores in `bench storage`: raw files, stock Orbax, this library."""

import concurrent.futures
import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from bench.storage.phases import phases, recorded
from gockpt_jax.promise import Promise
from gockpt_jax.storage.files import checksum_files
from gockpt_jax.storage.restoring.arguments import GoCkptRestore
from gockpt_jax.storage.restoring.restore import restore
from gockpt_jax.storage.writing.host_array import HostArray, HostShard
from gockpt_jax.storage.writing.tree_handler import make_tree_handler
from gockpt_jax.storage.writing.write_budget import WriteStats, collecting

MIB = 2**20
RAW_THREADS = 4
RAW_WRITE_BYTES = 16 * MIB

PLAIN = {"use_ocdbt": False, "use_compression": False}
# Options of the stock tree handler. The second is the fastest of stock's own combinations.
STOCK: dict[str, dict[str, Any]] = {"stock": {}, "stock_fastest": PLAIN}
# Layouts of ours: the default on local disks, what a user may choose there, stock's own.
OURS: dict[str, dict[str, Any]] = {
    "ocdbt": {"use_ocdbt": True, "use_compression": False},
    "files": PLAIN,
    "ocdbt_zstd": {"use_ocdbt": True, "use_compression": True},
    "files_zstd": {"use_ocdbt": False, "use_compression": True},
    "zarr3_files": {**PLAIN, "use_zarr3": True},
}

State = dict[str, jax.Array]


def random_state(leaves: int, leaf_bytes: int) -> State:
    """Arrays of random bits, NaNs and denormals among them: nothing to compress."""
    rng, state = np.random.default_rng(0), {}
    for n in range(leaves):
        bits = rng.integers(0, 2**32, (leaf_bytes // 4096, 1024), np.uint32)
        state[f"leaf_{n:04}"] = jax.device_put(bits.view(np.float32))
    return jax.block_until_ready(state)


def give_back() -> None:
    """Returns freed memory to the system: stock's saves leave gigabytes with the allocator."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def secs_of(run: Callable[..., None], *args: Any) -> float:
    """Seconds of one call, on a quiet disk."""
    os.sync()  # what others left in the page cache is not ours to write
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


def save_times(save: Callable[[Path], None], path: Path, nbytes: int) -> dict[str, float]:
    """The same of a save of `nbytes`, with its phases and the processor's time on all threads."""
    os.sync()
    with recorded() as calls:
        start, cpu_start = time.perf_counter(), time.process_time()
        save(path)
        end, cpu_secs = time.perf_counter(), time.process_time() - cpu_start
    times = {"save_secs": end - start, "cpu_secs_per_gb": cpu_secs * 1e9 / nbytes}
    return times | phases(calls, start, end)


def forget(path: Path) -> None:
    """Drops the files from the page cache, so that restoring reads the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw_save(path: Path, state: State) -> None:
    """One file for each leaf, written with O_DIRECT from aligned memory by four threads."""
    path.mkdir(parents=True)
    buffers = {name: _aligned(np.asarray(x)) for name, x in _one_of_each_size(state).items()}

    def write(name: str) -> None:
        content = memoryview(buffers[state[name].nbytes])
        fd = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
        for start in range(0, len(content), RAW_WRITE_BYTES):
            os.pwrite(fd, content[start : start + RAW_WRITE_BYTES], start)
        os.fsync(fd)
        os.close(fd)

    with concurrent.futures.ThreadPoolExecutor(RAW_THREADS) as pool:
        list(pool.map(write, state))


def raw_restore(path: Path, state: State) -> None:
    """Reads the files again with O_DIRECT, by four threads."""
    buffers = concurrent.futures.ThreadPoolExecutor(RAW_THREADS)

    def read(name: str) -> None:
        content = memoryview(_aligned_empty(RAW_WRITE_BYTES))
        fd = os.open(path / name, os.O_RDONLY | os.O_DIRECT)
        for start in range(0, state[name].nbytes, RAW_WRITE_BYTES):
            os.preadv(fd, [content], start)
        os.close(fd)

    with buffers as pool:
        list(pool.map(read, state))


_ALIGNED: dict[int, np.ndarray] = {}


def _one_of_each_size(state: State) -> dict[int, jax.Array]:
    return {x.nbytes: x for x in state.values()}


def _aligned(values: np.ndarray) -> np.ndarray:
    """The bytes in page-aligned memory: copied once, outside of what is timed after warming up."""
    if values.nbytes not in _ALIGNED:
        buffer = _ALIGNED[values.nbytes] = _aligned_empty(values.nbytes)
        buffer[:] = values.reshape(-1).view(np.uint8)
    return _ALIGNED[values.nbytes]


def _aligned_empty(nbytes: int) -> np.ndarray:
    base = np.empty(nbytes + 4096, np.uint8)
    start = -base.ctypes.data % 4096
    return base[start : start + nbytes]


def stock_save(path: Path, state: State, options: dict[str, Any]) -> None:
    """Stock Orbax, from `save` until the checkpoint is visible."""
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state))


def our_save(
    path: Path, state: State, options: dict[str, Any], *, is_aligned: bool = False
) -> None:
    """The same with the library's writer, from bytes that are on the host, and its checksums.

    Args:
      path: Of the checkpoint.
      state: What is saved.
      options: Of the layout.
      is_aligned: Whether the bytes are in page-aligned memory, as where a window has put rows of a
        leaf together; where they are the CPU backend's own, they are not.
    """
    handler, stats = make_tree_handler(**options), WriteStats()
    with ocp.AsyncCheckpointer(handler) as checkpointer, collecting(stats):
        tree = {name: host_array(x, is_aligned) for name, x in state.items()}
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    stats.checksums.write(path)
    checksum_files.write_item_file(path, [0])


def host_array(array: jax.Array, is_aligned: bool = False) -> HostArray:
    """An array as the window hands it over."""
    data, values = Promise(), np.asarray(array)
    if is_aligned:
        values = _aligned(values).view(values.dtype).reshape(values.shape)
    data.set_result(values)
    return HostArray.like(array, [HostShard((slice(None),) * array.ndim, data)])


def stock_restore(path: Path, state: State) -> None:
    """Stock Orbax into a target, whoever wrote the checkpoint."""
    target = jax.tree.map(_abstract, state)
    with ocp.StandardCheckpointer() as checkpointer:
        jax.block_until_ready(checkpointer.restore(path, target))


def our_restore(path: Path, state: State, **options: Any) -> None:
    """The library's restore into the same target."""
    target = jax.tree.map(_abstract, state)
    jax.block_until_ready(restore(path, GoCkptRestore(target), options))


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
