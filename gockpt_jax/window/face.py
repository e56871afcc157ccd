"""What a user sees of windows, wherever the saves come from: our manager, or stock's."""

import logging
from collections.abc import Callable
from typing import Any, TextIO

from gockpt_jax.checks import as_count, of_kind
from gockpt_jax.options import WindowOptions
from gockpt_jax.telemetry.report import SaveReport
from gockpt_jax.telemetry.save_record import ReportLog
from gockpt_jax.training.places import Places
from gockpt_jax.training.wrap import Wrapped, wrap_step
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.session import Session

_log = logging.getLogger("gockpt_jax")


class WindowFace:
    """Wrapping steps, foreseeing saves, and what became of them.

    A mixin: what users do not call has the package's name, for it lives in classes of Orbax's.
    """

    _gockpt_session: Session
    _gockpt_log: ReportLog

    def _gockpt_start_session(
        self, options: WindowOptions | None, processes: Processes, replicas: Replicas
    ) -> None:
        """Starts a session of processes that save together.

        Raises:
          TypeError: if `options` is not a `WindowOptions`.
        """
        options = WindowOptions() if options is None else options
        advice = "For a fixed K pass `window=gockpt.WindowOptions(steps=K)`."
        of_kind("window", options, WindowOptions, advice)
        self._gockpt_log = ReportLog()
        self._gockpt_session = Session(options, processes, replicas)

    def _gockpt_share_session(self, other: "WindowFace") -> None:
        """Takes part in another's session."""
        self._gockpt_log = other._gockpt_log
        self._gockpt_session = other._gockpt_session

    def wrap(
        self, step: Callable[..., Any], *, state: Places = 0, state_out: Places | None = None
    ) -> Wrapped:
        """Wraps a jitted train step, so that its updates are counted and its state can leave early.

        State, optimizer, shardings, donation and the `jax.jit` call stay as they are, and outside
        windows the very same executable runs. Several steps may be wrapped; they share one count.
        Calls of several kinds (a smaller last batch, another static argument) have a program each;
        windows go on from one to another where these are cut alike.

        Args:
          step: What `jax.jit` returned, or `nnx.jit`, `eqx.filter_jit`, `gockpt_jax.jit`; a method
            that is jitted, too.
          state: Position or name of the state among the arguments, or several of them.
          state_out: Position or name of the new state in the result; `None`: found by structure; in
            the arguments themselves if the step updates them in place, as NNX does; or by the next
            call, if the loop gives it the same arrays in other containers.

        Returns:
          A function to call in its place.

        Raises:
          WrapError: if `step` is not callable, is wrapped already, or a place is not one.

        Warns:
          SnapshotOnlyWarning: if the step cannot be armed; all its saves are then snapshots. At the
            second save, if nothing that `wrap` has returned has been called by then.
        """
        session = self._gockpt_session
        wrapped = wrap_step(step, session, session.options, state=state, state_out=state_out)
        session.has_wrapped = True
        return wrapped

    def expect_save(self, *, in_steps: int) -> None:
        """Says that the save after the next `in_steps` updates will be accepted.

        For saves that nothing can foresee: irregular ones, or the first. Of several processes all
        say it, between the same steps, as they run a window's steps together: if a clock decides,
        it is one process's, which the others are told. If they say different things, nobody has.

        No other window opens until then, unless the loop calls `save`, or asks, at every label:
        what the policy will say to it is foreseen beside this.

        Args:
          in_steps: Updates until the save, at least 1.

        Raises:
          ProcessError: if another process does not say it in time.
          ValueError: if it is less than 1.
        """
        advice = "Give the number of calls of the wrapped step until the save."
        in_steps = as_count("in_steps", in_steps, advice)
        session = self._gockpt_session
        version = session.version + in_steps
        if session.processes.all_say("expected", str(version)):
            session.predictor.expect(version)
        else:
            _log.warning(
                "`expect_save` told the processes of different saves, so none is foreseen by it. "
                "Have one process decide, and tell the others."
            )

    def release(self) -> None:
        """Lets go of the state that was returned last, before the loop drops it.

        Until the next call a wrapped step holds what it has returned, and so does an open window,
        which this ends. A loop that takes its state off the device in between, to generate or to
        evaluate another model, and brings it back, would need room for two of them. A window has
        all of its steps, and one before them, between two such calls. Of several processes all call
        it, between the same steps.
        """
        self._gockpt_session.release("the loop has let go of its state")

    def explain(self, file: TextIO | None = None) -> None:
        """Prints what saves are planned to be; what leaves early, what is retained, what is late.

        Args:
          file: Where to; standard output if `None`.
        """
        print(self._gockpt_session.explain(), file=file)

    @property
    def reports(self) -> tuple[SaveReport, ...]:
        """A report for every save that has ended: committed, failed, skipped or superseded.

        But for those of which our handler took no tree of arrays (`JsonSave` alone). Oldest first.
        That of a save comes when it is visible, or has failed.
        """
        return self._gockpt_log.all()

    @property
    def last_report(self) -> SaveReport | None:
        """The newest of `reports`, of a save that has ended; one that has just begun has not."""
        return next(reversed(self.reports), None)

    @property
    def window_status(self) -> str:
        """What the window is doing now, in a few words: "idle", "window 2/5"."""
        status = self._gockpt_session.window_status
        pending = self._gockpt_log.pending
        if status == "idle" and pending is not None and not pending.is_finished:
            return f"draining step {pending.step}"
        return status
