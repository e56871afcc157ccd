"""The life of windows, on the trainer's thread.

A window of K steps that ends at save step V:

    version  V-K+1           V-K+2           ...  V-1             V
    trainer  open, stage 1   stage 2         ...  stage K-1       save: stage the late leaves, seal
    device        armed step, cut  armed step, cut  ...  armed step, cut
    worker        land 1, cut      land 2, cut      ...  land cut        land late
    replayer           update           update      ...      update      finish early

Each `stage` copies a block on the device and starts its pull before the next step is dispatched;
the pull of a step's cut is started right behind the step. The worker lands them in that order and
gives device memory back; it waits for the replayer only where the host has no room.

Beside other processes a window is open everywhere or nowhere: all run the same executables.

Other threads may ask and wait as the trainer's does, and a signal handler may interrupt any line of
it. A step that was interrupted is the end of its window: nobody can tell whether the loop goes on
from its result or from its arguments.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gockpt_jax.options import WindowOptions
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.training.armed import ArmedResult
from gockpt_jax.training.wrapped import ArmedCall, WrappedStep
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.advice import (
    NOT_OURS,
    NOT_WRAPPED,
    of_beside,
    of_demoted,
    tell_of_no_step,
)
from gockpt_jax.window.current import CurrentWindow
from gockpt_jax.window.known import Known
from gockpt_jax.window.late import compile_late_ahead
from gockpt_jax.window.open_window import OpenWindow
from gockpt_jax.window.opener import Opener
from gockpt_jax.window.planner import Planner
from gockpt_jax.window.predict import SavePredictor
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.ran import RanSteps
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.seal import Seal, Taken
from gockpt_jax.window.slots import give_back

_log = logging.getLogger("gockpt_jax")


class Session:
    """Counts updates, opens windows for predicted saves, and seals them.

    Args:
      options: The user's.
      processes: Those that save together.
      replicas: How they share what is taken and written.

    Attributes:
      options: The user's.
      version: Updates made so far.
      has_wrapped: Whether the user has wrapped a step, to call it.
      processes: Those that save together.
      resources: What windows and saves take, `host` among it.
      predictor: Of saves.
      known: What their plans rest on.
      planner: Of windows.
      between_steps: Called on the trainer's thread before each update; may raise.
      after_steps: Called there when one has been given to the device.
      lock: Held by whoever steps, or begins a save, from its beginning to its end. In a running
        event loop Orbax takes the state on a thread of its own, while the caller's waits with it.
    """

    def __init__(self, options: WindowOptions, processes: Processes, replicas: Replicas):
        self.options = options
        self.version = 0
        self.has_wrapped = False
        self.processes = processes
        self.resources = resources = Resources.of(options, processes, replicas)
        self.host = resources.host
        self.predictor = SavePredictor(is_alone=not processes.several)
        self.between_steps: Callable[[], None] = lambda: None
        self.after_steps: Callable[[], None] = lambda: None
        self.lock = threading.RLock()
        self._changing = threading.RLock()  # held by whoever changes what is below; after `lock`
        self._trainer: int | None = None  # the thread that steps
        self._current = CurrentWindow(options, processes)
        self._steps = RanSteps()
        self._saves_unwrapped = 0  # before a wrapped step has run
        self._num_beside = 0  # arrays of the last save, beside the state
        self.known = Known(options, processes, resources, self._steps.probe)
        self.planner = Planner(options, self.known, resources)
        self._opener = Opener(
            options, processes, self.predictor, self.planner, resources, self._current
        )
        self._seal: Seal | None = None  # of the save whose items are being taken
        self._has_asked = False  # the other processes, for that save
        self._is_closed = False

    # What the wrapped step tells.

    def before_update(self, step: WrappedStep, args: Any, kwargs: Any) -> ArmedCall | None:
        """Stages what leaves at this version.

        Returns:
          The call if the update must return its cut, `None` if not.

        Raises:
          ReplayError: if a window failed since the last call. Nothing has been dispatched, the
            state is alive, and the next call goes on.
        """
        with self.lock:
            self._trainer = threading.get_ident()
            self.end_save()
            self.surface_failure()
            with self._changing:
                self._current.abandon_interrupted()
        self.between_steps()  # may wait for another thread that begins a save, and needs the lock
        with self.lock, self._changing:
            return self._begin_update(step, args, kwargs)

    def _begin_update(self, step: WrappedStep, args: Any, kwargs: Any) -> ArmedCall | None:
        if self._is_closed:  # no save will come that could be planned for
            return None
        start = time.perf_counter()
        current = self._current
        if current.window is None and self.planner.rests_on_time(step.program):
            self.known.clock.tick(self.version)
        if current.window is not None and current.window.target <= self.version:
            current.abandon("the predicted save did not come")
            current.why_none = None  # that one is past
            self.predictor.abandoned()
        self._follow_or_open(step, args, kwargs)
        window, program = current.window, step.program
        if window is None or program is None:
            return None
        try:
            flat = program.flat_call(args, kwargs)
            old = program.same_state(flat)
        except TypeError as error:  # the call itself, unarmed, is for the user's step to judge
            current.abandon_in_vain(f"the call changed: {error}", self.version)
            step.call_changed(str(error))
            return None
        window.program = program
        window.stepping = threading.get_ident()
        try:
            self._stage(window, old)
        except BaseException as error:  # an interrupt: it may have waited for room
            self.no_update(f"the step was interrupted by {error!r}")
            raise
        window.record.stall_secs += time.perf_counter() - start
        return None if current.window is None else ArmedCall(program, flat)

    def _follow_or_open(self, step: WrappedStep, args: Any, kwargs: Any) -> None:
        """Goes on with the open window; gives it up, if this step is another, for the shortest."""
        current = self._current
        current.take_up_again(self.version)
        if current.window is None:
            self._open(step, args, kwargs)
            return
        step.turn_to(args, kwargs)
        why_not = self._opener.why_not_follow(current.window, step)
        if why_not is None:
            return
        is_last_chance = current.window.target == self.version + 1
        current.abandon_in_vain(f"it cannot go on: {why_not}", self.version)
        if is_last_chance:  # where steps take turns, each would end what the one before has opened
            why_none = current.why_none
            self._open(step, args, kwargs)
            current.why_none = why_none  # whatever kept the new one from opening

    def _open(self, step: WrappedStep, args: Any, kwargs: Any) -> None:
        """Opens a window, if it is time; before the first step, compiles what a save stages."""
        if not step.last.has_come:
            leaves = step.state_leaves(args, kwargs)
            with step.giving_up_on_errors():
                # The step returns them as they lie, as a rule, and takes longer to compile.
                if all(isinstance(leaf, jax.Array) for leaf in leaves):
                    compile_late_ahead(leaves, self.resources)
            return
        self.require_alike()
        self._opener.open(step, args, kwargs, self.version)

    def _stage(self, window: OpenWindow, old: list[Any]) -> None:
        """Stages what leaves, and makes room for what the armed step will return."""
        self.known.clock.pause(self.version)
        with self._current.giving_up_on_errors("staging failed"):  # no device memory, as a rule
            window.leave(self.version, old)
        if self._current.window is not None:
            with self._current.giving_up_on_errors("no room was made for the step"):
                window.make_room()

    def no_update(self, reason: str) -> None:
        """The armed step did not run, or not to its end. The window is over."""
        with self.lock, self._changing:
            if self._current.in_my_step is not None:
                self._current.abandon_in_vain(reason, self.version)

    def no_room(self, error: BaseException) -> None:
        """A device had no room for the armed step. The window is over, and what it held is free."""
        why = str(error).partition("\n")[0]
        _log.warning("a window was given up, training is not affected: %s", why)
        with self.lock, self._changing:
            window = self._current.in_my_step
            if window is not None:
                window.had_no_room(error)
                self._current.abandon("a device had no room for its step")
                self._current.had_no_room(window.target)
        # For copies that are on their way to the host; their replay takes nothing of a device.
        self.resources.worker.wait_until_idle(behind=False)

    def after_update(self, step: WrappedStep, armed: ArmedResult | None) -> None:
        """Counts the update and sends its cut after what has left."""
        with self.lock, self._changing:
            self.version += 1
            self._steps.ran(step, self.version)
            window = self._current.in_my_step
            if window is not None and armed is not None:
                start = time.perf_counter()
                with self._current.giving_up_on_errors("its cut could not be pulled"):
                    window.follow(armed.state, armed.cut)
                window.record.stall_secs += time.perf_counter() - start
                window.stepping = None
        self.after_steps()

    # The ends of a window but its save.

    def abandon(self, reason: str) -> None:
        """Closes the open window without a checkpoint; earlier ones are untouched."""
        with self._changing:
            self._current.abandon(reason)

    def surface_failure(self) -> None:
        """Raises what went wrong in a window since the last call, but beside other processes.

        Raises:
          ReplayError: from the original error.
        """
        if self._current.has_failed:
            with self.lock, self._changing:
                self._current.give_up_if_failed()
        self._current.raise_failure()

    # Saving.

    def begin_save(self) -> None:
        """Ends the open window, if there is one: in the save that begins, or without it.

        Beside other processes before anything that can fail here alone: they ask each other.
        """
        with self._changing:
            if self._seal is None:
                self._seal = self._new_seal()
                self._current.sealed()  # not before: an interrupt would leave it to nobody

    def take(self, arrays: Sequence[jax.Array]) -> Taken:
        """Takes one item's arrays at the save step, as `Seal.take` says.

        Raises:
          HostBudgetError: if the user's host budget cannot hold the save even alone.
          ReplayError: beside other processes, if this save's window has failed here.
        """
        taken: Taken | None = None
        try:
            with self._changing:
                self.begin_save()
                assert self._seal is not None
                taken = self._seal.take(arrays)
            return taken
        except BaseException:  # an interrupt, as the lock was let go
            if taken is not None:
                give_back([slot for slots in taken.slots for slot in slots], self.host)
            raise

    def require_alike(self) -> None:
        """Before the first question that the options lead to, at a step or a save.

        Raises:
          ProcessError: if the processes were given different ones.
        """
        if self.processes.several:
            self.processes.require_alike(self.options.of_the_job)

    def _new_seal(self) -> Seal:
        self.require_alike()
        # Before what can fail here alone: these ask the other processes, now or later.
        if not self._has_asked:  # an item of this save may have failed below: the others ask once
            self.resources.device.measure(stepped=self.version > 0)
            self.resources.device.agree()
            self._has_asked = True
        self.planner.ask_for_review()
        if self.version > self._current.sealed_version:
            self._steps.let_go(until=self._current.sealed_version)
        self._current.abandon_interrupted()
        window = self._current.to_seal(self.version)
        record = self._record_of_snapshot() if window is None else window.record
        self.known.clock.pause(self.version)
        self._current.why_none = None
        return Seal(window, record, self.resources)

    def _record_of_snapshot(self) -> SaveRecord:
        unforeseen = self.predictor.why_unforeseen(self.version)
        if self._steps.last is None:
            unforeseen = NOT_WRAPPED
            self._saves_unwrapped += 1
            if self._saves_unwrapped == 2:  # one may be of the first state
                tell_of_no_step(has_wrapped=self.has_wrapped)
        else:
            unforeseen = self.planner.why_never(self._steps.last) or unforeseen
        reason = self._current.why_none or unforeseen
        deferred_steps = self._opener.deferred_steps(self.version)
        return SaveRecord(kind="snapshot", reason=reason, deferred_steps=deferred_steps)

    def end_save(self) -> None:
        """All items have been taken, or the save has failed: the next one is another."""
        with self._changing:
            self._has_asked = False
            if self._seal is not None:
                self._seal.end()  # again, if it is interrupted
                seal, self._seal = self._seal, None
                if self._steps.last is not None and seal.items:
                    self._num_beside = self._steps.num_beside(seal.items)
                    self.known.has_saved(self._steps.last, seal.items, seal.taken)
                    self.planner.has_saved(self._steps.last)

    # What policies and the face ask.

    @property
    def window_steps(self) -> int:
        """K of the next window as far as it is known; 1 if there is none to be had."""
        step = self._steps.last
        planned = None if step is None else self.planner.planned(step.program)
        return 1 if planned is None else planned.plan.steps

    @property
    def has_due_window(self) -> bool:
        """Whether a save at this version ends a window: what it takes has been admitted."""
        return self._current.is_due(self.version)

    @property
    def window_status(self) -> str:
        """What the window is doing, in a few words."""
        window = self._current.window
        return "idle" if window is None else window.status(self.version)

    def explain(self) -> str:
        """What saves are planned to be, what leaves early, what is retained, what is late."""
        if not self.predictor.takes_state:
            return f"{NOT_OURS}."
        if self._steps.last is None:
            return f"{NOT_WRAPPED}."
        beside = of_beside(self._num_beside if self.window_steps > 1 else 0)
        late = of_demoted(self._opener.demotions)
        return self.planner.explain(self._steps.last) + late + beside

    def state_replaced(self) -> None:
        """A checkpoint was restored; on another thread than the trainer's, to be looked at."""
        if threading.get_ident() == self._trainer:
            with self.lock:
                self.predictor.state_replaced()
                self.release("a checkpoint was restored")  # there may be no room for two states

    def release(self, reason: str) -> None:
        """Holds no state any more that the loop drops, nor a window of it."""
        with self.lock:
            self.abandon(reason)
            self._steps.let_go(until=self.version)

    def close(self) -> None:
        """Drops the open window, lets go of what steps returned, and ends the threads."""
        self._is_closed = True
        self.abandon("the manager was closed")
        self._current.failure = None  # of a window that nobody waits for any more
        self._steps.let_go(until=self.version)  # it would stay there until garbage is collected
        self.resources.close()
