"""The wrapped step: the user's own executable outside windows, the armed one inside."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from gockpt_jax.compiling import debugged_by
from gockpt_jax.errors import in_a_line, is_out_of_memory
from gockpt_jax.options import WindowOptions
from gockpt_jax.training.armed import ArmedResult
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.traced import TracedStep, Untraced
from gockpt_jax.training.unarmable import CannotArmError


@dataclasses.dataclass(frozen=True, slots=True)
class ArmedCall:
    """A call in which the armed step is to run.

    Attributes:
      program: Whose; another thread's call may give the step a new one meanwhile.
      flat: The call's arguments, as `program.flat_call` makes them; `None`: nobody has looked at
        them, for no window is open, and all steps run armed.
    """

    program: StepProgram
    flat: list[Any] | None = None

    @property
    def in_window(self) -> bool:
        """Whether a window waits for the cut."""
        return self.flat is not None


class StepObserver(Protocol):
    """Who is told of every update, and says when the armed step must run."""

    def before_update(self, step: "WrappedStep", args: Any, kwargs: Any) -> ArmedCall | None:
        """Called before dispatch, on live arguments; the call, if the armed step is to run."""

    def after_update(self, step: "WrappedStep", armed: ArmedResult | None) -> None:
        """Called after dispatch; `None`: the armed step was not asked for, or refused the call."""

    def no_update(self, reason: str) -> None:
        """Called after `before_update` asked for the armed step, if it did not run (to its end)."""

    def no_room(self, error: BaseException) -> None:
        """Called likewise, if a device had no room for it: the user's own runs behind this."""


class WrappedStep(TracedStep):
    """A jitted train step that also counts updates and can return its cut.

    Args:
      step: The jitted function.
      observer: Is told of every update.
      form: How it is called, and where its state is.
      options: The user's, of windows.

    Warns:
      SnapshotOnlyWarning: if the step has no program to arm.
    """

    def __init__(
        self, step: Callable[..., Any], observer: StepObserver, form: CallForm,
        options: WindowOptions,
    ):  # fmt: skip
        self._observer = observer
        super().__init__(step, form, options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one update, exactly as the jitted function would."""
        if self._form.is_abstract(args, kwargs):
            return self.step(*args, **kwargs)
        self._called()
        always = self._always and debugged_by() is None
        traced: StepProgram | Untraced | None = None
        if always:  # now: whoever is interrupted after the step has lost its result
            traced = self._arm_at_once(args, kwargs)
        program = self.program
        call = self._observer.before_update(self, args, kwargs)
        if call is None and always:
            call = self._armed_without_a_window()
        behind = self.losing_no_state()  # had now: behind the dispatch nothing else may raise
        armed = None if call is None else self._run_armed(call, args, kwargs)
        try:
            if armed is not None:
                result, traced = armed.result, None
            else:
                if self.last.has_come:  # the first call's arguments seldom lie where later ones do
                    traced = self._trace(args, kwargs)
                result = self.step(*args, **kwargs)
        except BaseException:
            self._has_failed(program)
            raise
        with behind:
            if call is None or not call.in_window:
                armed = None  # its cut is nobody's
            elif armed is not None:
                self._kinds.ran_armed(call.program)
            self._has_returned(result, traced)
            self._observer.after_update(self, armed)
        return result

    def _armed_without_a_window(self) -> ArmedCall | None:
        """The call, if its program is armed: it may be one that another thread has just brought."""
        program = self.program
        return None if program is None or not program.is_armed else ArmedCall(program)

    def _run_armed(
        self, call: ArmedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ArmedResult | None:
        """What the armed step returns; `None` if it refused the call, and nothing has run."""
        try:
            return call.program.call(args, kwargs, call.flat)
        except BaseException as error:
            given = jax.tree.leaves((args, kwargs))
            # If it has run, it has donated them: the user's own would only miss them.
            has_run = any(isinstance(x, jax.Array) and x.is_deleted() for x in given)
            if call.in_window and not has_run and self._needs_more_room(error):
                self._observer.no_room(error)
                return None
            is_refusal = isinstance(error, TypeError | ValueError) and not has_run
            if call.in_window:
                what = "the call changed:" if is_refusal else "the step raised"
                self._observer.no_update(f"{what} {in_a_line(error)}")
            if isinstance(error, CannotArmError):
                self._cannot_arm(call.program, error)
            elif is_refusal:
                why, in_window = in_a_line(error), call.in_window
                self._was_refused(call.program, why, args, kwargs, in_window=in_window)
            else:
                raise
            return None

    def _needs_more_room(self, error: BaseException) -> bool:
        """Whether the armed step failed for want of memory that the user's own may do without.

        One that runs in every step is the user's choice; and one that runs on several processes
        does so on all.
        """
        return is_out_of_memory(error) and _is_alone() and not self._always

    def losing_no_state(self) -> contextlib.AbstractContextManager[None]:
        """For what follows a step's dispatch: the old state may be donated, the new one must come.

        Not beside other processes, which would run other executables than this one, and wait for
        it.
        """
        if not _is_alone():
            return contextlib.nullcontext()
        return self.giving_up_on_errors("what follows a step")


def _is_alone() -> bool:
    return bool(jax.process_count() == 1)
