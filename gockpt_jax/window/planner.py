"""The plan of each step's windows: made once per program, and anew when what it rests on moves."""

import dataclasses
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from gockpt_jax.errors import ReplayError
from gockpt_jax.options import WindowOptions
from gockpt_jax.replay.contraction import cpu_contracts
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.step_cut import StepCut
from gockpt_jax.training.traced import TracedStep
from gockpt_jax.transfer.chunks import Chunk
from gockpt_jax.transfer.sample import compile_samples_ahead
from gockpt_jax.window.choice import why_one_copy
from gockpt_jax.window.departure import Departure
from gockpt_jax.window.facts import Facts, SavedBytes
from gockpt_jax.window.known import Known
from gockpt_jax.window.late import late_blocks, late_chunks
from gockpt_jax.window.plan import (
    Plan,
    StateBytes,
    measure_bytes,
    plan_window,
    warn_of_late,
)
from gockpt_jax.window.planned import Planned
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.units import replay_specs

_log = logging.getLogger("gockpt_jax")

_CONTRACTS = (
    "on this CPU backend XLA contracts multiply-adds, each program in its own way, so replay would "
    "not be exact; set `XLA_FLAGS=--xla_cpu_max_isa=AVX` (x86) before JAX starts, or accept "
    "rounding with `audit=gockpt_jax.Audit(max_relative_error=...)`"
)
_NONE_SAVED = "no leaf that the last saves took may leave early"
_NONE_OURS = (
    "the last saves took no array that the wrapped step before them had returned: copies are "
    "others, as arrays of NumPy are, and so is another step's state; give `save` the state itself, "
    "behind its own step"
)


