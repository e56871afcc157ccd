"""What checkpointing costs a training run: gockpt_jax beside stock Orbax and a device copy.

One process, one state, modes that take turns: each trains for an interval or a few, saves on the
way, and the next mode goes on from there. So drift of the machine meets them all.
"""

import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.record import Record

_LEAST_ROUNDS = 2  # rather fewer modes than fewer rounds than this


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    add = parser.add_argument
    add("--size", help="a size of bench/train_model.py; what fits if left out")
    add("--modes", help="comma-separated; gockpt_k<K> for any K; all if left out")
    add("--intervals", help="steps between saves, comma-separated; 10 on a CPU, else 50")
    add("--rounds", type=int, help="phases of each mode; 5, or 3 if quick")
    add("--minutes", type=float, help="stop in time; modes at the end of the list are left out")
    add("--link-gb-per-sec", type=float, help="CPU only: 0 for none; a transfer of 3 steps")
    add("--device-budget-fraction", type=float, help="of the state's bytes, for gockpt")
    add("--host-gib", type=float, help="host memory, where the system does not tell all of it")
    add("--directory", type=Path, help="for checkpoints; disk or memory, what suits, if left out")
    add("--alone", action="store_true", help="one saving mode only: its growth of host memory")


def run(quick: bool, **options: Any) -> Record:
    """Runs the benchmark.

    Args:
      quick: A tiny model, few steps, no more than a minute.
      **options: As in `add_arguments`; `out`: where the record is written after each round.
    """
    _prepare_environment()
    import jax

    from bench.train_model import AXIS

    mesh = jax.make_mesh(
        (1,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    with jax.set_mesh(mesh):
        return _Bench(quick, argparse.Namespace(**options)).run()


def _prepare_environment() -> None:
    """Must come before JAX starts its backends."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        # JAX takes 75% by default; a training run takes what there is.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    elif "xla_cpu_max_isa" not in os.environ.get("XLA_FLAGS", ""):
        # The CPU stands in for an accelerator, which has no fused multiply-add in elementwise code.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"
        os.environ["XLA_FLAGS"] = flags.strip()


@dataclasses.dataclass
class _Clock:
    """How much time is left.

    Attributes:
      until: `time.perf_counter()` at the end; infinite without a limit.
    """

    until: float

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.perf_counter()


class _Bench:
    """One run of the benchmark."""

    def __init__(self, quick: bool, options: argparse.Namespace):
        import jax

        from bench import train_modes

        self.options = options
        self.on_cpu = jax.default_backend() == "cpu"
        modes = options.modes.split(",") if options.modes else list(train_modes.DEFAULT)
        self.modes = [m for m in modes if m != "ideal"]
        if quick and not options.modes:
            self.modes = ["gockpt", "orbax_async", "device_copy", "gockpt_k4"]
        default = "10" if self.on_cpu else "50"
        self.intervals = [int(i) for i in (options.intervals or default).split(",")]
        self.rounds = options.rounds or (3 if quick else 5)
        self.size_name = options.size or ("3m" if quick else "10m" if self.on_cpu else "")
        secs = options.minutes * 60 if options.minutes else float("inf")
        self.clock = _Clock(time.perf_counter() + secs)
        self.record = Record("train")
        self.failures: dict[str, str] = {}
        self.phases: list[dict[str, Any]] = []
        self.record.details = {"phases": self.phases, "failures": self.failures}

    def run(self) -> Record:
        """All intervals."""
        import jax.numpy as jnp

        from bench.train_figures import NOTES
        from bench.train_model import SIZES, make_job

        self.record.notes += NOTES
        with self._directory() as directory:
            size = SIZES[self.size_name]
            if self.on_cpu:
                size = dataclasses.replace(
                    size, batch=min(size.batch, 4), length=min(size.length, 64)
                )
            self.job = make_job(size, jnp.float32 if self.on_cpu else jnp.bfloat16)
            self.state = self.job.init()
            self.state_bytes = _bytes(self.state)
            self._say_what_is_trained(size)
            for interval in self.intervals:
                _Interval(self, interval, directory / str(interval)).run()
        return self.record

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Path]:
        """Chooses size and place; what was written is deleted at the end."""
        from bench import train_place

        probe_bytes = 2**24 if self.on_cpu else 2**30
        found = train_place.places(self.options.directory, probe_bytes=probe_bytes)
        place = found[0]
        if not self.size_name:
            host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            self.size_name, place, why = train_place.choose(
                found,
                saves=_saves_per_phase(min(self.intervals)),
                host_bytes=max(host_bytes, int((self.options.host_gib or 0) * 2**30)),
                secs=min(self.clock.left, 3600.0),
                phases=4 * (1 + _LEAST_ROUNDS),
            )
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

    def _say_what_is_trained(self, size: Any) -> None:
        self.record.notes.insert(
            0,
            f"GPT {self.size_name}: {size.parameters / 1e6:.1f} M parameters, "
            f"{self.state_bytes / 1e9:.2f} GB of fp32 state with AdamW, "
            f"{'fp32' if self.on_cpu else 'bf16'} compute, {size.batch} x {size.length} bytes of "
            "the Python standard library per step, rematerialised, donated, one device.",
        )

    def save_so_far(self) -> None:
        """Whatever comes next, what was measured stays."""
        if getattr(self.options, "out", None):
            self.record.write(self.options.out)


class _Interval:
    """All modes at one interval between saves."""

    def __init__(self, bench: _Bench, interval: int, directory: Path):
        from bench.train_phases import Loop

        self.bench, self.record, self.clock = bench, bench.record, bench.clock
        self.interval = interval
        self.directory = directory
        self.steps = interval * _saves_per_phase(interval)
        self.lead = min(interval - 1, 12)  # the largest K, and two calls to foresee the save
        self.loop = Loop(bench.state, bench.job.batches, interval=interval, lead=self.lead)
        self.modes: dict[str, Any] = {}
        self.last_secs: dict[str, float] = {}

    def run(self) -> None:
        """Warms up, then takes turns until all rounds are done or the time is over."""
        from bench.train_link import slow_pulls
        from bench.train_modes import Setting, make_mode

        setting = Setting(self.bench.job, self.interval, self.directory, None, None, 0)
        self.modes["ideal"] = make_mode("ideal", setting)
        self.loop.run("ideal", self.modes["ideal"], 3)  # compiles
        undisturbed = self.loop.run("ideal", self.modes["ideal"], self.lead + 3)
        self.step_secs = undisturbed.wall_secs / undisturbed.steps
        setting = self._setting()
        try:
            with slow_pulls(setting.link):
                self._warm_up_all(setting)
                if not self.bench.options.alone:
                    self._rounds()
                for mode in self.modes.values():
                    with contextlib.suppress(Exception):
                        mode.close()
        finally:
            self.bench.state = self.loop.state
            self.bench.save_so_far()

    def _setting(self) -> Any:
        from bench.train_link import Link
        from bench.train_modes import Setting

        options, state_bytes = self.bench.options, self.bench.state_bytes
        link = None
        if self.bench.on_cpu and options.link_gb_per_sec != 0:
            chosen = options.link_gb_per_sec
            link = Link(chosen * 1e9 if chosen else state_bytes / (3 * self.step_secs))
            self.record.notes.append(
                f"Interval {self.interval}: the link was slowed to {link.bytes_per_sec / 1e9:.3f} "
                f"GB/s, for all modes alike: the state takes "
                f"{state_bytes / link.bytes_per_sec / self.step_secs:.1f} steps. Background "
                "transfers of stock would wait in Orbax's thread, where the throttle is not: that "
                "mode is left out."
            )
            self.bench.modes = [m for m in self.bench.modes if m != "orbax_async_background"]
        fraction = options.device_budget_fraction
        budget = int(state_bytes * fraction) if fraction else None
        if budget:
            self.record.notes.append(
                f"gockpt: a device budget of {fraction:.3f} of the state, {budget} bytes."
            )
        return Setting(
            self.bench.job, self.interval, self.directory, link, budget, state_bytes
        )

    def _warm_up_all(self, setting: Any) -> None:
        from bench.train_figures import add_host_memory
        from bench.train_modes import make_mode
        from bench.train_phases import resident_bytes, system_bytes

        longest = 0.0
        for name in self.bench.modes:
            rounds_secs = _LEAST_ROUNDS * (len(self.modes) + 1) * max(longest, 1.0)
            if longest and self.clock.left < rounds_secs + 2 * longest:
                self.record.notes.append(f"{name}: left out, the time does not suffice.")
                continue
            before = (resident_bytes(), system_bytes())

            def warm(name: str = name) -> Any:
                self.modes[name] = make_mode(name, setting)
                return self._warm_up(name)

            phase = self._attempt(name, warm)
            if phase is None:
                continue
            if self.bench.options.alone:
                add_host_memory(
                    self.record, phase, interval=self.interval,
                    state_bytes=self.bench.state_bytes, before=before,
                )  # fmt: skip
            longest = max(longest, phase.drain_secs + self.step_secs * self.steps)

    def _warm_up(self, name: str) -> Any:
        """A phase that does not count; again while a window could not open yet."""
        for _ in range(3):
            phase = self._phase(name, self.lead + 3)
            reasons = [report["reason"] for report in phase.reports]
            if not any("compiling" in reason or "traced" in reason for reason in reasons):
                break
        return phase

    def _rounds(self) -> None:
        done = 0
        for number in range(self.bench.rounds):
            names = [name for name in self.modes if name != "ideal"]
            turn = number % max(1, len(names))
            ideal = self._attempt("ideal", lambda: self._phase("ideal", self.steps))
            if ideal is None:
                raise RuntimeError(self.bench.failures["ideal"])
            phases = {}
            for name in names[turn:] + names[:turn]:
                if self.last_secs[name] * 1.2 > self.clock.left:
                    continue
                phase = self._attempt(name, lambda name=name: self._phase(name, self.steps))
                if phase is not None:
                    phases[name] = phase
            self._add(ideal, phases)
            done += bool(phases)
            self.bench.save_so_far()
            if max(self.last_secs.values()) * 2 > self.clock.left:
                break
        if done < 5:
            self.record.notes.append(f"Interval {self.interval}: medians of {done} rounds only.")

    def _phase(self, name: str, steps: int) -> Any:
        start = time.perf_counter()
        phase = self.loop.run(name, self.modes[name], steps)
        self.modes[name].clean()
        self.last_secs[name] = time.perf_counter() - start
        return phase

    def _attempt(self, name: str, run: Any) -> Any:
        """Runs a phase; a mode that fails is dropped, and training starts again without it."""
        try:
            return run()
        except Exception:
            self.bench.failures[f"{name}/{self.interval}"] = traceback.format_exc()
            print(f"{name} failed: {sys.exc_info()[1]!r}"[:500], file=sys.stderr)
            self.record.notes.append(f"{name}: failed, see the record's `failures`.")
        mode = self.modes.pop(name, None)
        with contextlib.suppress(Exception):
            mode.close()
        self.loop.state = None  # its step may have donated it
        self.loop.state = self.bench.job.init()
        return None

    def _add(self, ideal: Any, phases: dict[str, Any]) -> None:
        from bench.train_figures import add_phase

        common = {"interval": self.interval, "ideal": ideal, "state_bytes": self.bench.state_bytes}
        stock = phases.pop("orbax_async", None)
        inflation = None
        for phase in [ideal, *([stock] if stock else []), *phases.values()]:
            found = add_phase(self.record, phase, async_inflation=inflation, **common)
            if phase is stock:
                inflation = found
            self.bench.phases.append({"interval": self.interval, **phase.as_json()})


def _saves_per_phase(interval: int) -> int:
    """Short intervals have several saves, so that one meets the next."""
    return max(1, min(3, 30 // interval))


def _bytes(tree: Any) -> int:
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
