"""Saving to and restoring from a disk: raw, stock Orbax, and the layouts of this library.

All contenders take turns in one process, on the same values, and all of them end when the data is
on the disk: raw writes sync each file, TensorStore and the library each file and its folder.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from bench.record import ROOT, Record, peak_memory, ratios
from gockpt_jax.storage.host_array import HostArray, HostShard, ShardFuture
from gockpt_jax.storage.layout import default_layout
from gockpt_jax.storage.tree_handler import make_tree_handler

MIB = 2**20
RAW_THREADS = 4
RAW_WRITE_BYTES = 16 * MIB

PLAIN = {"use_ocdbt": False, "use_compression": False}
# Options of the stock tree handler. The second is the fastest of stock's own combinations.
STOCK = {
    "stock": {},
    "stock_fastest": PLAIN,
}
OURS = {
    "files": PLAIN,
    "files_512mib": {**PLAIN, "write_limit_bytes": 512 * MIB},  # twice as many chunks in flight
    "files_zstd": {"use_ocdbt": False, "use_compression": True},
    "ocdbt": {"use_ocdbt": True, "use_compression": False},
    "ocdbt_zstd": {"use_ocdbt": True, "use_compression": True},
    "zarr3_files": {**PLAIN, "use_zarr3": True},
}


@dataclasses.dataclass
class Sizes:
    """How much is saved, equal leaves of fp32, and in which of our layouts."""

    leaves: int
    leaf_bytes: int
    repeats: int
    rss_bytes: int
    rss_limit_bytes: int
    layouts: tuple[str, ...] = tuple(OURS)

    @property
    def nbytes(self) -> int:
        """Of the whole state."""
        return self.leaves * self.leaf_bytes


def run(quick: bool) -> Record:
    """Runs the benchmark.

    Args:
      quick: 256 MiB instead of 4 GiB.
    """
    if quick:
        sizes = Sizes(4, 64 * MIB, 2, 256 * MIB, 64 * MIB, ("files", "ocdbt", "ocdbt_zstd"))
    else:
        sizes = Sizes(32, 128 * MIB, 5, 1024 * MIB, 256 * MIB)
    # Orbax warns at each save of plain files that there is no database to merge.
    logging.getLogger("absl").setLevel(logging.ERROR)
    record = Record("storage")
    state = random_state(sizes)
    with tempfile.TemporaryDirectory(prefix="bench_storage_", dir=os.environ.get("BENCH_DIR")) as d:
        folder = Path(d)
        ours = dict(default_layout(str(folder)))
        default = next(n for n in sizes.layouts if OURS[n].items() <= {**_STOCK_IS, **ours}.items())
        record.notes += _notes(sizes, default)
        measure(record, state, folder, sizes)
        for name in (default, "ocdbt", "ocdbt_zstd"):
            record.samples[f"extra_rss_ratio/{name}"] = [extra_rss_ratio(name, folder, sizes)]
    _conclude(record, default, sizes)
    return record


_STOCK_IS = {"use_ocdbt": True, "use_compression": True}


def random_state(sizes: Sizes) -> dict[str, jax.Array]:
    """Arrays of random bits, NaNs and denormals among them: nothing to compress."""
    rng, state = np.random.default_rng(0), {}
    for n in range(sizes.leaves):
        bits = rng.integers(0, 2**32, (sizes.leaf_bytes // 4096, 1024), np.uint32)
        state[f"leaf_{n:03}"] = jax.device_put(bits.view(np.float32))
    return jax.block_until_ready(state)


def measure(record: Record, state: dict[str, jax.Array], folder: Path, sizes: Sizes) -> None:
    """Saves and restores with every contender, in turns; keeps seconds in the record."""
    contenders: dict[str, Callable[[Path], None]] = {"raw": lambda path: raw_save(path, state)}
    for name, options in STOCK.items():
        contenders[name] = lambda path, o=options: stock_save(path, state, o)
    for name in sizes.layouts:
        contenders[name] = lambda path, o=OURS[name]: our_save(path, state, o)
    for turn in range(1 + sizes.repeats):
        for name, save in contenders.items():
            with tempfile.TemporaryDirectory(dir=folder) as target:
                path = Path(target) / "x"
                times = {"save_secs": _secs(save, path)}
                forget(path)
                give_back()
                read = raw_restore if name == "raw" else stock_restore
                times["restore_secs"] = _secs(read, path, state)
                give_back()
                files = sum(p.is_file() for p in path.rglob("*"))
            if turn:
                for figure, secs in times.items():
                    record.samples.setdefault(f"{figure}/{name}", []).append(secs)
                record.samples[f"files_per_tb/{name}"] = [1e12 * files / sizes.nbytes]


def give_back() -> None:
    """Returns freed memory to the system: stock's saves leave gigabytes with the allocator."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _secs(run: Callable[..., None], *args: Any) -> float:
    os.sync()  # what others left in the page cache is not ours to write
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


