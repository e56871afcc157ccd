"""The phases of one interval between saves: warm-up, then rounds in which all modes take turns."""

import argparse
import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.profiled import profiled
from bench.record import Record, resident_bytes
from bench.train.figures import add_host_memory, add_phase
from bench.train.link import Link, slow_pulls
from bench.train.model import Job
from bench.train.modes import Mode, Setting, host_budget_bytes, make_mode
from bench.train.phases import Loop, Phase, system_bytes

_UNSETTLED = ("compiling", "traced", "not known yet", "keep within")
"""In reasons of saves that a longer run would have seen once, in its beginning."""
_LEAST_ROUNDS = 2  # rather fewer modes than fewer rounds than this; but one round of all modes
_FEW_MINUTES = 5.0  # in fewer than these, or if the modes were asked for by name
CORE_PHASES = 4 * (1 + _LEAST_ROUNDS)
"""Phases with saves of the four modes that matter most, warm-up included."""


@dataclasses.dataclass
class Shared:
    """What all intervals of a run share.

    Attributes:
      options: The user's.
      record: Takes figures, phases and failures.
      until: `time.perf_counter()` at the end of the time; infinite without a limit.
      job: What is trained.
      state: Of the training.
      state_bytes: Its bytes.
      modes: To measure, the most valuable first, without `ideal`.
      rounds: Phases of each.
      on_cpu: Whether there is no accelerator.
    """

    options: argparse.Namespace
    record: Record
    until: float
    job: Job
    state: Any
    state_bytes: int
    modes: list[str]
    rounds: int
    on_cpu: bool

    @property
    def left_secs(self) -> float:
        """Until the end of the time."""
        return self.until - time.perf_counter()

    def save_so_far(self) -> None:
        """Whatever comes next, what was measured stays."""
        if self.options.out:
            self.record.write(self.options.out)


