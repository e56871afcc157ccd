"""What a save costs the steps around it, and what the trainer's thread waits for: in a minute.

`bench train` measures whole intervals; this, many saves close together, one mode after another, to
tell one way from another, or what one thing that the library does is worth (`EXPERIMENTS`).
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from bench.device import use_device
from bench.garbage import frozen, full_collections
from bench.profiled import profiled
from bench.record import OptionError, Record, refuse_no_folder
from bench.train.figures import predicted_stall_secs
from bench.train.model import SIZES, Job, make_job, one_device_mesh, tiny
from bench.train.modes import Mode, Setting, host_budget_bytes, make_mode, refuse_unknown
from gockpt_jax.transfer import block, layout
from gockpt_jax.transfer.host_memory import is_in_memory

_WARM = 2  # saves that do not count: programs are made and loaded, pinned memory is had
_MODES = "ideal,orbax_async,gockpt_k1,gockpt_k4"
_DEVICE_MEMORY = 0.8
_LEAD, _TAIL = 5, 4  # steps before a save and behind it that a profile has
_LEAST_INTERVAL = 9

NOTES = [
    "MODE/around_save_ms: what the steps from a third of an interval before a save to a third "
    "behind it took over as many medians of the steps between; step_ms: that median. For `ideal`, "
    "which saves nothing, likewise: what is chance. save_call_ms, step_call_ms/in_window, "
    "step_call_ms/behind: the trainer's thread in the call of `save`, of the step in the K - 1 "
    "steps before it, and in the first behind. It waits for each step's loss a step later. "
    "full_collection_ms: in steps in which Python's garbage collector looked at all objects, what "
    "that took. window_steps: K of each save. predicted_stall_ms: what the planner expected of "
    "each save, by its cost model; gockpt is told the time of a step, as the first mode had it.",
    f"Excluded: compilation, the first {_WARM} saves of each mode, and what a save waits for the "
    "one before: that one is waited for two steps before the steps around the next.",
]


@contextlib.contextmanager
def _large_apart() -> Iterator[None]:
    with (
        mock.patch.object(layout, "_FEW_ON", {}),
        mock.patch.object(block, "_made", functools.cache(block.Block)),
    ):
        yield


EXPERIMENTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "apart": _large_apart,
    "frozen": frozen,
}
"""Behind a mode's name and a `+`. apart: large arrays travel one by one, however many they are
(decision 34); frozen: after `gc.freeze()`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    add = parser.add_argument
    add("--size", help="of bench/train/model.py; several, comma-separated; 10m on a CPU, else 800m")
    add(
        "--modes",
        default=_MODES,
        help="of `bench train`, and MODE+EXPERIMENT: apart, frozen",
    )
    add("--interval", type=int, default=20, help="steps between saves (20)")
    add("--saves", type=int, default=4, help="that count (4)")
    add("--host-gib", type=float, help="host memory, where the system does not tell all of it")
    add("--directory", type=Path, help="for checkpoints")
    add("--profile", help="MODE: one save more, as SIZE-MODE.xplane.pb beside --out")


def run(quick: bool, **options: Any) -> Record:
    """Runs the benchmark.

    Args:
      quick: Tiny models, of as many layers as those asked for: a rehearsal.
      **options: As in `add_arguments`; `out`: where the record is written after each mode.
    """
    chosen = argparse.Namespace(**options)
    modes = chosen.modes.split(",")
    sizes = chosen.size.split(",") if chosen.size else []
    _refuse(modes, sizes, chosen)
    use_device(_DEVICE_MEMORY)
    on_cpu = jax.default_backend() == "cpu"
    record = Record("around", notes=[*NOTES])
    scratch_folder = tempfile.TemporaryDirectory(dir=chosen.directory)
    with jax.set_mesh(one_device_mesh()), scratch_folder as scratch:
        place = "memory" if is_in_memory(scratch) else "disk"
        record.notes.append(f"Checkpoints went to {place}.")
        for size in sizes or ["toy" if quick else "10m" if on_cpu else "800m"]:
            of_size = _OfSize(chosen, record, size, Path(scratch, size), quick=quick, on_cpu=on_cpu)
            for name in modes:
                of_size.attempt(name)
            del of_size
            gc.collect()  # the next state has the room
    return record