class Planner:
    """Plans for programs.

    Args:
      options: The user's.
      known: What they rest on.
      resources: What windows take.
    """

    def __init__(self, options: WindowOptions, known: Known, resources: Resources):
        self._options = options
        self._known = known
        self._replicas = resources.replicas
        self._device = resources.device
        self._has_warned = False
        # Those whose plans have been looked at since the last save.
        self._reviewed: weakref.WeakSet[StepProgram] = weakref.WeakSet()
        self._plans: weakref.WeakKeyDictionary[StepProgram, Planned] = weakref.WeakKeyDictionary()
        self._ready: weakref.WeakSet[StepProgram] = weakref.WeakSet()  # is compiled, or being so
        self._timed: weakref.WeakSet[StepProgram] = weakref.WeakSet()  # whose plans rest on time
        # Sets of leaves for whose samples all is compiled, or being so.
        self._sampled: weakref.WeakKeyDictionary[StepProgram, set[frozenset[int]]] = (
            weakref.WeakKeyDictionary()
        )

    def prepare(self, step: TracedStep) -> bool:
        """Plans for a new program, long before its first window: arming it takes long.

        And once after each save for one that has a plan, if what was measured has moved.

        Args:
          step: A step that has run.

        Returns:
          Whether a plan was made, at the same call on all processes; this one may have found that
          it cannot arm the step.
        """
        self._device.measure(stepped=True)
        program = step.program
        if program is None:
            return False
        if self._is_ready(program):
            return program not in self._reviewed and self._review(step, program)
        leaves = program.returned.leaves(step.last.new_state)
        if leaves is None:  # another program's: the step that returns ours comes, or is traced anew
            return False
        # It has one if making it ready was interrupted: all processes make a plan at the same call.
        if program not in self._plans:
            self._known.has_program(step, program, leaves)
            self._plan(program, leaves)
        self._settle(step, program, leaves)
        return True

    def _settle(self, step: TracedStep, program: StepProgram, leaves: Sequence[jax.Array]) -> None:
        """Accepts a plan, or one that allows for rounding, and makes it ready."""
        if self._finds_no_room(self._plans[program]) and not self._options.must_be_exact:
            exact = program

            def is_worth_it(rounded: StepProgram) -> bool:
                self._known.is_rounded(exact, rounded)
                return self._plan(rounded, leaves).plan.steps > 1

            step.accept_rounding(is_worth_it)
            if step.program is None:
                return
            program = step.program
        planned = self._plans[program]
        _log.debug("planned %s", planned.plan)
        if not (self._has_warned or self._fits_as_one_copy(planned)):
            self._has_warned = warn_of_late(planned.size)
        self._make_ready(step, program, leaves)
        self._reviewed.add(program)
        self._ready.add(program)

    def _finds_no_room(self, planned: Planned) -> bool:
        """Whether saves are snapshots for want of a window, and not because one copy fits."""
        return planned.plan.steps == 1 and not self._fits_as_one_copy(planned)

    def _fits_as_one_copy(self, planned: Planned) -> bool:
        return why_one_copy(planned.size.staged, self._device.limit_bytes) is not None

    def _is_ready(self, program: StepProgram) -> bool:
        """Whether all has been done for its plan, which may have come under other settings."""
        if program not in self._ready:
            return False
        return program.is_armed or self._plans[program].plan.steps == 1

    def _plan(
        self, program: StepProgram, leaves: Sequence[jax.Array], facts: Facts | None = None
    ) -> Planned:
        num_devices = len({d for a in leaves for d in a.sharding.addressable_devices})
        if facts is None:
            to_host = SavedBytes.of(leaves, self._replicas).to_host
            facts = self._known.facts(program, to_host, num_devices)
        size = measure_bytes(program.cut, leaves, self._replicas, facts.unsaved, facts.beside)
        sent = [a for a, num_bytes in zip(leaves, size.leaves, strict=True) if num_bytes]
        state_bytes = sum(map(self._replicas.owned_bytes_at_most, sent))
        if not program.cut.groups:
            plan = Plan((), _why_all_late(program.cut, size))
        elif facts.unsaved and not size.units:
            plan = Plan((), _NONE_OURS if len(facts.unsaved) == len(leaves) else _NONE_SAVED)
        else:
            plan = plan_window(size, self._options, self._device.limit_bytes, facts)
        if self._is_chosen(size) and self._options.step_secs is None:
            self._timed.add(program)
        budget_bytes = self._device.limit_bytes
        self._plans[program] = Planned(
            program.cut, plan, size, state_bytes, num_devices, facts, budget_bytes,
            self._known.beside(program).owned,
        )  # fmt: skip
        return self._plans[program]

    def _is_chosen(self, size: StateBytes) -> bool:
        """Whether there is a choice: of K, or between a window and none."""
        fits = why_one_copy(size.staged, self._device.limit_bytes) is not None
        return self._options.steps is None and bool(size.units) and not fits

    def was_refused(self, program: StepProgram) -> None:
        """Told of each window for which this process's host had no room when it was to open."""
        self._known.was_refused(program)

    def ask_for_review(self) -> None:
        """More may be known than when the plans were made; looked at before the next window."""
        self._reviewed.clear()

    def _review(self, step: TracedStep, program: StepProgram) -> bool:
        """Makes the plan anew if what it was made for has moved: the armed step stays."""
        self._reviewed.add(program)
        planned = self._plans[program]
        if self._options.steps is not None or not program.cut.groups:
            return False
        facts = self._known.facts(program, planned.size.to_host, planned.num_devices)
        has_less = self._device.limit_bytes != planned.budget_bytes  # it had no room for a save
        if not (has_less or planned.is_outdated_by(facts)):
            return False
        leaves = program.returned.leaves(step.last.new_state)
        if leaves is None:  # another program's, as above: after the next save
            return False
        plan = self._plan(program, leaves, facts).plan
        is_same = plan.blocks == planned.plan.blocks and facts.unsaved == planned.facts.unsaved
        if is_same and not has_less:
            self._plans[program] = self._plans[program].as_ready_as(planned)
            return False
        level = logging.WARNING if plan.reason == _NONE_OURS else logging.INFO
        _log.log(level, "the plan was made anew: K=%d (%s)", plan.steps, plan.reason)
        self._settle(step, program, leaves)
        return True

    def _make_ready(
        self, step: TracedStep, program: StepProgram, leaves: Sequence[jax.Array]
    ) -> None:
        """Compiles ahead what the program's plan needs."""
        planned = self._plans[program]
        if planned.plan.steps == 1:
            self._compile_rest(planned, leaves)
            return
        try:
            replayer = self.replayer(leaves)
        except ReplayError as error:
            step.give_up(str(error))
            return
        if replayer.shares_backend and self._options.must_be_exact and cpu_contracts():
            step.give_up(_CONTRACTS)
            return
        step.arm()
        if not program.is_armed:  # nor can it be now, but by a call of its own
            return
        self.departures(program, planned, leaves)
        specs = replay_specs(planned.cut, planned.size.units)
        replayer.compile_ahead(specs, planned.plan.steps - 1)

    def departures(
        self, program: StepProgram, planned: Planned, leaves: Sequence[jax.Array]
    ) -> list[Departure]:
        """Those of a plan; all that its windows stage is compiled from now on.

        If it is a shorter one than was made ready, the trainer waits for what is staged first, and
        for nothing else.
        """
        was_ready = planned.is_ready
        found = planned.departures(leaves)
        if not was_ready:
            self._compile_rest(planned, leaves)
            self._compile_samples(program, planned, leaves)
        return found

    def has_saved(self, step: TracedStep) -> None:
        """Told of each save, after `Known`: the host needs room for what it took beside the state.

        And its items are sampled each by itself.
        """
        program = step.program
        planned = None if program is None else self._plans.get(program)
        if program is None or planned is None:
            return
        beside_bytes = self._known.beside(program).owned
        self._plans[program] = planned = dataclasses.replace(planned, beside_bytes=beside_bytes)
        if not planned.is_ready:
            return
        if (leaves := program.returned.leaves(step.last.new_state)) is not None:
            with step.giving_up_on_errors():
                self._compile_samples(program, planned, leaves)

    def _compile_samples(
        self, program: StepProgram, planned: Planned, leaves: Sequence[jax.Array]
    ) -> None:
        """What the audit will copy of each item; before the first save there is one, of all."""
        audit = self._options.audit
        if audit is None or any(leaf.is_deleted() for leaf in leaves):
            return
        early, seen = frozenset(planned.early_leaves()), self._sampled.setdefault(program, set())
        for item in self._known.items(program) or (early,):
            if (sampled := early & item) not in seen:
                seen.add(sampled)
                arrays, limit_bytes = [leaves[j] for j in sorted(sampled)], self._device.limit_bytes
                compile_samples_ahead(arrays, audit.fraction, self._replicas, limit_bytes)

    def _compile_rest(self, planned: Planned, leaves: Sequence[jax.Array]) -> None:
        """What is staged at the sealed version: late leaves, and rows of early ones."""
        early, sent = planned.early_leaves(), planned.size.leaves
        late = [a for j, a in enumerate(leaves) if j not in early and sent[j]]
        self._compile_late(late, planned.rows_behind(leaves))

    def prepare_snapshot(self, leaves: Sequence[Any]) -> None:
        """Compiles ahead what a save stages that nobody has foreseen, such as the first.

        Args:
          leaves: Of the state that the first step is given. As a rule it returns them with the same
            placements, and its own compilation takes long enough for this one.
        """
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            self._compile_late(leaves)

    def _compile_late(
        self, leaves: Sequence[jax.Array], rows: Sequence[tuple[int, Chunk]] = ()
    ) -> None:
        limit_bytes = self._device.limit_bytes
        for chunks in (late_chunks(leaves, limit_bytes, self._replicas), rows):
            for _, block in late_blocks(chunks, limit_bytes):
                block.compile_ahead()

    def replayer(self, leaves: Sequence[jax.Array]) -> Replayer:
        """Replays for a run whose state has these leaves.

        Raises:
          ReplayError: if there is no CPU backend.
        """
        # Not `devices()`: another wrapped step may have run last, and these are donated.
        device: Any = next(iter(leaves[0].sharding.device_set))
        return Replayer(device.platform, self._options.replay_threads)

    def planned(self, program: StepProgram) -> Planned | None:
        """What `prepare` has planned for it; it may have met another program's results alone."""
        return self._plans.get(program)

    def rests_on_time(self, program: StepProgram | None) -> bool:
        """Whether a step's plan rests on the time that it takes, and nobody has said that."""
        return program in self._timed

    def explain(self, step: TracedStep) -> str:
        """What the saves of a step's state are planned to be and why, and its cut, as text."""
        planned = None if step.program is None else self.planned(step.program)
        if planned is None:
            return step.explain()
        plan = planned.plan
        kind = "snapshots" if plan.steps == 1 else f"windows of {plan.steps} steps"
        return f"foreseen saves are {kind}: {plan.reason}\n{step.explain()}"


def _why_all_late(cut: StepCut, size: StateBytes) -> str:
    largest = max(cut.late, key=lambda j: size.leaves[j])
    path, why = cut.paths[largest], cut.late[largest]
    return f"no leaf may leave early (`explain()` tells of each): {path}: {why}"
