"""What checkpointing costs a training run: gockpt_jax beside stock Orbax and a device copy.

One process, one state, modes that take turns: each trains for an interval or a few, saves on the
way, and the next mode goes on from there. So drift of the machine meets them all.
"""

import argparse
import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.device import DEVICE_MEMORY, use_device
from bench.record import OptionError, Record, machine_bytes, refuse_no_folder
from bench.train.cores import device_cores
from bench.train.figures import NOTES
from bench.train.model import SIZES, make_job, one_device_mesh, tiny
from bench.train.modes import DEFAULT, refuse_unknown
from bench.train.phases import device_bytes
from bench.train.place import LADDER, choose, places
from bench.train.rounds import CORE_PHASES, Interval, Shared, saves_per_phase
from bench.train.table import TrainRecord

_OWN_CORES = (
    "No accelerator: training has {} cores to itself, as a device; all else that any mode does "
    "runs on the other {}, but for gockpt's replay, which on this backend takes the device's."
)
_SHARED_CORES = "No accelerator: training and all that any mode does share the cores."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    add = parser.add_argument
    add("--size", help="a size of bench/train/model.py; what fits if left out")
    add("--modes", help="comma-separated; gockpt_k<K> for any K; all if left out")
    add("--intervals", help="steps between saves, comma-separated; 10 on a CPU, else 50")
    add("--rounds", type=int, help="phases of each mode; 5, or 3 if quick")
    add("--minutes", type=float, help="stop in time; modes at the end of the list are left out")
    add("--link-steps", type=float, default=3.0, help="CPU only: steps that the state takes (3)")
    add("--device-budget-fraction", type=float, help="of the state's bytes, for gockpt")
    add("--host-gib", type=float, help="host memory, where the system does not tell all of it")
    add("--directory", type=Path, help="for checkpoints; disk or memory, what suits, if left out")
    add("--alone", action="store_true", help="one saving mode only: its growth of host memory")
    add("--profile", help="of this mode's warm-up, as MODE.xplane.pb beside --out")


def run(quick: bool, **options: Any) -> Record:
    """Runs the benchmark.

    Args:
      quick: A small model, few steps: a minute or two; of a size that is asked for, a tiny one with
        as many layers.
      **options: As in `add_arguments`; `out`: where the record is written after each round.
    """
    with _device() as note, jax.set_mesh(one_device_mesh()):
        bench = _Bench(quick, argparse.Namespace(**options))
        bench.record.notes += [note] if note else []
        return bench.run()


@contextlib.contextmanager
def _device() -> Iterator[str]:
    """Must come before JAX starts its backends; yields what a reader must know of the device."""
    if use_device(DEVICE_MEMORY):
        yield ""
        return
    with device_cores() as apart:
        yield _SHARED_CORES if apart is None else _OWN_CORES.format(*map(len, apart))


def _intervals(text: str) -> list[int]:
    """Steps between saves, of comma-separated numbers."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise OptionError(f"--intervals takes whole numbers above 0, as in 10,50; got {text!r}.")
    return [int(word) for word in words]


class _Bench:
    """One run of the benchmark."""

    def __init__(self, quick: bool, options: argparse.Namespace):
        self.options = options
        self.on_cpu = jax.default_backend() == "cpu"
        modes = options.modes.split(",") if options.modes else list(DEFAULT)
        for mode in modes:
            refuse_unknown(mode)
        self.modes = [m for m in modes if m != "ideal"]
        if quick and not options.modes:
            self.modes = ["gockpt", "orbax_async", "device_copy", "gockpt_k4"]
        default = "10" if self.on_cpu else "50"
        self.intervals = _intervals(options.intervals or default)
        self.rounds = options.rounds or (3 if quick else 5)
        if options.size and options.size not in SIZES:
            raise OptionError(f"there is no size {options.size!r}; give one of {', '.join(SIZES)}.")
        refuse_no_folder(options.directory)
        if options.alone and (len(self.modes) > 1 or len(self.intervals) > 1):
            raise OptionError(
                "--alone takes one way to save, at one interval: a process never gives back what "
                f"it has grown by; got {', '.join(self.modes)} at {self.intervals}."
            )
        watched = options.profile
        if watched and not options.out:
            raise OptionError(f"--profile {watched} needs --out: the profile is left beside it.")
        if watched and watched not in self.modes:
            raise OptionError(
                f"--profile {watched}: it is none of the ways to save that are measured: "
                f"{', '.join(self.modes)}."
            )
        self.is_tiny = quick and bool(options.size)
        self.size_name = options.size or ("3m" if quick else "10m" if self.on_cpu else "")
        minutes = float("inf") if options.minutes is None else options.minutes
        if not minutes > 0:
            raise OptionError(
                f"--minutes takes a number above 0, got {minutes:g}; without it there is no limit."
            )
        self.until = time.perf_counter() + minutes * 60
        self.record = TrainRecord("train", details={"failures": {}, "phases": []})

    def run(self) -> Record:
        """All intervals."""
        self.record.notes += NOTES
        with self._directory() as directory:
            shared = self._start()
            for n, interval in enumerate(self.intervals):
                # Longer phases get more of what is left.
                steps = [saves_per_phase(i) * i for i in self.intervals[n:]]
                now = time.perf_counter()
                shared.until = now + (self.until - now) * steps[0] / sum(steps)
                Interval(shared, interval, directory / str(interval)).run()
        return self.record

    def _start(self) -> Shared:
        """Makes the job and its first state."""
        size = tiny(SIZES[self.size_name]) if self.is_tiny else SIZES[self.size_name]
        if self.on_cpu:
            size = dataclasses.replace(size, batch=min(size.batch, 4), length=min(size.length, 64))
        job = make_job(size, jnp.float32 if self.on_cpu else jnp.bfloat16)
        state = job.init()
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self.record.details["size"] = self.size_name
        self.record.samples["state_gb"] = [state_bytes / 1e9]
        self.record.notes.insert(
            0,
            f"GPT {self.size_name}: {size.parameters / 1e6:.1f} M parameters, "
            f"{state_bytes / 1e9:.2f} GB of fp32 state with AdamW, "
            f"{'fp32' if self.on_cpu else 'bf16'} compute, {size.batch} x {size.length} bytes of "
            "the Python standard library per step, rematerialised, donated, one device.",
        )
        return Shared(
            self.options, self.record, self.until, job, state, state_bytes, self.modes,
            self.rounds, self.on_cpu,
        )  # fmt: skip

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Path]:
        """Chooses size and place; what was written is deleted at the end."""
        probe_bytes = 2**24 if self.on_cpu else 2**30
        found = places(self.options.directory, probe_bytes=probe_bytes)
        place = found[0]
        if not self.on_cpu:
            asked = self.size_name
            self.size_name, place, why = choose(
                found,
                device_bytes=device_bytes("bytes_limit"),
                saves=saves_per_phase(min(self.intervals)),
                interval=min(self.intervals),
                host_bytes=max(machine_bytes(), int((self.options.host_gib or 0) * 2**30)),
                secs=float("inf") if asked else min(self.until - time.perf_counter(), 3600.0),
                phases=CORE_PHASES,
                sizes=(asked,) if asked else LADDER,
            )
            if not asked:
                self.record.notes.append(f"Size {self.size_name} was chosen; larger ones: {why}.")
        self.record.notes.append(
            f"Checkpoints went to {'memory' if place.in_memory else 'disk'}, which took "
            f"{place.bytes_per_sec / 1e9:.2f} GB/s of four synchronised files at once."
        )
        path = Path(tempfile.mkdtemp(prefix="bench-train-", dir=place.path))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
