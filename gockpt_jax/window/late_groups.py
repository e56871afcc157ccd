"""Groups that a window was to take early, and that are late after all."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from gockpt_jax.training.step_cut import StepCut
from gockpt_jax.window.audit import Auditor


class LateGroups:
    """Positions of groups that became late inside one window, each with the first reason.

    A group is late as a whole: the replay of its leaves reads all of them.

    Args:
      cut: Of the steps that the window follows.
      auditor: Knows what must not leave early any more.
    """

    def __init__(self, cut: StepCut, auditor: Auditor):
        self._cut = cut
        self._auditor = auditor
        self._reasons: dict[int, str] = {}

    def __contains__(self, group: int) -> bool:
        """Whether a group is late."""
        return group in self._reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, in the order in which it was found."""
        return tuple(self._reasons.values())

    def look_for_replaced(
        self, left: Mapping[int, int], old: Sequence[Any], state: Sequence[Any]
    ) -> None:
        """What left can be replayed only if each step starts from what the last one returned.

        Args:
          left: The group of each leaf of which some has left.
          old: The leaves that go into the step.
          state: Those that the last one returned.
        """
        for j, g in left.items():
            if old[j] is not state[j]:
                path = self._cut.paths[j]
                why = f"{path}: not what the step before returned: replaced, or of another state"
                self._reasons.setdefault(g, why)

    def look_for_host_arrays(self, groups: Iterable[int], old: Sequence[Any]) -> None:
        """What the loop has taken to the host cannot leave a device.

        Args:
          groups: Those that are to leave.
          old: The leaves that go into the step.
        """
        for g in groups:
            for j in self._cut.groups[g].leaves:
                if not isinstance(old[j], jax.Array):
                    path, kind = self._cut.paths[j], type(old[j]).__name__
                    why = f"{path}: a `{kind}`, on no device, when it was to leave"
                    self._reasons.setdefault(g, why)

    def heed_demotions(self) -> None:
        """The audit of the last save may still be running while this window is open."""
        if not self._auditor.has_demoted:
            return
        for g, group in enumerate(self._cut.groups):
            why = self._auditor.demoted([self._cut.paths[j] for j in group.leaves])
            if why is not None:
                self._reasons.setdefault(g, why)
