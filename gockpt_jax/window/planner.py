"""The plan of each step's windows: made once per program, and anew when what it rests on moves."""

import dataclasses
import logging
import weakref
from collections.abc import Sequence

import jax

from gockpt_jax.options import WindowOptions
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.step_cut import StepCut
from gockpt_jax.training.traced import TracedStep
from gockpt_jax.window.ahead import Ahead
from gockpt_jax.window.choice import why_one_copy
from gockpt_jax.window.facts import Facts, SavedBytes
from gockpt_jax.window.known import Known
from gockpt_jax.window.plan import Plan, StateBytes, measure_bytes, plan_window, warn_of_late
from gockpt_jax.window.planned import Planned
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.units import Shardings

_log = logging.getLogger("gockpt_jax")

_TOLD_BY = " (`explain()` tells of each)"
_NONE_SAVED = "no leaf that the last saves took may leave early"
_NONE_OURS = (
    "the last saves took no array that the wrapped step before them had returned: copies are "
    "others, as arrays of NumPy are, and so is another step's state; give `save` the state itself, "
    "behind its own step"
)


@dataclasses.dataclass(slots=True)
class _Prepared:
    """What has been done for a program.

    Attributes:
      planned: Its plan.
      rests_on_time: Whether a plan of it has rested on the time of a step, which nobody has said.
      review: Of those asked for, the last that it has had; `None`: it has not been made ready yet.
      cut_shardings: Where the armed step returns its cut, if it takes more there than was foreseen.
      has_seen_cut: Whether it has been looked at where that is.
    """

    planned: Planned
    rests_on_time: bool = False
    review: int | None = None
    cut_shardings: Shardings = None
    has_seen_cut: bool = False

    def is_ready(self, program: StepProgram) -> bool:
        """Whether all has been done for its plan, which may have come under other settings."""
        return self.review is not None and (program.is_armed or self.planned.plan.steps == 1)


