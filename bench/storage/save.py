"""What a save takes beside the disk's own time: raw writes and the library's, in turns, by phases.

The part of `bench storage` that is held against the disk, alone: minutes instead of half an hour.
"""

import functools
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.record import Record, ratios
from bench.storage.contenders import (
    MIB,
    OURS,
    give_back,
    our_save,
    random_state,
    raw_save,
    save_times,
)
from bench.storage.phases import NOTE

LEAF_BYTES = 128 * MIB
# Those that are written past the page cache; each also from memory that the disk takes as it lies.
OUR_SAVES = {
    name + suffix: functools.partial(our_save, options=OURS[name], is_aligned=bool(suffix))
    for name in ("ocdbt", "files")
    for suffix in ("", "_aligned")
}


def run(quick: bool) -> Record:
    """Runs the benchmark.

    Args:
      quick: 512 MiB instead of 4 GiB.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    leaves, repeats = (4, 5) if quick else (32, 7)
    state = random_state(leaves, LEAF_BYTES)
    contenders: dict[str, Callable[[Path], None]] = {
        name: functools.partial(save, state=state)
        for name, save in ({"raw": raw_save} | OUR_SAVES).items()
    }
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench_storage_", dir=os.environ.get("BENCH_DIR")) as d:
        for turn in range(1 + repeats):
            for name, save in contenders.items():
                with tempfile.TemporaryDirectory(dir=d) as target:
                    times = save_times(save, Path(target) / "x", leaves * LEAF_BYTES)
                    give_back()
                for figure, value in times.items() if turn else ():  # the first turn warms up
                    samples.setdefault(f"{figure}/{name}", []).append(value)
    return _record(samples, leaves)


def _record(samples: dict[str, list[float]], leaves: int) -> Record:
    record = Record("storage_save")
    for name in OUR_SAVES:
        for figure, of in (("raw_disk_ratio", "save_secs"), ("writing_raw_ratio", "writing_secs")):
            record.samples[f"{figure}/{name}"] = ratios(
                samples[f"{of}/raw"], samples[f"{of}/{name}"]
            )
    record.samples |= samples
    record.notes += [
        f"{leaves * LEAF_BYTES / MIB:.0f} MiB of random fp32 bits in {leaves} leaves on one CPU "
        "device, without compression; who writes and what is timed, as in `bench storage`. "
        "..._aligned: from page-aligned memory; the others from the CPU backend's, which is copied "
        "where the disk asks for other addresses.",
        NOTE,
    ]
    return record