def forget(path: Path) -> None:
    """Drops the files from the page cache, so that restoring reads the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- The contenders ------------------------------------------------------------------------------


def raw_save(path: Path, state: dict[str, jax.Array]) -> None:
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


def raw_restore(path: Path, state: dict[str, jax.Array]) -> None:
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


def _one_of_each_size(state: dict[str, jax.Array]) -> dict[int, jax.Array]:
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


def stock_save(path: Path, state: dict[str, jax.Array], options: dict[str, Any]) -> None:
    """Stock Orbax, from `save` until the checkpoint is visible."""
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state))


def our_save(path: Path, state: dict[str, jax.Array], options: dict[str, Any]) -> None:
    """The same with the library's writer, from bytes that are on the host."""
    handler = make_tree_handler(**options).handler
    with ocp.AsyncCheckpointer(handler) as checkpointer:
        tree = {name: host_array(x) for name, x in state.items()}
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def host_array(array: jax.Array) -> HostArray:
    """An array as the window hands it over."""
    spec, data = HostArray.spec_like(array), ShardFuture()
    data.set_result(np.asarray(array))
    shard = HostShard((slice(None),) * array.ndim, data)
    return HostArray(spec.shape, spec.dtype, spec.sharding, [shard])


def stock_restore(path: Path, state: dict[str, jax.Array]) -> None:
    """Stock Orbax into a target, whoever wrote the checkpoint."""
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with ocp.StandardCheckpointer() as checkpointer:
        jax.block_until_ready(checkpointer.restore(path, target))


# --- Memory --------------------------------------------------------------------------------------


def extra_rss_ratio(name: str, folder: Path, sizes: Sizes) -> float:
    """The growth of a fresh process during a save, over the byte limit."""
    with tempfile.TemporaryDirectory(dir=folder) as target:
        words = [name, target, str(sizes.rss_bytes), str(sizes.rss_limit_bytes)]
        command = [sys.executable, "-m", "bench.storage", *words]
        child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1]) / sizes.rss_limit_bytes


def extra_rss(options: dict[str, Any], target: Path, nbytes: int, limit_bytes: int) -> int:
    """By how many bytes this process grows while it saves; an earlier save warms it up."""
    state = random_state(Sizes(2, nbytes // 2, 1, 0, 0))
    options = {**options, "write_limit_bytes": limit_bytes, "chunk_byte_size": limit_bytes // 4}
    our_save(target / "first", state, options)
    # What the first save and the making of the state have freed must not hide what this one takes.
    give_back()
    with peak_memory() as grown:
        our_save(target / "second", state, options)
        return grown()


# --- What it comes to ----------------------------------------------------------------------------


def _conclude(record: Record, default: str, sizes: Sizes) -> None:
    secs = dict(record.samples)
    ours = secs[f"save_secs/{default}"]
    headlines = {
        "raw_disk_ratio": ratios(secs["save_secs/raw"], ours),
        "stock_speedup": ratios(secs["save_secs/stock"], ours),
        "stock_fastest_speedup": ratios(secs["save_secs/stock_fastest"], ours),
        "restore_speedup": ratios(secs["restore_secs/stock"], secs[f"restore_secs/{default}"]),
        "extra_rss_ratio": secs[f"extra_rss_ratio/{default}"],
    }
    for name in sizes.layouts:
        other = secs[f"save_secs/{name}"]
        headlines[f"raw_disk_ratio/{name}"] = ratios(secs["save_secs/raw"], other)
        headlines[f"stock_speedup/{name}"] = ratios(secs["save_secs/stock"], other)
        read = ratios(secs["restore_secs/stock"], secs[f"restore_secs/{name}"])
        headlines[f"restore_speedup/{name}"] = read
    record.samples = headlines | secs


def _notes(sizes: Sizes, default: str) -> list[str]:
    return [
        f"{sizes.nbytes / MIB:.0f} MiB of random fp32 bits in {sizes.leaves} leaves on one CPU "
        f"device; the default layout on this disk is `{default}`.",
        "raw: O_DIRECT from page-aligned memory, 4 threads, a file for each leaf, synced.",
        "stock: `use_ocdbt` and zstd, as by default; stock_fastest: plain files, no compression.",
        "Like with like: TensorStore syncs each file and its folder before a write counts as "
        "done (`file_io_sync`, which Orbax leaves on; seen with strace), and so does the library. "
        "Neither syncs Orbax's own small metadata files.",
        "restore: stock's `StandardCheckpointer` reads each contender's files, which are not in "
        "the page cache; raw reads with O_DIRECT.",
        f"extra_rss_ratio: growth of a fresh process's resident set while it saves "
        f"{sizes.rss_bytes / MIB:.0f} MiB, over a limit of {sizes.rss_limit_bytes / MIB:.0f} MiB; "
        "chunks of a quarter of the limit.",
        "files_per_tb: files of the checkpoint, per 10**12 bytes of the state.",
    ]


if __name__ == "__main__":
    layout, where, state_bytes, limit = sys.argv[1:]
    print(extra_rss(OURS[layout], Path(where), int(state_bytes), int(limit)))
