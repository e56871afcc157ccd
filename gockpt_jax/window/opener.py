"""When a window opens, and with which plan."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax

from gockpt_jax.checks import counted
from gockpt_jax.compiling import debugged_by
from gockpt_jax.options import WindowOptions
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.traced import TracedStep
from gockpt_jax.window.agreement import Agreement
from gockpt_jax.window.audit import Auditor
from gockpt_jax.window.current import CurrentWindow
from gockpt_jax.window.open_window import OpenWindow
from gockpt_jax.window.planned import Planned
from gockpt_jax.window.planner import Planner
from gockpt_jax.window.predict import SavePredictor
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.resources import Resources

_log = logging.getLogger("gockpt_jax")

_ADJACENT = "the step before it was saved too, and a window takes two steps at least"
_CHANGED = (
    "the step had last been called in another way than it was traced for, or what it returned had "
    "been changed"
)
_DEBUGGED = "`{}` is on: JAX would check what an armed step retains, too, or not compile the step"


@dataclasses.dataclass(slots=True)
class _Deferral:
    """The last window that has found no room, so far.

    Attributes:
      target: The version of its save; -1: there has been none.
      why: What stood against it when it was tried first.
      steps: How often it was tried in vain.
    """

    target: int = -1
    why: str = ""
    steps: int = 0


class Opener:
    """Opens a window if a save is predicted as many steps ahead as it takes.

    Args:
      options: The user's.
      processes: Those that open windows together.
      predictor: Of saves.
      planner: Of windows.
      resources: What windows take.
      current: Is told of the window that opens.
    """

    def __init__(
        self, options: WindowOptions, processes: Processes, predictor: SavePredictor,
        planner: Planner, resources: Resources, current: CurrentWindow,
    ):  # fmt: skip
        self._options = options
        self._processes = processes
        self._predictor = predictor
        self._planner = planner
        self._resources = resources
        self._current = current
        self._agreement = Agreement(options, processes)
        self._auditor = Auditor(options.audit, resources)
        self._deferral = _Deferral()
        self._tried_for = -1  # the last save whose window was due: what came of it has been told

    def open(self, step: TracedStep, args: Any, kwargs: Any, version: int) -> None:
        """Opens a window, if it is time; if not, `current.why_none` tells why.

        Args:
          step: A step that has run.
          args: Positional arguments of the call that is to begin it.
          kwargs: Keyword arguments of it.
          version: Of the state.

        Raises:
          ProcessError: as `Agreement.held` says.
        """
        with step.giving_up_on_errors(), self._agreement.held(step):
            self._current.open(self._found(step, args, kwargs, version))

    def _found(
        self, step: TracedStep, args: Any, kwargs: Any, version: int
    ) -> OpenWindow | str | None:
        """The window; or why it does not open; `None` if no save is near."""
        target = self._save_ahead(step, version)
        if not isinstance(target, int):
            return target
        step.turn_to(args, kwargs)
        self._prepare(step)  # it may be another than above, or be armed only under these settings
        program = step.program
        if program is None:
            return step.why_no_program
        steps = target - version + 1
        planned = self._planner.planned(program)
        if planned is not None:
            planned = planned.within(steps, self._options, self._resources.device.limit_bytes)
            if planned.plan.steps < steps:
                is_told = planned.plan.steps == 1 and self._tried_for != target
                return planned.plan.reason if is_told else None
        leaves = None if planned is None else program.state_in(step.last)
        if planned is None or leaves is None:  # nor has a plan been made for such a call
            self._tried_for = target
            step.call_changed(last=True)
            return _CHANGED
        why_not = self._agreement.why_not_ready(program, target)
        if why_not is None and self._planner.heed_cut_shardings(step, program, leaves):
            return self._found(step, args, kwargs, version)
        self._tried_for = target
        return why_not or self._opened(program, planned, target, leaves)

    def _save_ahead(self, step: TracedStep, version: int) -> int | str | None:
        """The version of the save for which one may open; or why none does; `None` if none is near.

        It is looked for two steps ahead at least: a plan whose K is 1 then tells the save why.
        """
        setting = debugged_by()
        if setting is None:
            self._prepare(step)
        target = self._predictor.next_save(version, max(2, self._options.most_steps) - 1)
        if target is None or version <= self._current.sealed_version:
            return _ADJACENT if target == version + 1 else None
        if self._current.leaves_out(target):
            return None
        return target if setting is None else _DEBUGGED.format(setting)

    def _opened(
        self, program: StepProgram, planned: Planned, target: int, leaves: Sequence[jax.Array]
    ) -> OpenWindow | str:
        """The window, given up where only other processes' hosts may have room for it."""
        no_room = self._resources.host.why_no_room(*planned.host_bytes)
        if no_room is not None:
            self._planner.was_refused(program)
            if not self._processes.several:
                return self._defer(target, no_room)
        window = OpenWindow(
            program, planned, target, self._planner.ahead.departures(program, planned, leaves),
            replayer=Replayer.of(leaves, self._options.replay_threads), auditor=self._auditor,
            resources=self._resources,
        )  # fmt: skip
        self._resources.measure_from_now(window.record)
        if no_room is not None:
            window.give_up(no_room)
        if deferred_steps := self.deferred_steps(target):
            window.record.deferred_steps = deferred_steps
            often = counted(deferred_steps, "time")
            window.record.reason += f"; put off {often}, for {self._deferral.why}"
        return window

    def _prepare(self, step: TracedStep) -> None:
        """Plans for a step that has run, and settles with the others whether it can be armed."""
        self._agreement.settle(step, planned=self._planner.prepare(step))

    def why_not_follow(self, window: OpenWindow, step: TracedStep) -> str | None:
        """Why a window does not go on with this step, if another has opened it; `None` if so."""
        program = step.program
        if (setting := debugged_by()) is not None:
            return _DEBUGGED.format(setting)
        if program is None:
            return step.why_no_program
        if program is window.program:
            return None
        if program.cut != window.program.cut:
            return "the step is cut in another way than the one that it began with"
        with step.giving_up_on_errors(), self._agreement.held(step):
            self._prepare(step)
        if not program.is_armed:
            return "the step has not been armed"
        return self._agreement.why_not_ready(program, window.target)

    @property
    def demotions(self) -> list[str]:
        """Why which leaves leave late that were planned early: an audit has failed."""
        return self._auditor.demotions

    def deferred_steps(self, target: int) -> int:
        """For how many steps the window of this version's save has found no room."""
        return self._deferral.steps if self._deferral.target == target else 0

    def _defer(self, target: int, why: str) -> str:
        """The next step tries again, with a smaller K."""
        if self._deferral.target != target:
            self._deferral = _Deferral(target, why)
            _log.info("the window for version %d does not open yet: %s", target, why)
        self._deferral.steps += 1
        return why
