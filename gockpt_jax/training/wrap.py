"""The wrapped step: the user's own executable outside windows, the armed one inside."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from gockpt_jax import errors
from gockpt_jax.compiling import debugged_by
from gockpt_jax.errors import ProcessError, SnapshotOnlyWarning, StepMismatchError
from gockpt_jax.options import WindowOptions
from gockpt_jax.training.armed import ArmedResult
from gockpt_jax.training.call import CallForm, NotLookedAtError
from gockpt_jax.training.kinds import Kinds
from gockpt_jax.training.last_result import LastResult
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.stand_in import StandIn
from gockpt_jax.training.unarmable import CannotArmError, why_no_program

_log = logging.getLogger("gockpt_jax")


@dataclasses.dataclass(frozen=True, slots=True)
class ArmedCall:
    """A call in which the armed step is to run.

    Attributes:
      program: Whose; another thread's call may give the step a new one meanwhile.
      flat: The call's arguments, as `program.flat_call` makes them; `None`: they are not known yet.
    """

    program: StepProgram
    flat: list[Any] | None = None


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


class WrappedStep(StandIn):
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
        super().__init__(step)
        self.program: StepProgram | None = None
        self.last = LastResult()
        self.why_not: str | None = None  # given up, for this reason
        self._observer = observer
        self._form = form
        self._always = options.arm == "always"
        self._even_for_nothing = options.steps is not None  # a fixed K promises windows
        self._found: StepProgram | None = None  # the last program, kept or not
        self._kinds = Kinds(always=self._always)
        self._untraced: str | None = None  # why this call could not be traced
        if (why_not := why_no_program(step)) is not None:
            self.give_up(why_not)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one update, exactly as the jitted function would."""
        if self._form.is_abstract(args, kwargs):
            return self.step(*args, **kwargs)
        self._kinds.called()
        self._untraced = None  # a call before this one may have failed
        self._forget()
        always = self._always and debugged_by() is None
        if always:  # now: whoever is interrupted after the step has lost its result
            is_first = self.program is None and not self.last.has_come
            if is_first and (traced := self._trace(args, kwargs)) is not None:
                self._kinds.traced()
                self._take(traced)
            self.turn_to(args, kwargs)
            self.arm()
        program = self.program
        call = self._observer.before_update(self, args, kwargs)
        is_asked = call is not None
        if call is None and always and self.program is not None:
            call = ArmedCall(self.program)
        armed = None if call is None else self._run_armed(call, args, kwargs, is_asked=is_asked)
        try:
            if armed is None:
                result, traced = self._run_unarmed(args, kwargs)
            else:
                result, traced = armed.result, None
        except BaseException:
            if program is not None and self.program is None and self.why_not is None:
                self._take(program)  # dropped for this call, which says nothing of others
            raise
        with self._losing_no_state():
            if is_asked and armed is not None and call is not None:
                self._kinds.ran_armed(call.program)
            self._keep(result, self._settle(result, traced))
            self._observer.after_update(self, armed if is_asked else None)
        return result

    def _run_armed(
        self, call: ArmedCall, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_asked: bool
    ) -> ArmedResult | None:
        """What the armed step returns; `None` if it refused the call, and nothing has run."""
        try:
            armed = call.program.call(args, kwargs, call.flat)
        except BaseException as error:
            given = jax.tree.leaves((args, kwargs))
            # If it has run, it has donated them: the user's own would only miss them.
            has_run = any(isinstance(x, jax.Array) and x.is_deleted() for x in given)
            if is_asked and not has_run and self._needs_more_room(error):
                self._observer.no_room(error)
                return None
            is_refusal = isinstance(error, TypeError | ValueError) and not has_run
            if is_asked:
                what = "the call changed:" if is_refusal else "the step raised"
                self._observer.no_update(f"{what} {_brief(error)}")
            if isinstance(error, CannotArmError):
                why = f"{error}: {_brief(error.__cause__ or error)}"
                if self._kinds.give_up(call.program, CannotArmError(why)):
                    _log.info("a kind of call of %s has no windows: %s", self.__name__, why)
                else:
                    self.give_up(why)
                return None
            if not is_refusal:
                raise
            self.call_changed(_brief(error), is_asked=is_asked)
            if self.program is None and call.program.takes(args, kwargs):
                self._kinds.drop(call.program)  # the state was moved: it is traced anew
            return None
        return armed

    def _needs_more_room(self, error: BaseException) -> bool:
        """Whether the armed step failed for want of memory that the user's own may do without.

        One that runs in every step is the user's choice; and one that runs on several processes
        does so on all.
        """
        is_alone = jax.process_count() == 1
        return errors.is_out_of_memory(error) and is_alone and not self._always

    def _run_unarmed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, StepProgram | None]:
        """What the user's own executable returns, and the program of this call, if it is new."""
        is_first = not self.last.has_come  # its arguments seldom lie where later ones do
        traced = None if is_first else self._trace(args, kwargs)
        return self.step(*args, **kwargs), traced

    def _settle(self, result: Any, traced: StepProgram | None) -> StepProgram | None:
        """Takes the new program of a call that has run, or returns it, if it is not kept."""
        if self._untraced is not None:  # a step that fails, too, says nothing of its arguments
            self.give_up(self._untraced)
        if traced is None:
            return None
        self._kinds.traced()
        if not (self._always or self.last.lies_like(result, traced.returned)):
            return traced  # the next call's arguments will lie elsewhere
        traced.returns_at(jax.tree.leaves(result))  # as that is run, so the armed one is to be
        self._take(traced)
        return None

    def _take(self, program: StepProgram) -> None:
        self._kinds.add(program)
        self.program = self._found = program

    def turn_to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Has the program of such calls as this one, if the step has several."""
        if self.program is not None and not self._kinds.are_several:
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

    def _keep(self, result: Any, unsettled: StepProgram | None) -> None:
        """Takes what will be asked for out of a result before the user has it."""
        new_state = None
        if self.program is not None:
            new_state = self._kinds.new_state(result)
        elif unsettled is not None:
            new_state = unsettled.returned.found_in(result)
        is_to_be_traced = self.program is None and self.why_not is None
        self.last.keep(result, new_state, is_to_be_traced=is_to_be_traced)
        if self.why_not is not None:
            self.last.whole = None  # nobody will ask for it

    def state_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of the state in a call, arrays or not; traced or not."""
        return self._form.state_leaves(args, kwargs)

    def explain(self) -> str:
        """What leaves early, what is retained, what is late and why."""
        if self.program is None:
            found = f"snapshots only: {self.why_not or 'the step has not been traced yet'}"
        else:
            found = self.program.cut.explain()
        return "\n".join([found, *self._kinds.explain()])

    def call_changed(self, why: str = "", *, last: bool = False, is_asked: bool = True) -> None:
        """Told of a call that no program was made for: it is a new kind, unless too many were.

        Args:
          why: What is different, if that is known.
          last: Whether it was the last one, not this one: what it returned tells.
          is_asked: Whether a window was to be had.
        """
        if self._kinds.refused(why, last=last, is_asked=is_asked):
            self.program = None

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepProgram | None:
        """The program of a call, cut, if the step has none and one can be made."""
        if self.program is None:
            self.turn_to(args, kwargs)
            if self.program is not None and not self.program.has_such_a_state(args, kwargs):
                self._kinds.drop(self.program)  # nothing else tells its calls from these
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
            self._untraced = f"tracing it failed with {_brief(error)}"
            return None
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
                even_for_nothing=self._even_for_nothing, before=self.last.leaves,
            )  # fmt: skip
        except NotLookedAtError:
            return None
        except StepMismatchError:
            # Of the first call nobody knows yet what comes back as the state.
            if self.last.has_come:
                if self._found is None:
                    raise  # the user has to say where the state is
                self.program = self._found  # of other calls: this one is an evaluation
            return None
        except Exception as error:
            if not self._kinds.are_any:
                raise
            _log.info("a kind of call of %s has no windows: %s", self.__name__, _brief(error))
            self._kinds.traced()
            self.program = self._found
            return None
        _log.debug("analysed %s:\n%s", self.__name__, program.cut.explain())
        return program

    def arm(self) -> None:
        """Starts compiling the armed step, unless that has been done."""
        if self.program is None or self.program.is_armed:
            return
        if not self.program.is_of_these_settings():
            self.program = None  # this call traces it anew
        else:
            with self.giving_up_on_errors():
                self.program.arm()
            self._forget()  # until then the program itself has kept the trace

    def _forget(self) -> None:
        """This call traces the step anew if JAX does."""
        if self.program is not None and self.program.is_forgotten():
            self._kinds.forget()
            self.program = None

    def accept_rounding(self, is_worth_it: Callable[[StepProgram], bool]) -> None:
        """Cuts the step anew: leaves may leave early that the host repeats but for rounding.

        Args:
          is_worth_it: Whether the program with the new cut is to take the place of this one.
        """
        if self.program is not None and not self.program.is_armed:
            with self.giving_up_on_errors():
                rounded = self.program.rounded()
                if is_worth_it(rounded):
                    self._take(rounded)

    @contextlib.contextmanager
    def giving_up_on_errors(self) -> Iterator[None]:
        """Training goes on without windows, whatever our analysis stumbles over."""
        try:
            yield
            return
        except (StepMismatchError, ProcessError):
            raise  # the user's to mend, and early in the run; or all processes' affair
        except CannotArmError as error:
            why = str(error)
        except Exception as error:
            _log.debug("analysis failed", exc_info=error)
            why = f"its analysis failed with {_brief(error)}; please report it"
        self.give_up(why)

    @contextlib.contextmanager
    def _losing_no_state(self) -> Iterator[None]:
        """Training goes on without windows, whatever goes wrong behind a step's dispatch.

        The old state may be donated: the new one is to be had. Not beside other processes, which
        would run other executables than this one, and wait for it; nor where a warning is an error.
        """
        try:
            yield
            return
        except (StepMismatchError, ProcessError, Warning):
            raise
        except Exception as error:
            if jax.process_count() > 1:
                raise
            _log.warning("what follows a step failed, training is not affected", exc_info=error)
            why = f"what follows a step failed with {_brief(error)}; please report it"
        self.give_up(why)

    def give_up(self, why: str) -> None:
        """No windows from now on; one warning."""
        self.program = self._found = None
        self._kinds.clear()
        self.why_not = why.rstrip(".")
        name = getattr(self.step, "__name__", type(self.step).__name__)
        told = f"`{name}` cannot be armed, so its saves are snapshots: {self.why_not}."
        errors.warn(told, SnapshotOnlyWarning)


def _brief(error: BaseException) -> str:
    """An error in a line: JAX's hold whole arrays at times, or a page of the compiler's."""
    first, _, rest = str(error).partition("\n")
    if first.endswith(":") and rest:  # it only announces what the others tell
        first = " ".join(rest.split())
    return f"{type(error).__name__}: {first if len(first) < 300 else first[:300] + '...'}"
