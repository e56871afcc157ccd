"""Saving to and restoring from a disk: raw, stock Orbax, and the layouts of this library.

All contenders take turns in one process, on the same values, and all of them end when the data is
on the disk: raw writes sync each file, TensorStore and the library each file and its folder.
"""

import dataclasses
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.record import Record, ratios
from bench.storage import processes
from bench.storage.contenders import (
    MIB,
    OURS,
    STOCK,
    State,
    forget,
    give_back,
    our_restore,
    our_save,
    random_state,
    raw_restore,
    raw_save,
    save_times,
    secs_of,
    stock_restore,
    stock_save,
)
from bench.storage.memory import extra_rss_ratio
from bench.storage.phases import NOTE
from gockpt_jax.storage.inspecting.verify import verify_item
from gockpt_jax.storage.writing.tree_handler import default_layout

# Every contender saves; restores are timed of raw files, of stock's default and of ours.
SAVED = ("ocdbt", "files", "ocdbt_zstd")
# Our default on local disks, from memory that the disk can take as it is.
ALIGNED = "ocdbt_aligned"
_STOCK_IS = {"use_ocdbt": True, "use_compression": True}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is saved, in equal leaves of fp32."""

    leaves: int
    leaf_bytes: int
    repeats: int
    small_leaves: int
    rss_bytes: int
    rss_limit_bytes: int
    shared_leaves: int
    shared_leaf_bytes: int

    @property
    def nbytes(self) -> int:
        """Of the whole state."""
        return self.leaves * self.leaf_bytes


FULL = Sizes(32, 128 * MIB, 5, 2000, 1024 * MIB, 256 * MIB, 16, 64 * MIB)
QUICK = Sizes(4, 64 * MIB, 2, 200, 256 * MIB, 64 * MIB, 4, 16 * MIB)
SMALL_LEAF_BYTES = 16 * 1024


def run(quick: bool) -> Record:
    """Runs the benchmark.

    Args:
      quick: 256 MiB instead of 4 GiB.
    """
    sizes = QUICK if quick else FULL
    # Orbax warns at each save of plain files that there is no database to merge.
    logging.getLogger("absl").setLevel(logging.ERROR)
    record = Record("storage")
    with tempfile.TemporaryDirectory(prefix="bench_storage_", dir=os.environ.get("BENCH_DIR")) as d:
        folder = Path(d)
        default = _default(folder)
        record.notes += _notes(sizes, default)
        # Memory first: the state of the other parts is not in the system then.
        for layout in (default, "ocdbt_zstd") if quick else OURS:
            _rss(record, "save", layout, folder, sizes)
        for what in ("restore", "verify"):
            _rss(record, what, default, folder, sizes)
        processes.measure(
            record, folder, sizes.shared_leaves, sizes.shared_leaf_bytes, sizes.repeats
        )
        measure_small(record, folder, sizes)
        measure(record, folder, sizes, default)
    _conclude(record, default)
    return record


def _default(folder: Path) -> str:
    """Our layout on this disk, where the user says nothing."""
    options = _STOCK_IS | default_layout(folder)
    return next(name for name in SAVED if OURS[name].items() <= options.items())


def savers(state: State) -> dict[str, Callable[[Path], None]]:
    """The contenders but for raw, by name."""
    stock = {
        name: lambda path, o=options: stock_save(path, state, o) for name, options in STOCK.items()
    }
    ours = {name: lambda path, o=OURS[name]: our_save(path, state, o) for name in SAVED}
    ours[ALIGNED] = lambda path: our_save(path, state, OURS["ocdbt"], is_aligned=True)
    return stock | ours


def measure(record: Record, folder: Path, sizes: Sizes, default: str) -> None:
    """Saves and restores with every contender, in turns; keeps seconds in the record."""
    state = random_state(sizes.leaves, sizes.leaf_bytes)
    contenders = {"raw": lambda path: raw_save(path, state)} | savers(state)
    readers: dict[str, dict[str, Callable[[Path], Any]]] = {
        "raw": {"restore_secs": lambda path: raw_restore(path, state)},
        "stock": {"restore_secs": lambda path: stock_restore(path, state)},
        default: {
            "stock_restore_secs": lambda path: stock_restore(path, state),
            "restore_secs": lambda path: our_restore(path, state),
            "verify_secs": lambda path: verify_item(path).require_whole(),
        },
    }
    for turn in range(1 + sizes.repeats):
        for name, save in contenders.items():
            with tempfile.TemporaryDirectory(dir=folder) as target:
                path = Path(target) / "x"
                times = save_times(save, path, sizes.nbytes)
                give_back()
                # The first turn warms up; what reads is warm after one file.
                for figure, read in (
                    readers.get(name, {}).items() if turn or name == default else ()
                ):
                    forget(path)
                    times[figure] = secs_of(read, path)
                    give_back()
                files = sum(p.is_file() for p in path.rglob("*"))
            _progress(f"turn {turn} of {sizes.repeats}: {name}", times)
            if turn:
                for figure, secs in times.items():
                    record.add(f"{figure}/{name}", secs)
                record.samples[f"files_per_tb/{name}"] = [1e12 * files / sizes.nbytes]


def measure_small(record: Record, folder: Path, sizes: Sizes) -> None:
    """Saves and restores a state of many small leaves: files, syncs and calls count there."""
    state = random_state(sizes.small_leaves, SMALL_LEAF_BYTES)
    contenders = savers(state)
    del contenders["ocdbt_zstd"], contenders[ALIGNED]
    readers = {"stock": stock_restore, "files": our_restore, "ocdbt": our_restore}
    for turn in range(1 + sizes.repeats):
        for name, save in contenders.items():
            with tempfile.TemporaryDirectory(dir=folder) as target:
                path = Path(target) / "x"
                times = {"save_secs": secs_of(save, path)}
                if name in readers:
                    forget(path)
                    times["restore_secs"] = secs_of(readers[name], path, state)
            _progress(f"small leaves, turn {turn} of {sizes.repeats}: {name}", times)
            if turn:
                for figure, secs in times.items():
                    record.add(f"small/{figure}/{name}", secs)


def _rss(record: Record, what: str, layout: str, folder: Path, sizes: Sizes) -> None:
    ratio = extra_rss_ratio(what, layout, folder, sizes.rss_bytes, sizes.rss_limit_bytes)
    figure = f"extra_rss_ratio/{layout}" if what == "save" else f"{what}_extra_rss_ratio"
    _progress(figure, {"ratio": ratio})
    record.samples[figure] = [ratio]


def _progress(what: str, found: dict[str, float]) -> None:
    figures = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
    print(f"{time.strftime('%H:%M:%S')} {what}: {figures}", file=sys.stderr, flush=True)


# --- What it comes to ----------------------------------------------------------------------------


def _conclude(record: Record, default: str) -> None:
    secs = dict(record.samples)
    ours, reads = secs[f"save_secs/{default}"], secs[f"restore_secs/{default}"]
    small = secs[f"small/save_secs/{default}"]
    headlines = {
        "raw_disk_ratio": ratios(secs["save_secs/raw"], ours),
        "stock_speedup": ratios(secs["save_secs/stock"], ours),
        "stock_fastest_speedup": ratios(secs["save_secs/stock_fastest"], ours),
        "restore_speedup": ratios(secs[f"stock_restore_secs/{default}"], reads),
        "restore_stock_speedup": ratios(secs["restore_secs/stock"], reads),
        "restore_raw_ratio": ratios(secs["restore_secs/raw"], reads),
        "verify_raw_ratio": ratios(secs["restore_secs/raw"], secs[f"verify_secs/{default}"]),
        "extra_rss_ratio": secs[f"extra_rss_ratio/{default}"],
        "small/stock_speedup": ratios(secs["small/save_secs/stock"], small),
        "small/stock_fastest_speedup": ratios(secs["small/save_secs/stock_fastest"], small),
        "small/stock_speedup/files": ratios(
            secs["small/save_secs/stock"], secs["small/save_secs/files"]
        ),
        "small/restore_speedup": ratios(
            secs["small/restore_secs/stock"], secs[f"small/restore_secs/{default}"]
        ),
    }
    for name in (*SAVED, ALIGNED):
        other = secs[f"save_secs/{name}"]
        headlines[f"raw_disk_ratio/{name}"] = ratios(secs["save_secs/raw"], other)
        if f"writing_secs/{name}" in secs:
            headlines[f"writing_raw_ratio/{name}"] = ratios(
                secs["writing_secs/raw"], secs[f"writing_secs/{name}"]
            )
        headlines[f"stock_speedup/{name}"] = ratios(secs["save_secs/stock"], other)
    record.samples = headlines | secs


def _notes(sizes: Sizes, default: str) -> list[str]:
    rss_mib, limit_mib = sizes.rss_bytes / MIB, sizes.rss_limit_bytes / MIB
    return [
        f"{sizes.nbytes / MIB:.0f} MiB of random fp32 bits in {sizes.leaves} leaves on one CPU "
        f"device; the default layout on this disk is `{default}`.",
        "raw: O_DIRECT from page-aligned memory, the same for all leaves, 4 threads, a file for "
        "each leaf, which is created, written in its turn and synced by its thread. So it has the "
        "syncs of ours, but no rename, no metadata and no checksums; a bound for one who writes "
        "so, not for the disk.",
        f"{ALIGNED}: `ocdbt` from page-aligned memory, as where a window has put rows of a leaf "
        "together, and on disks that take any address (NVMe). The rest is from the CPU backend's "
        "memory, which begins 64 bytes after a page, so that it is copied where the disk asks for "
        "more.",
        NOTE,
        "cpu_secs_per_gb: of all threads of the process, for 10**9 bytes of the state.",
        "stock: `use_ocdbt` and zstd, as by default; stock_fastest: plain files, no compression.",
        "Like with like: TensorStore syncs each file and its folder before a write counts as "
        "done (`file_io_sync`, which Orbax leaves on; seen with strace), and the library all files "
        "and folders before a save counts as written. Neither syncs Orbax's own small metadata "
        "files.",
        "restore_speedup: stock's `StandardCheckpointer` over `GoCkptRestore`, on the same files, "
        "ours; restore_stock_speedup: stock's restore of stock's default checkpoint over ours of "
        "ours. Files are not in the page cache; raw reads with O_DIRECT. Restores of layouts that "
        "nobody gets by default on a local disk are left out.",
        f"processes/...: two processes with two devices each restore "
        f"{sizes.shared_leaves * sizes.shared_leaf_bytes / MIB:.0f} MiB of our files, on the mesh "
        "that they were saved from or with a copy of everything on each device; until both have "
        "it. read_bytes_ratio: what a process reads by system calls, over its part of the state.",
        f"small: {sizes.small_leaves} leaves of {SMALL_LEAF_BYTES // 1024} KiB; restored by each "
        "from its own checkpoint, `small/restore_speedup` being of our default layout.",
        f"extra_rss_ratio: growth of a fresh process's resident set while it saves {rss_mib:.0f} "
        f"MiB, over a limit of {limit_mib:.0f} MiB; chunks of a quarter of the limit. The same for "
        "restore, less the arrays themselves, and for verify.",
        "files_per_tb: files of the checkpoint, per 10**12 bytes of the state; it falls with the "
        "size of leaves (tests/storage/test_file_count.py).",
    ]