class Planner:
    """Plans for programs.

    Args:
      options: The user's.
      known: What they rest on.
      resources: What windows take.

    Attributes:
      ahead: Makes programs ready for what is planned.
    """

    def __init__(self, options: WindowOptions, known: Known, resources: Resources):
        self._options = options
        self._known = known
        self.ahead = Ahead(options, known, resources)
        self._replicas, self._device = resources.replicas, resources.device
        self._has_warned = False
        self._reviews = 0  # that were asked for
        self._prepared: weakref.WeakKeyDictionary[StepProgram, _Prepared] = (
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
        prepared = self._prepared.get(program)
        if prepared is not None and prepared.is_ready(program):
            return prepared.review != self._reviews and self._review(step, program, prepared)
        leaves = program.state_in(step.last)
        if leaves is None:  # another program's: the step that returns ours comes, or is traced anew
            return False
        # It has one if making it ready was interrupted: all processes make a plan at the same call.
        if prepared is None:
            self._known.has_program(step, program, leaves)
            self._plan(program, leaves)
        self._accept(step, program, leaves)
        return True

    def _accept(self, step: TracedStep, program: StepProgram, leaves: Sequence[jax.Array]) -> None:
        """Accepts a plan, or one that allows for rounding, and makes it ready."""
        planned = self._prepared[program].planned
        finds_no_room = planned.plan.steps == 1 and not self._fits_as_one_copy(planned.size)
        if finds_no_room and not self._options.must_be_exact:
            exact = program

            def is_worth_it(rounded: StepProgram) -> bool:
                self._known.was_rounded(exact, rounded)
                return self._plan(rounded, leaves).plan.steps > 1

            step.accept_rounding(is_worth_it)
            if step.program is None:
                return
            program = step.program
        prepared = self._prepared[program]
        _log.debug("planned %s", prepared.planned.plan)
        if not (self._has_warned or self._fits_as_one_copy(prepared.planned.size)):
            self._has_warned = warn_of_late(prepared.planned.size)
        self.ahead.make_ready(step, program, prepared.planned, leaves)
        prepared.review = self._reviews

    def _fits_as_one_copy(self, size: StateBytes) -> bool:
        return why_one_copy(size.staged, self._device.limit_bytes) is not None

    def _plan(
        self, program: StepProgram, leaves: Sequence[jax.Array], facts: Facts | None = None
    ) -> Planned:
        num_devices = len({d for a in leaves for d in a.sharding.addressable_devices})
        if facts is None:
            to_host = SavedBytes.of(leaves, self._replicas).to_host
            facts = self._known.facts(program, to_host, num_devices)
        prepared = self._prepared.get(program)
        cut_shardings = None if prepared is None else prepared.cut_shardings
        size = measure_bytes(program.cut, leaves, self._replicas, facts, cut_shardings)
        budget_bytes = self._device.limit_bytes
        if not program.cut.groups:
            plan = Plan((), _why_all_late(program.cut, size))
        elif facts.unsaved and not size.units:
            plan = Plan((), _NONE_OURS if len(facts.unsaved) == len(leaves) else _NONE_SAVED)
        else:
            plan = plan_window(size, self._options, budget_bytes, facts)
        planned = Planned(program.cut, plan, size, num_devices, facts, budget_bytes)
        prepared = prepared or _Prepared(planned)
        # Where there is a choice, of K, or between a window and none, by a time that is not said.
        is_choice = bool(size.units) and not self._fits_as_one_copy(size)
        is_said = self._options.steps is not None or self._options.step_secs is not None
        prepared.rests_on_time |= is_choice and not is_said
        prepared.planned = planned
        self._prepared[program] = prepared
        return planned

    def heed_cut_shardings(
        self, step: TracedStep, program: StepProgram, leaves: Sequence[jax.Array]
    ) -> bool:
        """Makes the plan anew if the compiler has put the cut where it takes more of a device.

        Gradients that the user has on all devices, of moments that are sharded, for example.

        Args:
          step: The step.
          program: Its program, armed and compiled on all processes: all ask at the same call.
          leaves: Of its state.

        Returns:
          Whether it was.
        """
        prepared = self._prepared[program]
        if prepared.has_seen_cut:
            return False
        cut_shardings, foreseen = program.cut_shardings, prepared.planned
        prepared.has_seen_cut = True
        size = measure_bytes(program.cut, leaves, self._replicas, foreseen.facts, cut_shardings)
        if not size.takes_more_than(foreseen.size):
            return False
        prepared.cut_shardings = cut_shardings
        again = self._plan(program, leaves, foreseen.facts)
        _log.info("what a step retains lies otherwise than foreseen: %s", again.plan.reason)
        self._accept(step, program, leaves)
        return True

    def was_refused(self, program: StepProgram) -> None:
        """Told of each window for which this process's host had no room when it was to open."""
        self._known.was_refused(program)

    def ask_for_review(self) -> None:
        """More may be known than when the plans were made; looked at before the next window."""
        self._reviews += 1

    def _review(self, step: TracedStep, program: StepProgram, prepared: _Prepared) -> bool:
        """Makes the plan anew if what it was made for has moved: the armed step stays."""
        prepared.review = self._reviews
        planned = prepared.planned
        is_fixed = self._options.steps is not None
        # A fixed K waits for the other processes where its windows open, and for nothing else.
        if not program.cut.groups or (is_fixed and not self._known.is_alone):
            return False
        facts = self._known.facts(program, planned.size.to_host, planned.num_devices)
        if is_fixed:  # all that ends its windows
            is_outdated = facts.unsaved != planned.facts.unsaved
        else:
            is_outdated = planned.is_outdated_by(facts, self._device.limit_bytes)
        if not is_outdated:
            return False
        leaves = program.state_in(step.last)
        if leaves is None:  # another program's, as above: after the next save
            return False
        again = self._plan(program, leaves, facts)
        needs = planned.plan.blocks, planned.facts.unsaved, planned.budget_bytes
        if needs == (again.plan.blocks, facts.unsaved, again.budget_bytes):
            prepared.planned = again.with_departures_of(planned)
            return False
        level = logging.WARNING if again.plan.reason == _NONE_OURS else logging.INFO
        _log.log(level, "the plan was made anew: K=%d (%s)", again.plan.steps, again.plan.reason)
        self._accept(step, program, leaves)
        return True

    def has_saved(self, step: TracedStep) -> None:
        """Told of each save, after `Known`: its items are sampled each by itself."""
        program = step.program
        planned = self.planned(program)
        if program is None or planned is None or not planned.has_departures:
            return
        if (leaves := program.state_in(step.last)) is not None:
            with step.giving_up_on_errors():
                self.ahead.compile_samples(program, planned, leaves)

    def planned(self, program: StepProgram | None) -> Planned | None:
        """What `prepare` has planned for it; it may have met another program's results alone."""
        if program is None or (prepared := self._prepared.get(program)) is None:
            return None
        beside_bytes = self._known.saves(program).beside.owned  # as of the last saves
        return dataclasses.replace(prepared.planned, beside_bytes=beside_bytes)

    def rests_on_time(self, program: StepProgram | None) -> bool:
        """Whether a step's plan rests on the time that it takes, and nobody has said that."""
        prepared = None if program is None else self._prepared.get(program)
        return prepared is not None and prepared.rests_on_time

    def why_never(self, step: TracedStep) -> str | None:
        """Why no save of a step's state can be a window, if announced or not; `None` if one can."""
        if step.why_not is not None:
            return step.why_not
        planned = self.planned(step.program)
        return None if planned is None or planned.cut.groups else planned.plan.reason

    def explain(self, step: TracedStep) -> str:
        """What the saves of a step's state are planned to be and why, and its cut, as text."""
        planned = self.planned(step.program)
        if planned is None:
            return step.explain()
        plan = planned.plan
        kind = "snapshots" if plan.steps == 1 else f"windows of {plan.steps} steps"
        reason = plan.reason.replace(_TOLD_BY, "")  # what follows is that
        return f"foreseen saves are {kind}: {reason}\n{step.explain()}"


def _why_all_late(cut: StepCut, size: StateBytes) -> str:
    largest = max(cut.late, key=lambda j: size.leaves[j])
    path, why = cut.paths[largest], cut.late[largest]
    return f"no leaf may leave early{_TOLD_BY}: {path}: {why}"
