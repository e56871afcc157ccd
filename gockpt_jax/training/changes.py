"""When a step is traced anew because its calls have changed: not at once, and not for ever."""

_PATIENCE = 2
"""Refused calls in a row after which the step is traced anew: one odd batch is not a change."""
_MAX_PROGRAMS = 3
"""Programs traced in a row, none of which ran armed, before we stop following a step's changes."""
_MAX_AT_ONCE = 2
"""Changes that are followed at once where all steps run armed: placements settle, a shape is new.
If they go on, each would be one more compilation that training waits for."""


class Changes:
    """Counts the calls of a step that its program was not made for, and the programs it has had.

    Args:
      always: Whether all steps run armed.

    Example:
      >>> changes = Changes(always=False)
      >>> for _ in range(2):
      ...     changes.called()
      ...     changes.refused("its batch", last=False, is_asked=True)
      False
      True
      >>> changes.of_the_last
      ' (of the last change: its batch)'
    """

    def __init__(self, *, always: bool):
        self._at_once_left = _MAX_AT_ONCE if always else 0
        self._programs_left = _MAX_PROGRAMS + self._at_once_left
        self._refused = 0
        self._calls = 0
        self._refused_call = 0  # the last one that was
        self._why = ""
        self._lost = 0  # windows

    def called(self) -> None:
        """Told of every call."""
        self._calls += 1

    def traced(self) -> None:
        """Told of every program."""
        self._programs_left -= 1

    def ran_armed(self) -> None:
        """Told of a call that the program was made for, in a window."""
        self._refused = 0
        self._programs_left = _MAX_PROGRAMS + self._at_once_left

    def refused(self, why: str, *, last: bool, is_asked: bool) -> bool:
        """Told of a call that it was not made for; of one call more than once, if need be.

        Args:
          why: What is different, if that is known.
          last: Whether it was the last one, not this one: what it returned tells.
          is_asked: Whether a window was to be had: what runs armed without one may be odd.

        Returns:
          Whether the step is to be traced anew.
        """
        self._why = why or self._why
        call = self._calls - last
        at_once = self._at_once_left > 0  # so that few steps run by another executable
        if call == self._refused_call or not (at_once or is_asked):
            return False
        self._refused_call = call
        self._at_once_left -= at_once
        self._lost += is_asked
        self._refused += 1
        is_over = at_once or self._refused == _PATIENCE
        if is_over:
            self._refused = 0
        return is_over

    @property
    def why_no_more(self) -> str | None:
        """Why the step is not traced anew any more; `None` if it is."""
        if self._programs_left != 0:
            return None
        return (
            f"its arguments changed shape, structure, placement or static values {_MAX_PROGRAMS} "
            "times, or JAX's caches were cleared; keep them the same from call to call, or wrap "
            f"the step once for each kind of call{self.of_the_last}"
        )

    def explain(self) -> list[str]:
        """What windows such calls have cost, and what would help, as text; nothing if none."""
        if not self._lost:
            return []
        windows = f"{self._lost} window{'s were' if self._lost > 1 else ' was'}"
        return [
            f"{windows} lost to calls that the program was not made for{self.of_the_last}. Where "
            "kinds of calls take turns, wrap the step once for each kind."
        ]

    @property
    def of_the_last(self) -> str:
        """What was different in the last of them, in brackets; empty if that is not known."""
        return self._why and f" (of the last change: {self._why})"
