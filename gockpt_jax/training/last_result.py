"""What a step has returned last, and what was taken out of it before the user had it."""

from typing import Any

import jax

from gockpt_jax.training.returned import NewState, StateInResult
from gockpt_jax.training.signature import committed_sharding


class LastResult:
    """Held until the next one comes: of it the new state, or, where that is not known, all.

    What a step returns beside its state may be large, and no longer in use.

    Attributes:
      has_come: Whether there has been one, in which something came.
      new_state: In it, if it was of one of the step's programs.
      whole: As the step returned it, if it is held and its leaves are not. The user may change its
        containers.
    """

    def __init__(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Keeps no array of it."""
        self.has_come = False
        self.new_state: NewState | None = None
        self.whole: Any = None
        self._leaves: list[Any] | None = None

    def keep(self, result: Any, new_state: NewState | None, *, is_to_be_traced: bool) -> None:
        """Takes the place of the one before.

        Args:
          result: What the step has returned now.
          new_state: In it, if that is known.
          is_to_be_traced: Whether the next call may be, for which all leaves are looked at.
        """
        self.has_come, self.new_state = result is not None, new_state
        self.whole = result if new_state is None and not is_to_be_traced else None
        self._leaves = jax.tree.leaves(result) if is_to_be_traced else None

    @property
    def leaves(self) -> list[Any]:
        """As they were returned, if the step is to be traced; `None` for what is gone."""
        leaves, new_state = self._leaves, self.new_state  # another thread's call may bring others
        if leaves is not None:
            return leaves
        return jax.tree.leaves(self.whole) if new_state is None else new_state.in_places()

    def lies_like(self, result: Any, returned: StateInResult) -> bool:
        """Whether the state in another result lies as in this one, as far as it is known here.

        Args:
          result: Of a later call. Of the first one it is not known: then all of it.
          returned: Finds the state there.
        """
        if self.new_state is None:
            return _placements(jax.tree.leaves(result)) == _placements(self.leaves)
        both = returned.found_in(result), self.new_state
        leaves, before = ([] if x is None else jax.tree.leaves(x.parts) for x in both)
        return _placements(leaves) == _placements(before)


def _placements(leaves: list[Any]) -> list[Any]:
    """Where each leaf stays; `None` for one that may be moved."""
    return [committed_sharding(x) for x in leaves]