class Interval:
    """All modes at one interval between saves.

    Args:
      shared: What all intervals share.
      interval: Steps between saves.
      directory: For the checkpoints of all modes.
    """

    def __init__(self, shared: Shared, interval: int, directory: Path):
        self.shared, self.record = shared, shared.record
        self.interval = interval
        self.directory = directory
        self.steps = interval * saves_per_phase(interval)
        self.lead = min(interval - 1, 12)  # the largest K, and two calls to foresee the save
        # Steps of an undisturbed phase are all alike: where time is short, a few will do.
        self.ideal_steps = min(self.steps, 15) if shared.options.minutes else self.steps
        self.loop = Loop(shared.state, shared.job, interval=interval, lead=self.lead)
        self.modes: dict[str, Mode] = {}
        self.expected_secs: dict[str, float] = {}  # of a phase of each mode

    def run(self) -> None:
        """Warms up, then takes turns until all rounds are done or the time is over."""
        setting = Setting(self.shared.job, self.interval, self.directory, None, 0)
        self.modes["ideal"] = make_mode("ideal", setting)
        self.loop.run("ideal", self.modes["ideal"], 3)  # compiles
        undisturbed = self.loop.run("ideal", self.modes["ideal"], self.lead + 3)
        self.step_secs = undisturbed.wall_secs / undisturbed.steps
        self.expected_secs["ideal"] = self.step_secs * self.ideal_steps
        setting = self._setting()
        try:
            with slow_pulls(setting.link):
                self._warm_up_all(setting)
                self._tell_of_no_profile()
                if not self.shared.options.alone:
                    self._rounds()
                for mode in self.modes.values():
                    with contextlib.suppress(Exception):
                        mode.close()
        finally:
            self.shared.state = self.loop.state
            self.shared.save_so_far()

    def _setting(self) -> Setting:
        options, state_bytes = self.shared.options, self.shared.state_bytes
        link = None
        if self.shared.on_cpu:
            link = Link(state_bytes / (options.link_steps * self.step_secs))
            self.record.notes.append(
                f"Interval {self.interval}: the link was slowed to {link.bytes_per_sec / 1e9:.3f} "
                f"GB/s, for all modes alike: the state takes {options.link_steps:.1f} steps. "
                "Background transfers of stock would wait in Orbax's thread, where the throttle is "
                "not: that mode is left out."
            )
            self.shared.modes = [m for m in self.shared.modes if m != "orbax_async_background"]
        fraction = options.device_budget_fraction
        budget = int(state_bytes * fraction) if fraction else None
        if budget:
            self.record.notes.append(
                f"gockpt: a device budget of {fraction:.3f} of the state, {budget} bytes."
            )
        return Setting(
            self.shared.job, self.interval, self.directory, link, state_bytes, budget,
            host_budget_bytes(options.host_gib), self.step_secs,
        )  # fmt: skip

    def _warm_up_all(self, setting: Any) -> None:
        for name in self.shared.modes:
            if not self._has_time_for_another():
                self.record.notes.append(f"{name}: left out, the time does not suffice.")
                continue
            before = (resident_bytes(), system_bytes())

            def warm(name: str = name) -> Phase:
                self.modes[name] = make_mode(name, setting)
                return self._warm_up(name)

            phase = self._attempt(name, warm)
            if phase is not None and self.shared.options.alone:
                add_host_memory(
                    self.record, phase, interval=self.interval,
                    state_bytes=self.shared.state_bytes, before=before,
                )  # fmt: skip
                self.shared.save_so_far()

    def _has_time_for_another(self) -> bool:
        """Whether one more mode leaves time for rounds; it may be as slow as the slowest so far."""
        saving = [secs for name, secs in self.expected_secs.items() if name != "ideal"]
        longest = max(saving, default=0.0)
        options = self.shared.options
        one = options.modes or (options.minutes or _FEW_MINUTES) < _FEW_MINUTES
        rounds = 1 if one else _LEAST_ROUNDS
        rounds_secs = rounds * (sum(self.expected_secs.values()) + longest)
        return not saving or rounds_secs + 2 * longest <= self.shared.left_secs

    def _warm_up(self, name: str) -> Phase:
        """A phase that does not count; again while it had in it what there is once only.

        The plan or its programs in the making; or it stalled for longer than it trained, as for
        pinned memory.
        """
        for number in range(3):
            with self._profiled(name, number):
                phase = self._phase(name, self.lead + 3)
            self.modes[name].settle()
            reasons = [report["reason"] for report in phase.reports]
            is_settled = not any(word in reason for reason in reasons for word in _UNSETTLED)
            stall_secs = max(0.0, phase.wall_secs - self.step_secs * phase.steps)
            is_usual = number > 0 or stall_secs < self.step_secs * phase.steps
            is_usual = is_usual and not (self._is_watched(name) and number == 0)
            if (is_settled and is_usual) or self.shared.left_secs < self.expected_secs[name]:
                break
        self._keep(phase, "warm_up")
        # Training waits for a stall, and goes on while a save is written.
        saves = saves_per_phase(self.interval)
        training_secs = self.step_secs * self.steps + saves * stall_secs
        self.expected_secs[name] = max(training_secs, phase.wall_secs + saves * phase.drain_secs)
        return phase

    @contextlib.contextmanager
    def _profiled(self, name: str, number: int) -> Iterator[None]:
        """Has JAX's profiler watch a mode's second phase, if that was asked for."""
        if number != 1 or not self._is_watched(name):
            yield
            return
        kept = self.shared.options.out.with_name(f"{name}.xplane.pb")
        with profiled(kept):
            yield
        self.record.notes.append(f"{name}: a phase of its warm-up is in {kept.name}.")

    def _tell_of_no_profile(self) -> None:
        watched = self.shared.options.profile
        if watched and not any(f"{watched}.xplane.pb" in note for note in self.record.notes):
            self.record.notes.append(f"{watched}: no profile, the time did not suffice.")

    def _is_watched(self, name: str) -> bool:
        return self.shared.options.profile == name

    def _rounds(self) -> None:
        done = 0
        before = self._undisturbed()
        for number in range(self.shared.rounds):
            names = [name for name in self.modes if name != "ideal"]
            turn = number % max(1, len(names))
            phases = {}
            for name in filter(self._has_time_for, names[turn:] + names[:turn]):
                phase = self._attempt(name, lambda name=name: self._phase(name, self.steps))
                if phase is not None:
                    phases[name] = phase
                    self._keep(phase)
            after = self._undisturbed()
            self._add(before, after, phases)
            before = after
            done += bool(phases)
            self.shared.save_so_far()
            if not any(map(self._has_time_for, self.modes.keys() - {"ideal"})):
                break
        if done < 5:
            self.record.notes.append(f"Interval {self.interval}: medians of {done} rounds only.")

    def _has_time_for(self, name: str) -> bool:
        """Whether a phase of this mode, and the undisturbed one that follows, end in time."""
        secs = self.expected_secs[name] * 1.2 + self.expected_secs["ideal"]
        return secs <= self.shared.left_secs

    def _undisturbed(self) -> Phase:
        """A phase of `ideal`; there is one on either side of each round, against drift within."""
        phase = self._attempt("ideal", lambda: self._phase("ideal", self.ideal_steps))
        if phase is None:
            raise RuntimeError(self.record.details["failures"][f"ideal/{self.interval}"])
        self._keep(phase)
        return phase

    def _keep(self, phase: Phase, where: str = "phases") -> None:
        """Its raw samples, at once: a round has figures at its end only."""
        kept = self.record.details.setdefault(where, [])
        kept.append({"interval": self.interval, **phase.as_json()})
        self.shared.save_so_far()

    def _phase(self, name: str, steps: int) -> Phase:
        start = time.perf_counter()
        phase = self.loop.run(name, self.modes[name], steps)
        self.modes[name].clean()
        self.expected_secs[name] = time.perf_counter() - start
        return phase

    def _attempt(self, name: str, run: Callable[[], Phase]) -> Phase | None:
        """Runs a phase; a mode that fails is dropped, and training starts again without it."""
        try:
            return run()
        except Exception:
            self.record.tell_failure(f"{name}/{self.interval}")
        mode = self.modes.pop(name, None)
        self.expected_secs.pop(name, None)
        with contextlib.suppress(Exception):
            mode.close()
        self.loop.state = mode = None  # its step may have donated it; what it holds must be free
        gc.collect()
        self.loop.state = self.shared.job.init()
        return None

    def _add(self, before: Phase, after: Phase, phases: dict[str, Phase]) -> None:
        common = {
            "interval": self.interval, "ideal": before.plus(after),
            "state_bytes": self.shared.state_bytes,
        }  # fmt: skip
        add_phase(self.record, after, async_inflation=None, **common)  # against both: the drift
        stock = phases.pop("orbax_async", None)
        inflation = None
        for phase in [*([stock] if stock else []), *phases.values()]:
            found = add_phase(self.record, phase, async_inflation=inflation, **common)
            if phase is stock:
                inflation = found


def saves_per_phase(interval: int) -> int:
    """Short intervals have two saves, so that one meets the next.

    Example:
      >>> saves_per_phase(10), saves_per_phase(50)
      (2, 1)
    """
    return 2 if interval <= 15 else 1
