"""The wrapped steps that have run, and the states that they have returned."""

import weakref
from collections.abc import Collection, Iterable

import jax

from gockpt_jax.training.wrapped import WrappedStep
from gockpt_jax.transfer.probe import probe


class RanSteps:
    """All that have run and may run again.

    Attributes:
      last: The one that ran last; `None` before the first.
    """

    def __init__(self) -> None:
        self.last: WrappedStep | None = None
        # Each with the version that it has returned last.
        self._versions = weakref.WeakKeyDictionary[WrappedStep, int]()

    def ran(self, step: WrappedStep, version: int) -> None:
        """Told of each update, and of the version that it has returned."""
        self.last = step
        self._versions[step] = version

    def let_go(self, until: int) -> None:
        """Of states that steps have returned up to a version: nothing else may hold them still."""
        for step, version in list(self._versions.items()):
            if version <= until:
                step.last.let_go()

    def probe(self) -> jax.Array | None:
        """Something that is ready when the last step has run: what it passes on is so before."""
        step = self.last
        program = None if step is None else step.program
        if step is None or program is None:
            return None
        leaves = program.state_in(step.last)
        return None if leaves is None else probe([leaves[j] for j in program.cut.changed])

    def num_beside(self, items: Iterable[Collection[int]]) -> int:
        """How many arrays of a save no step has returned as its state; 0 if nobody can tell.

        Args:
          items: Of each item of the save, the ids of its arrays.
        """
        given, returned = set[int]().union(*items), set[int]()
        for step in list(self._versions):
            program = step.program
            leaves = None if program is None else program.state_in(step.last)
            if leaves is None:  # of this one it is not known, or not any more
                return 0
            returned.update(map(id, leaves))
        return len(given - returned)
