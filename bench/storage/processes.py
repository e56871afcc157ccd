"""Restoring in a job of two processes with two devices each: stock Orbax and this library."""

import json
import os
import socket
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
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.record import ROOT, Record, ratios
from bench.storage.contenders import forget, give_back
from gockpt_jax import GoCkptManager, GoCkptRestore, GoCkptSave

PROCESSES, DEVICES = 2, 2
LIMIT_SECS = 900
# What each device gets: rows of every leaf, as it was saved, or all of them.
PLACES = {"sharded": PartitionSpec("x"), "replicated": PartitionSpec()}


def measure(record: Record, folder: Path, leaves: int, leaf_bytes: int, repeats: int) -> None:
    """Restores our files with both, in turns; keeps seconds and bytes in the record.

    Args:
      record: Gets the figures.
      folder: Where to save.
      leaves: Of the state.
      leaf_bytes: Of each leaf, all devices together.
      repeats: Timed turns, after one that warms up.
    """
    with tempfile.TemporaryDirectory(dir=folder) as target:
        found = _run_job([target, str(leaves), str(leaf_bytes), str(repeats)])
    for figure in found[0]:
        # The job is ready when the slower process is; what each reads is told for the greedier one.
        worst = [max(samples) for samples in zip(*(one[figure] for one in found), strict=True)]
        record.samples[f"processes/{figure}"] = worst
    for place in PLACES:
        stock, ours = (
            record.samples[f"processes/restore_secs/{name}/{place}"] for name in ("stock", "ours")
        )
        record.samples[f"processes/restore_speedup/{place}"] = ratios(stock, ours)


def _run_job(words: list[str]) -> list[dict[str, list[float]]]:
    """Runs this file in every process of a job, and returns what each has found."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.storage.processes", address, str(index), *words],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(PROCESSES)
    ]  # fmt: skip
    try:
        ended = [child.communicate(timeout=LIMIT_SECS) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, ended, strict=True):
        if child.returncode:
            raise RuntimeError(f"restoring in {PROCESSES} processes failed: {errors}")
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


# --- In each process -----------------------------------------------------------------------------


def _found(directory: Path, leaves: int, leaf_bytes: int, repeats: int) -> dict[str, list[float]]:
    """Saves a state, restores it in turns, and returns samples by figure."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    state = _state(NamedSharding(mesh, PLACES["sharded"]), leaves, leaf_bytes)
    with GoCkptManager(directory) as manager:
        manager.save(0, args=GoCkptSave(state))
        manager.wait_until_finished()
        targets = {
            place: _target(state, NamedSharding(mesh, spec)) for place, spec in PLACES.items()
        }
        del state
        give_back()
        readers = {
            "stock": lambda target: _stock_restore(directory / "0" / "state", target),
            "ours": lambda target: manager.restore(0, args=GoCkptRestore(target)),
        }
        samples: dict[str, list[float]] = {}
        for turn in range(1 + repeats):
            for name, read in readers.items():
                for place, target in targets.items():
                    secs, nbytes = _measured(directory, read, target)
                    if turn:
                        of_this = f"{name}/{place}"
                        share = 1 if place == "replicated" else PROCESSES
                        ratio = nbytes * share / (leaves * leaf_bytes)
                        samples.setdefault(f"restore_secs/{of_this}", []).append(secs)
                        samples.setdefault(f"read_bytes_ratio/{of_this}", []).append(ratio)
    return samples


def _state(sharding: NamedSharding, leaves: int, leaf_bytes: int) -> dict[str, jax.Array]:
    rng, shape = np.random.default_rng(0), (leaf_bytes // 4096, 1024)
    values = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
    return {
        f"leaf_{n:04}": jax.make_array_from_callback(shape, sharding, values.__getitem__)
        for n in range(leaves)
    }


def _target(state: dict[str, jax.Array], sharding: NamedSharding) -> Any:
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in state.items()
    }


def _stock_restore(path: Path, target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def _measured(directory: Path, read: Callable[[Any], Any], target: Any) -> tuple[float, int]:
    """Seconds until all processes have it, and what this process has read of files."""
    if not jax.process_index():
        forget(directory)
    multihost_utils.sync_global_devices("forgotten")
    before, start = _bytes_read(), time.perf_counter()
    restored = jax.block_until_ready(read(target))
    nbytes = _bytes_read() - before
    multihost_utils.sync_global_devices("restored")
    secs = time.perf_counter() - start
    del restored
    give_back()
    return secs, nbytes


def _bytes_read() -> int:
    """By system calls of this process, from the page cache or from the disk."""
    words = Path("/proc/self/io").read_text(encoding="utf-8").split()
    return int(words[words.index("rchar:") + 1])


if __name__ == "__main__":
    address, index, where, *numbers = sys.argv[1:]
    jax.distributed.initialize(address, num_processes=PROCESSES, process_id=int(index))
    print(json.dumps(_found(Path(where), *map(int, numbers))))
