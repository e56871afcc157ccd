"""Which model fits this machine, and where its checkpoints go."""

import concurrent.futures
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.record import MEMORY, MEMORY_VARIABLE
from bench.train.model import SIZES
from gockpt_jax.transfer.host_memory import is_in_memory

_FAST_BYTES_PER_SEC = 1.5e9  # below this a memory file system is preferred, if it has room
_ACTIVATION_BYTES = 6 * 10**9  # of the large sizes, with rematerialisation; generous
_STATES_ON_DEVICE = 3.4  # old, new and saved state of the step that does not donate; gradients
_STATES_ON_HOST = 4.2  # pinned copies that no mode gives back, what Orbax compresses, gradients
_STATES_ON_DISK = 1.1  # for each save of a phase: Orbax deletes the old one after the new
_PART_FOR_PHASES = 0.6  # of the time; the rest is for compilation and warm-up
_FLOPS = 3e14  # of an accelerator in training; an H100 does about 4e14 of bf16
LADDER = ("4.2b", "2.8b", "2b", "1.7b", "1.2b", "800m", "300m", "100m", "10m")


@dataclasses.dataclass(frozen=True)
class Place:
    """A directory for checkpoints.

    Attributes:
      path: Where.
      free_bytes: How much fits.
      bytes_per_sec: Of four files written and synchronised at once.
      in_memory: Whether what is written takes the host's memory.
    """

    path: Path
    free_bytes: int
    bytes_per_sec: float
    in_memory: bool


def places(directory: Path | None, *, probe_bytes: int) -> list[Place]:
    """Where checkpoints could go: what was asked for, or the temporary directory and memory.

    Args:
      directory: What was asked for.
      probe_bytes: To write for the bandwidth.
    """
    memory = Path(os.environ.get(MEMORY_VARIABLE, MEMORY))
    candidates = [directory] if directory else [Path(tempfile.gettempdir()), memory]
    found = []
    for path in candidates:
        if path.is_dir() and os.access(path, os.W_OK):
            rate = _write_rate(path, probe_bytes)
            found.append(Place(path, shutil.disk_usage(path).free, rate, is_in_memory(path)))
    return found


def choose(
    found: list[Place], *, device_bytes: int, saves: int, interval: int, host_bytes: int,
    secs: float, phases: int, sizes: Sequence[str] = LADDER,
) -> tuple[str, Place, str]:  # fmt: skip
    """The largest model that fits, and where its checkpoints go.

    Args:
      found: Places.
      device_bytes: That the device's allocator has.
      saves: Per phase.
      interval: Steps between them.
      host_bytes: Memory of this machine.
      secs: For the whole benchmark.
      phases: Phases with a save that shall fit.
      sizes: Names in `SIZES`, of which the last is taken if none fits.

    Returns:
      Its name in `SIZES`, the place, and what would have been too large, and why, in words.
    """
    refused: list[str] = []
    for name in sizes:
        state = SIZES[name].state_bytes
        if _STATES_ON_DEVICE * state + _ACTIVATION_BYTES > device_bytes and name != sizes[-1]:
            refused.append(f"{name}: device memory of {device_bytes / 1e9:.0f} GB")
            continue
        for place in sorted(found, key=_preference):
            why = _too_small(place, state, saves, host_bytes)
            step_secs = SIZES[name].flops / _FLOPS
            why = why or _too_slow(place, state, saves * phases, interval * step_secs, secs)
            if why is None:
                return name, place, "; ".join(refused) or "nothing larger is known"
            refused.append(f"{name} at {'memory' if place.in_memory else 'disk'}: {why}")
    return sizes[-1], found[0], "; ".join(refused)


def _preference(place: Place) -> int:
    """A fast disk, then memory, then a slow disk."""
    if place.in_memory:
        return 1
    return 0 if place.bytes_per_sec >= _FAST_BYTES_PER_SEC else 2


def _too_small(place: Place, state: int, saves: int, host_bytes: int) -> str | None:
    on_disk = _STATES_ON_DISK * state * min(saves, 2)
    on_host = _STATES_ON_HOST * state + (on_disk if place.in_memory else 0)
    if on_disk > place.free_bytes:
        return f"{place.free_bytes / 1e9:.0f} GB are free"
    if on_host > host_bytes:
        return f"host memory of {host_bytes / 1e9:.0f} GB"
    return None


def _too_slow(
    place: Place, state: int, saves: int, interval_secs: float, secs: float
) -> str | None:
    """Training goes on while a save is written; the next phase begins when both are done."""
    saving_secs = saves * max(state / place.bytes_per_sec, interval_secs)
    if saving_secs <= _PART_FOR_PHASES * secs:
        return None
    rate = f"{place.bytes_per_sec / 1e9:.2f} GB/s and {interval_secs:.0f} s of steps each"
    return f"{saves} saves at {rate} take too long"


def _write_rate(path: Path, num_bytes: int) -> float:
    """Bytes per second of four files, written and synchronised at once."""
    block = os.urandom(num_bytes // 16)

    def write(file: Path) -> None:
        with file.open("wb", buffering=0) as out:
            for _ in range(4):
                out.write(block)
            os.fsync(out.fileno())

    with tempfile.TemporaryDirectory(dir=path) as scratch:
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(write, [Path(scratch, str(n)) for n in range(4)]))
        return len(block) * 16 / (time.perf_counter() - start)
