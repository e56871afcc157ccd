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

Beside other processes, a window is open everywhere or nowhere, for all run the same executables
(`processes.py`). One process may give up its part: it runs the armed steps beside the others, and
takes a snapshot at the seal. Nothing it finds wrong is raised between two commits, where the
others would wait for it in vain.

Other threads may ask and wait as the trainer's does, and a signal handler may interrupt any line of
it. A step that was interrupted is the end of its window: nobody can tell whether the loop goes on
from its result or from its arguments.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gockpt_jax.options import WindowOptions
from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.training.armed import ArmedResult
from gockpt_jax.training.wrap import ArmedCall, WrappedStep
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.failures import surface, window_failed
from gockpt_jax.window.open_window import OpenWindow
from gockpt_jax.window.opener import Opener
from gockpt_jax.window.planner import Planner
from gockpt_jax.window.predict import SavePredictor
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.seal import Seal, Taken

_log = logging.getLogger("gockpt_jax")

_NOT_PREDICTED = "the save was not predicted, so no window was open"
_NOT_OURS = "no windows: the handlers given to the manager took all items of the last save"
_NOT_WRAPPED = "no wrapped step has run: call what `wrap(train_step)` returned"


class Session:
    """Counts updates, opens windows for predicted saves, and seals them.

    Args:
      options: The user's.
      processes: Those that save together.
      replicas: How they share what is taken and written.

    Attributes:
      options: The user's.
      version: Updates made so far.
      processes: Those that save together.
      resources: What windows and saves take, `host` and `replicas` among it.
      predictor: Of saves.
      planner: Of windows.
      between_steps: Called on the trainer's thread before each update; may raise.
      lock: Held by whoever steps, or begins a save, from its beginning to its end. In a running
        event loop Orbax takes the state on a thread of its own, while the caller's waits with it.
    """

    def __init__(self, options: WindowOptions, processes: Processes, replicas: Replicas):
        self.options = options
        self.version = 0
        self.processes = processes
        self.resources = resources = Resources.of(options, replicas)
        self.host, self.replicas = resources.host, replicas
        self.predictor = SavePredictor()
        self.predictor.is_alone = not processes.several
        self.between_steps: Callable[[], None] = lambda: None
        self.lock = threading.RLock()
        self._changing = threading.RLock()  # held by whoever changes what is below; after `lock`
        self._trainer: int | None = None  # the thread that steps
        self._window: OpenWindow | None = None
        # The thread whose update is under way: a block has left, and nothing has followed it yet.
        self._stepping: int | None = None
        self._last_step: WrappedStep | None = None
        self._steps = weakref.WeakSet[WrappedStep]()
        self._sealed_at = -1
        self.planner = Planner(options, processes, resources)
        self._opener = Opener(options, processes, self.predictor, self.planner, resources)
        self._why_snapshot: str | None = None  # `None`: no save has been foreseen
        self._failure: BaseException | None = None
        self._seal: Seal | None = None  # of the save whose items are being taken

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
                self._end_interrupted_step()
            self.between_steps()
            with self._changing:
                return self._begin_update(step, args, kwargs)

    def _begin_update(self, step: WrappedStep, args: Any, kwargs: Any) -> ArmedCall | None:
        start = time.perf_counter()
        if self._window is None:
            self.planner.clock.tick(start)
        if self._window is not None and self._window.target <= self.version:
            self.abandon("the predicted save did not come")
            self.predictor.abandoned()
        opening = self._window is None
        if opening and step.last_result is not None:
            self._window = self._open(step)
        elif opening:
            leaves = step.state_leaves(args, kwargs)
            with step.giving_up_on_errors():
                self.planner.prepare_snapshot(leaves)
        window, program = self._window, step.program
        if window is None:
            return None
        why_not = self._opener.why_not_follow(window, step)
        if program is None or why_not is not None:
            self.abandon(f"it cannot go on: {why_not}")
            return None
        try:
            flat = program.flat_call(args, kwargs)
        except TypeError as error:  # the call itself, unarmed, is for the user's step to judge
            self.abandon(f"the call changed: {error}")
            step.call_changed(str(error))
            return None
        window.program = program
        self._stepping = threading.get_ident()
        try:
            self._stage(window, program.state_leaves(flat))
        except BaseException as error:  # an interrupt: it may have waited for room
            self.no_update(f"the step was interrupted by {error!r}")
            raise
        window.record.stall_secs += time.perf_counter() - start
        return None if self._window is None else ArmedCall(program, flat)

    def _end_interrupted_step(self) -> None:
        """The step before did not come to its end, if a window is in the middle of one.

        Or it is another thread's: of two updates at once nobody can tell which follows which.
        """
        if self._stepping is not None:
            self._drop_update("a step was interrupted")

    def _stage(self, window: OpenWindow, old: list[Any]) -> None:
        """Stages what leaves, and makes room for what the armed step will return."""
        try:
            window.leave(self.version, old)
        except Exception as error:  # out of device memory, as a rule: training must go on
            _log.warning("a window was given up, training is not affected: %r", error)
            self._give_up(f"staging failed: {error!r}")
            if self._window is None:
                return
        window.make_room()
        self.planner.clock.pause()

    def no_update(self, reason: str) -> None:
        """The armed step did not run, or not to its end. The window is over."""
        with self.lock, self._changing:
            if self._stepping == threading.get_ident():
                self._drop_update(reason)

    def _drop_update(self, reason: str) -> None:
        self._stepping = None
        self.abandon(reason)

    def after_update(self, step: WrappedStep, armed: ArmedResult | None) -> None:
        """Counts the update and sends its cut after what has left."""
        with self.lock, self._changing:
            self.version += 1
            if step is not self._last_step:
                self._last_step = step
                self._steps.add(step)
            if self._stepping == threading.get_ident():
                if self._window is not None and armed is not None:
                    self._follow(self._window, armed)
                self._stepping = None

    def _follow(self, window: OpenWindow, armed: ArmedResult) -> None:
        start = time.perf_counter()
        try:
            window.follow(armed.state, armed.cut)
        except Exception as error:  # the old state is donated: the caller must get the new one
            _log.warning("a window was given up, training is not affected: %r", error)
            self._give_up(f"its cut could not be pulled: {error!r}")
            return
        window.record.stall_secs += time.perf_counter() - start

    # Opening and abandoning.

    def _open(self, step: WrappedStep) -> OpenWindow | None:
        """Opens a window if it is time, and remembers why not if it is not to be."""
        found: OpenWindow | str | None = None
        with step.giving_up_on_errors():
            found = self._opener.open(step, self.version, self._sealed_at)
        if isinstance(found, str):
            self._why_snapshot = found
            return None
        return found

    def abandon(self, reason: str) -> None:
        """Closes the open window without a checkpoint; earlier ones are untouched."""
        with self._changing:
            window = self._window
            if window is None:
                return
            window.drop()
            self._window = None
            if window.error is not None:
                reason = f"it failed: {window.error!r}"
            self._tell(window, "abandoned", reason)
            self._why_snapshot = f"its window was abandoned: {reason}"

    def _give_up(self, reason: str) -> None:
        """This process's part of the open window is over; so is the window, unless others go on."""
        if self._window is None:  # a signal handler's `close` came first
            return
        if not self.processes.several:
            self.abandon(reason)
            return
        self._tell(self._window, "given up in part", reason)
        self._window.give_up(reason)

    @staticmethod
    def _tell(window: OpenWindow, what: str, reason: str) -> None:
        level = logging.DEBUG if window.error is None else logging.WARNING
        _log.log(level, "window for version %d %s: %s", window.target, what, reason)
        jax.monitoring.record_event(events.WINDOW_ABANDONED)

    def surface_failure(self) -> None:
        """Raises what went wrong in a window since the last call.

        Beside other processes it raises nothing: they would wait for this one. The window's save
        fails instead, on all of them.

        Raises:
          ReplayError: from the original error.
        """
        window = self._window
        if window is not None and window.error is not None and window.given_up is None:
            with self.lock, self._changing:
                if not self.processes.several:
                    self._failure = window.error
                self._give_up(f"it failed: {window.error!r}")
        if not self.processes.several:
            self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            surface(window_failed(failure), self.options.on_save_error)

    # Saving.

    def begin_save(self) -> None:
        """Ends the open window, if there is one: in the save that begins, or without it.

        Beside other processes before anything that can fail here alone: they ask each other.
        """
        with self._changing:
            if self._seal is None:
                self._seal = self._new_seal()
                self._window = None  # not before: an interrupt would leave it to nobody

    def seal(self, arrays: Sequence[jax.Array]) -> Taken:
        """Takes one item's arrays at the save step, as `Seal.take` says.

        Raises:
          HostBudgetError: if the user's host budget cannot hold the save even alone.
          ReplayError: beside other processes, if this save's window has failed here.
        """
        with self._changing:
            self.begin_save()
            assert self._seal is not None
            return self._seal.take(arrays)

    def _new_seal(self) -> Seal:
        # Before what can fail here alone: these ask the other processes, now or later.
        self.planner.limit_device(stepped=self.version > 0)
        self.planner.ask_for_review()
        self._sealed_at = self.version
        self._end_interrupted_step()
        window = self._sealing_window()
        if self.processes.several:
            self._raise_failure()
        unforeseen = _NOT_WRAPPED if self._last_step is None else _NOT_PREDICTED
        record = SaveRecord(kind="snapshot", reason=self._why_snapshot or unforeseen)
        record.deferred_steps = self._opener.deferred_steps(self.version)
        if window is not None:
            record = window.record
        self.planner.clock.pause()
        self._why_snapshot = None
        return Seal(window, record, self.resources)

    def end_save(self) -> None:
        """All items have been taken, or the save has failed: the next one is another."""
        if self._seal is None:
            return
        with self._changing:  # another thread's save may end in the meantime
            if self._seal is not None:
                self._seal.end()
                if self._last_step is not None and self._seal.given:
                    self.planner.has_saved(self._last_step, self._seal.given)
            self._seal = None

    def _sealing_window(self) -> OpenWindow | None:
        """The open window, if this is the version it was opened for and it is sound."""
        window = self._window
        if window is None or self.has_due_window:
            return window
        steps = window.target - self.version
        self.abandon(window.given_up or f"the save came {steps} steps early")
        if steps == 0 or not self.processes.several:
            # Surfaces at the next call, and this save is a snapshot; beside others it fails.
            self._failure = window.error
        return None

    # For the face.

    @property
    def window_steps(self) -> int:
        """K of the next window as far as it is known; 1 if there is none to be had."""
        program = None if self._last_step is None else self._last_step.program
        planned = None if program is None else self.planner.planned(program)
        return 1 if planned is None else planned.plan.steps

    @property
    def most_window_steps(self) -> int:
        """The largest K that a window may have."""
        return self.options.steps or self.options.max_steps

    @property
    def has_due_window(self) -> bool:
        """Whether a save at this version ends a window: what it takes has been admitted."""
        window = self._window
        return window is not None and window.target == self.version and window.is_sound

    @property
    def window_status(self) -> str:
        """What the window is doing, in a few words."""
        return "idle" if self._window is None else self._window.status(self.version)

    def explain(self) -> str:
        """What saves are planned to be, what leaves early, what is retained, what is late."""
        if not self.predictor.takes_state:
            return f"{_NOT_OURS}."
        return self.planner.explain(self._last_step) if self._last_step else f"{_NOT_WRAPPED}."

    def state_replaced(self) -> None:
        """A checkpoint was restored; on another thread than the trainer's, to be looked at."""
        if threading.get_ident() == self._trainer:
            with self.lock:
                self.abandon("a checkpoint was restored")

    def close(self) -> None:
        """Drops the open window, lets go of what steps returned, and ends the threads."""
        self.abandon("the manager was closed")
        for step in list(self._steps):  # a state would stay with them until garbage is collected
            step.let_go()
        self.predictor.end()
        self.resources.close()