def _refuse(modes: Sequence[str], sizes: Sequence[str], chosen: argparse.Namespace) -> None:
    """Before anything is measured."""
    refuse_no_folder(chosen.directory)
    if chosen.profile and not (chosen.out and chosen.profile in modes):
        raise OptionError(f"--profile {chosen.profile} needs --out, and to be one of {modes}.")
    for name in modes:
        mode, plus, experiment = name.partition("+")
        refuse_unknown(mode)
        if plus and experiment not in EXPERIMENTS:
            raise OptionError(
                f"there is no experiment {experiment!r}; give one of {[*EXPERIMENTS]}."
            )
    for size in sizes:
        if size not in SIZES:
            raise OptionError(f"there is no size {size!r}; give some of {', '.join(SIZES)}.")
    if chosen.interval < _LEAST_INTERVAL or chosen.saves < 1:
        raise OptionError(
            f"--interval must be at least {_LEAST_INTERVAL}, so that there are steps between those "
            f"around the saves, and --saves at least 1; got {chosen.interval} and {chosen.saves}."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """What one step took, in milliseconds.

    Attributes:
      call: Of the step.
      save: The call of `save`.
      all: With the wait for the loss of the step before.
      collecting: Python's garbage collector, in collections of all objects.
    """

    call: float
    save: float
    all: float
    collecting: float = 0.0


class _OfSize:
    """All modes on one model, one after another."""

    def __init__(
        self, chosen: argparse.Namespace, record: Record, size: str, directory: Path, *,
        quick: bool, on_cpu: bool,
    ):  # fmt: skip
        self._chosen, self._record, self._size = chosen, record, size
        model = tiny(SIZES[size]) if quick else SIZES[size]
        self._job: Job = make_job(model, jnp.float32 if on_cpu else jnp.bfloat16)
        self._state = self._job.init()
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))
        leaves = len(jax.tree.leaves(self._state))
        record.notes.append(f"{size}: {state_bytes / 1e9:.2f} GB of state in {leaves} arrays.")
        self._setting = Setting(
            self._job, chosen.interval, directory, None, state_bytes,
            host_budget_bytes=host_budget_bytes(chosen.host_gib),
        )  # fmt: skip

    def attempt(self, name: str) -> None:
        """Measures a mode; of one that fails it is told, and training starts again without it."""
        try:
            self._measure(name)
        except Exception:
            self._record.tell_failure(f"{self._size}/{name}")
            self._state = None  # its step may have donated it; what it holds must be free
        if self._state is None:
            gc.collect()
            self._state = self._job.init()
        if self._chosen.out:
            self._record.write(self._chosen.out)

    def _measure(self, name: str) -> None:
        """Trains in one mode, through all of its saves."""
        mode_name, _, experiment = name.partition("+")
        gc.collect()  # each begins without what those before have left
        with EXPERIMENTS[experiment]() if experiment else contextlib.nullcontext():
            mode = make_mode(mode_name, self._setting)
            try:
                steps = self._train(name, mode)
                reports = mode.reports()
            finally:
                mode.close()
        usual_ms = self._add(name, steps, {report["step"]: report for report in reports})
        if self._setting.step_secs is None:
            self._setting = dataclasses.replace(self._setting, step_secs=usual_ms / 1e3)
        details = self._record.details.setdefault(f"{self._size}/{name}", {})
        details |= {"steps_ms": [dataclasses.astuple(step) for step in steps], "reports": reports}

    def _train(self, name: str, mode: Mode) -> list[_Step]:
        interval, saves = self._chosen.interval, _WARM + self._chosen.saves
        steps: list[_Step] = []
        before = None
        with contextlib.ExitStack() as profiling, full_collections() as collected:
            watched = saves * interval if name == self._chosen.profile else None
            for n in range((saves - 1 + (watched is not None)) * interval + interval // 2):
                if watched is not None and n == watched - _LEAD:
                    jax.block_until_ready(self._state)
                    profiling.enter_context(profiled(self._profile(name)))
                elif watched is not None and n == watched + _TAIL:
                    jax.block_until_ready(self._state)
                    profiling.close()
                start = time.perf_counter()
                self._state, loss = mode.step(self._state, self._job.batches[n % 16])
                called = time.perf_counter()
                mode.save(n, self._state)
                saved = time.perf_counter()
                if before is not None:
                    before.block_until_ready()
                before, end = loss, time.perf_counter()
                took = (called - start, saved - called, end - start, sum(collected))
                collected.clear()
                steps.append(_Step(*(round(1e3 * secs, 3) for secs in took)))
                if n % interval == interval - interval // 3 - 2:
                    mode.finish()  # and one more step is between, in which the device has work anew
                if n == interval:
                    mode.settle()
        jax.block_until_ready(self._state)
        mode.finish()
        mode.clean()
        return steps

    def _profile(self, name: str) -> Path:
        out: Path = self._chosen.out
        return out.with_name(f"{self._size}-{name}.xplane.pb")

    def _add(
        self, name: str, steps: Sequence[_Step], reports: Mapping[int, Mapping[str, Any]]
    ) -> float:
        """Adds figures; `reports`: gockpt's, of each save. Gives what a step between them takes."""
        interval, label = self._chosen.interval, f"{self._size}/{name}"
        near = interval // 3
        saves = [n * interval for n in range(_WARM, _WARM + self._chosen.saves)]
        around = [steps[at - near : at + near + 1] for at in saves]
        between = [steps[at - interval + near + 1 : at - near - 1] for at in saves]
        usual = statistics.median(step.all for rest in between for step in rest)
        add = self._record.add
        add(f"{label}/step_ms", *(step.all for rest in between for step in rest))
        if collected := [step.collecting for step in steps if step.collecting]:
            add(f"{label}/full_collection_ms", *collected)
        for at, of_save in zip(saves, around, strict=True):
            add(f"{label}/around_save_ms", sum(step.all for step in of_save) - len(of_save) * usual)
            add(f"{label}/save_call_ms", steps[at].save)
            add(f"{label}/step_call_ms/behind", steps[at + 1].call)
            report = reports.get(at, {"window_steps": 1, "reason": ""})
            if at in reports:
                add(f"{label}/window_steps", report["window_steps"])
            if (k := report["window_steps"]) > 1:
                add(
                    f"{label}/step_call_ms/in_window", *(s.call for s in steps[at - k + 2 : at + 1])
                )
            if (predicted := predicted_stall_secs(report["reason"])) is not None:
                add(f"{label}/predicted_stall_ms", 1e3 * predicted)
        return usual
