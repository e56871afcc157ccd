"""The programs of a step, one for each kind of its calls, and when one more is traced.

The last batch of an epoch is smaller, a static argument has every tenth step log more, sentences
come in five lengths: each is a program of its own to `jax.jit`, and so to us. A window goes on from
one to another if they are cut alike.
"""

from typing import Any

from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.returned import NewState
from gockpt_jax.training.unarmable import CannotArmError

_MAX_PROGRAMS = 8
"""Programs that a step has at once; beyond, the one that has been wanted least lately goes."""
_MAX_IDLE = 8
"""Programs that may be traced, none of which has run in a window; then the step is restless."""
_RETRY_EVERY = 8
"""Of a restless step, calls refused in a row until the kind of the last one seems to last."""
_MAX_AT_ONCE = 3
"""Programs that are traced at once where all steps run armed: placements settle, a shape is new. If
that goes on, each would be one more compilation that training waits for."""


class Kinds:
    """Holds a step's programs, and counts the calls that none was made for.

    Args:
      always: Whether all steps run armed.
    """

    def __init__(self, *, always: bool):
        self._programs: tuple[StepProgram, ...] = ()  # as they were wanted, the last one first
        self._at_once_left = _MAX_AT_ONCE if always else 0
        self._num_idle = 0  # traced, and not run in a window
        self._in_a_row = 0  # refused
        self._calls = 0
        self._refused_call = 0  # the last one that was
        self._why = ""
        self._lost = 0  # windows

    def called(self) -> None:
        """Told of every call."""
        self._calls += 1

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepProgram | None:
        """The program that was made for such a call, if there is one."""
        found = next((p for p in self._programs if p.takes(args, kwargs)), None)
        if found is not None:
            self._put_first(found)
        return found

    def __len__(self) -> int:
        """How many programs there are: of several, calls have to be told apart."""
        return len(self._programs)

    def add(self, program: StepProgram) -> None:
        """Takes a program in, in the place of one that was made for such calls, if there is."""
        self._programs = tuple(p for p in self._programs if not p.is_like(program))
        self._put_first(program)

    def drop(self, program: StepProgram) -> None:
        """Does without one: it refuses calls that look like its own."""
        self._programs = tuple(p for p in self._programs if p is not program)

    def give_up(self, program: StepProgram, error: CannotArmError) -> bool:
        """Keeps one that cannot run armed, or it would be traced anew; says if others may."""
        program.give_up(error)
        return any(not other.is_given_up for other in self._programs)

    def forget(self) -> None:
        """Does without those that JAX has forgotten."""
        self._programs = tuple(p for p in self._programs if not p.is_forgotten())

    def clear(self) -> None:
        """Keeps none."""
        self._programs = ()

    def new_state(self, result: Any) -> NewState | None:
        """The new state in a result of one of them; `None` if it is none's."""
        found = (program.returned.found_in(result) for program in self._programs)
        return next((new for new in found if new is not None), None)

    def _put_first(self, program: StepProgram) -> None:
        others = (p for p in self._programs if p is not program)
        self._programs = (program, *others)[:_MAX_PROGRAMS]

    def traced(self) -> None:
        """Told of every program that is traced, kept or not."""
        self._num_idle += 1
        self._at_once_left -= 1

    def ran_armed(self, program: StepProgram) -> None:
        """Told of a call that a program was made for, in a window."""
        self._in_a_row = 0
        if not program.has_served:
            program.has_served = True
            self._num_idle -= 1

    def refused(self, why: str, *, last: bool, in_window: bool) -> bool:
        """Told of a call that no program was made for; of one call more than once, if need be.

        Args:
          why: What is different, if that is known.
          last: Whether it was the last one, not this one: what it returned tells.
          in_window: Whether a window was to be had: what runs armed without one may be odd.

        Returns:
          Whether a program is to be traced for it.
        """
        self._why = why or self._why
        call = self._calls - last
        # With "always" at once, so that few steps run by another executable than the others.
        at_once = self._at_once_left > 0
        if call == self._refused_call or not (at_once or in_window):
            return False
        self._refused_call = call
        self._lost += in_window
        self._in_a_row += in_window
        return at_once or not self._is_restless or self._in_a_row % _RETRY_EVERY == 0

    @property
    def _is_restless(self) -> bool:
        return self._num_idle >= _MAX_IDLE

    @property
    def why_no_more(self) -> str | None:
        """Why nothing is traced for the step any more; `None` if it is."""
        if not self._is_restless or any(p.has_served for p in self._programs):
            return None
        return (
            f"its arguments changed shape, structure, placement or static values {_MAX_IDLE} "
            "times, or JAX's caches were cleared, and no program was called again in a window; "
            f"keep them the same from call to call{self.of_the_last}"
        )

    def explain(self) -> list[str]:
        """What windows such calls have cost, and what would help, as text; nothing if none."""
        if not self._lost:
            return []
        windows = f"{self._lost} window{'s were' if self._lost > 1 else ' was'}"
        return [
            f"{windows} lost to calls that no program was made for yet{self.of_the_last}. "
            f"Kinds of calls known by now: {len(self._programs)}, of at most {_MAX_PROGRAMS}. If "
            "it goes on, wrap the step once for each kind."
        ]

    @property
    def of_the_last(self) -> str:
        """What was different in the last of them, in brackets; empty if that is not known."""
        return self._why and f" (last difference: {self._why})"
