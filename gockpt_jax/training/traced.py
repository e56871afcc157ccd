"""A jitted step and its programs: which is traced when, which such a call has, which none has."""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from gockpt_jax.compiling import debugged_by
from gockpt_jax.errors import (
    ProcessError,
    SnapshotOnlyWarning,
    StepMismatchError,
    in_a_line,
    warn,
)
from gockpt_jax.options import WindowOptions
from gockpt_jax.training.call import CallForm, NotLookedAtError
from gockpt_jax.training.kinds import Kinds
from gockpt_jax.training.last_result import LastResult
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.returned import NewState
from gockpt_jax.training.stand_in import StandIn
from gockpt_jax.training.unarmable import CannotArmError, why_unarmable

_log = logging.getLogger("gockpt_jax")

_MAX_UNKNOWN = 4
"""Calls that are waited for until one has the arrays that the call before has returned."""


@dataclasses.dataclass(frozen=True, slots=True)
class Untraced:
    """A call that could not be traced: this one's affair, for other threads call the step, too."""

    why: str


class TracedStep(StandIn):
    """A jitted step whose calls are traced and cut, each kind of them once.

    Args:
      step: The jitted function.
      form: How it is called, and where its state is.
      options: The user's, of windows.

    Attributes:
      program: Of such calls as the last one; `None` until it is traced, or if there is none.
      last: What the step has returned last.
      why_not: Why there is none for good; `None` if there may be.

    Warns:
      SnapshotOnlyWarning: if the step has no program to arm.
    """

    def __init__(self, step: Callable[..., Any], form: CallForm, options: WindowOptions):
        super().__init__(step)
        self.program: StepProgram | None = None
        self.last = LastResult()
        self.why_not: str | None = None
        self._form = form
        self._always = options.arm == "always"
        self._arming = threading.RLock()  # where no session's is held; a signal handler may step
        self._even_for_nothing = options.steps is not None  # a fixed K promises windows
        self._found: StepProgram | None = None  # the last program, kept or not
        self._kinds = Kinds(always=self._always)
        self._unknown = 0  # calls in a row of which nobody could tell where their state is
        if (why_not := why_unarmable(step)) is not None:
            self.give_up(why_not)

    # What the calls of the step tell.

    def _called(self) -> None:
        self._kinds.called()
        self._forget()

    def _arm_at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Untraced | None:
        """Has such a call's program armed before it runs, the first call's, too.

        One thread at a time, for a program drops its trace as it is armed.

        Returns:
          Why the first call could not be traced, if so.
        """
        with self._arming:
            is_first = self.program is None and not self.last.has_come
            traced = self._trace(args, kwargs) if is_first else None
            if isinstance(traced, StepProgram):
                self._kinds.traced()
                self._adopt(traced)
            self.turn_to(args, kwargs)
            self._arm()
        return traced if isinstance(traced, Untraced) else None

    def _trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepProgram | Untraced | None:
        """The program of a call, cut, if the step has none and one can be made."""
        if self.program is None:
            self.turn_to(args, kwargs)
            program = self.program
            if program is not None and not program.has_such_a_state(args, kwargs):
                self._kinds.drop(program)  # nothing else tells its calls from these
                self.program = None
        if self.program is not None or self.why_not is not None:
            return None
        if debugged_by() is not None:  # traced without `jit`, it would be another program
            return None
        if (no_more := self._kinds.why_no_more) is not None:
            self.give_up(no_more)
            return None
        step: Any = self.step
        try:
            traced = step.trace(*args, **kwargs)
        except Exception as error:  # as the step itself will raise: it says nothing of other calls
            return Untraced(f"tracing it failed with {in_a_line(error)}")
        with self.giving_up_on_errors():
            return self._analysed(traced, args, kwargs)
        return None

    def _analysed(
        self, traced: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepProgram | None:
        """The program of a traced call; `None` if there is none yet, or only of other calls."""
        try:
            program = StepProgram(
                traced, self._form, args, kwargs,
                even_for_nothing=self._even_for_nothing,
                before=self.last.leaves if self._unknown < _MAX_UNKNOWN else None,
            )  # fmt: skip
            self._unknown = 0
        except NotLookedAtError:
            self._unknown += 1
            return None
        except StepMismatchError:
            # Of the first call nobody knows yet what comes back as the state.
            if self.last.has_come:
                if self._found is None:
                    raise  # the user has to say where the state is
                self.program = self._found  # of other calls: this one is an evaluation
            return None
        except Exception as error:
            if not self._kinds:
                raise
            _log.info("a kind of call of %s has no windows: %s", self.__name__, in_a_line(error))
            self._kinds.traced()
            self.program = self._found
            return None
        if _log.isEnabledFor(logging.DEBUG):  # a line for each leaf
            _log.debug("analysed %s:\n%s", self.__name__, program.cut.explain())
        return program

    def _has_returned(self, result: Any, traced: StepProgram | Untraced | None) -> None:
        """Takes what a call has returned, and its program, if it was traced for it."""
        unsettled = None
        if isinstance(traced, Untraced):  # a step that fails, too, says nothing of its arguments
            self.give_up(traced.why)
        elif traced is not None:
            self._kinds.traced()
            if self._always or self.last.lies_like(result, traced.returned):
                traced.returns_at(jax.tree.leaves(result))  # as it ran, so the armed one is to
                self._adopt(traced)
            else:
                unsettled = traced  # the next call's arguments will lie elsewhere
        self._keep(result, unsettled)

    def _adopt(self, program: StepProgram) -> None:
        self._kinds.add(program)
        self.program = self._found = program

    def _keep(self, result: Any, unsettled: StepProgram | None) -> None:
        """Takes what will be asked for out of a result before the user has it."""
        new_state: NewState | None = None
        if self.program is not None:
            new_state = self._kinds.new_state(result)
        elif unsettled is not None:
            new_state = unsettled.returned.found_in(result)
        is_to_be_traced = self.program is None and self.why_not is None
        self.last.keep(result, new_state, is_to_be_traced=is_to_be_traced)
        if self.why_not is not None:
            self.last.whole = None  # nobody will ask for it

    def _has_failed(self, program: StepProgram | None) -> None:
        """Told of a call that raised, with the program before it."""
        if program is not None and self.program is None and self.why_not is None:
            self._adopt(program)  # dropped for this call, which says nothing of others

    def _cannot_arm(self, program: StepProgram, error: CannotArmError) -> None:
        """Told of a program that cannot run armed; others of the step may."""
        why = f"{error}: {in_a_line(error.__cause__ or error)}"
        if self._kinds.give_up(program, CannotArmError(why)):
            _log.info("a kind of call of %s has no windows: %s", self.__name__, why)
        else:
            self.give_up(why)

    def _was_refused(
        self, program: StepProgram, why: str, args: tuple[Any, ...], kwargs: dict[str, Any], *,
        in_window: bool,
    ) -> None:  # fmt: skip
        """Told of a program that refused a call."""
        self.call_changed(why, in_window=in_window)
        if self.program is None and program.takes(args, kwargs):
            self._kinds.drop(program)  # the state was moved: it is traced anew

    # What the planning of windows asks for.

    def turn_to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Has the program of such calls as this one, if the step has several."""
        if self.program is not None and len(self._kinds) < 2:
            return
        if (found := self._kinds.of(args, kwargs)) is not None:  # else the last one refuses it
            self.program = self._found = found

    @property
    def why_no_program(self) -> str:
        """Why there is nothing to arm: for good, or until the step is traced (anew)."""
        if self.why_not is not None or self._found is None:
            return self.why_not or "the step had not been traced yet"
        of_what = self._kinds.of_the_last
        return f"the step had not been traced yet in the way it is called now{of_what}"

    def state_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of the state in a call, arrays or not; traced or not."""
        return self._form.state_leaves(args, kwargs)

    def explain(self) -> str:
        """What leaves early, what is retained, what is late and why."""
        if self.why_not is not None:
            found = f"snapshots only: {self.why_not}"
        elif self.program is None:
            found = (
                "no plan yet of such calls: as a rule the second of a kind is traced, or the third"
            )
        else:
            found = self.program.cut.explain()
        return "\n".join([found, *self._kinds.explain()])

    def call_changed(self, why: str = "", *, last: bool = False, in_window: bool = True) -> None:
        """Told of a call that no program was made for: it is a new kind, unless too many were.

        Args:
          why: What is different, if that is known.
          last: Whether it was the last one, not this one: what it returned tells.
          in_window: Whether a window was to be had.
        """
        if self._kinds.refused(why, last=last, in_window=in_window):
            self.program = None

    def arm(self) -> None:
        """Starts compiling the armed step, unless that has been done.

        With "always" the call has; what another thread has brought since then, the next call does.
        """
        if not self._always:
            self._arm()

    def _arm(self) -> None:
        program = self.program  # which another thread's call may change
        if program is None or program.is_armed:
            return
        if not program.is_of_these_settings():
            self.program = None  # this call traces it anew
        else:
            with self.giving_up_on_errors():
                program.arm()
            self._forget()  # until then the program itself has kept the trace

    def _forget(self) -> None:
        """This call traces the step anew if JAX does."""
        program = self.program
        if program is not None and program.is_forgotten():
            self._kinds.forget()
            self.program = None

    def accept_rounding(self, is_worth_it: Callable[[StepProgram], bool]) -> None:
        """Cuts the step anew: leaves may leave early that the host repeats but for rounding.

        Not once it is armed, so never with "always".

        Args:
          is_worth_it: Whether the program with the new cut is to take the place of this one.
        """
        program = self.program
        if program is not None and not program.is_armed and not self._always:
            with self.giving_up_on_errors():
                rounded = program.rounded()
                if is_worth_it(rounded):
                    self._adopt(rounded)

    # How it is given up.

    @contextlib.contextmanager
    def giving_up_on_errors(self, what: str = "its analysis") -> Iterator[None]:
        """Training goes on without windows, whatever we stumble over.

        Args:
          what: That of which nothing may be lost by it.
        """
        try:
            yield
            return
        except (StepMismatchError, ProcessError, SnapshotOnlyWarning):
            raise  # the user's to mend, and early in the run; or all processes' affair
        except CannotArmError as error:
            why = str(error)
        except Exception as error:
            told = "a step and its windows: %s failed, training is not affected"
            _log.warning(told, what, exc_info=error)
            why = f"{what} failed with {in_a_line(error)}; please report it"
        self.give_up(why)

    def give_up(self, why: str) -> None:
        """No windows from now on; one warning."""
        self.program = self._found = None
        self._kinds.clear()
        self.why_not = why.rstrip(".")
        name = getattr(self.step, "__name__", type(self.step).__name__)
        told = f"`{name}` cannot be armed, so its saves are snapshots: {self.why_not}."
        warn(told, SnapshotOnlyWarning)
