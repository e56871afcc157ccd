"""What has been planned for a step: the plan, what it was made for, and the blocks it names."""

import dataclasses
from collections.abc import Sequence

import jax

from gockpt_jax.checks import counted
from gockpt_jax.options import WindowOptions
from gockpt_jax.training.step_cut import StepCut
from gockpt_jax.transfer.chunks import Chunk
from gockpt_jax.window.cost import Blocks
from gockpt_jax.window.departure import Departure, make_departure, nothing_left
from gockpt_jax.window.facts import Facts
from gockpt_jax.window.plan import Plan, StateBytes, plan_window
from gockpt_jax.window.units import units_behind

_DRIFT = 1.5
"""Plans are not made anew for less: a step or a link is never quite the same twice."""
_LITTLE = 0.01
"""Of what saves take: for so much more beside the state no plan is made anew."""


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A step's plan, and what it was made for.

    Attributes:
      cut: The step's.
      plan: The plan.
      size: Bytes of the state on one device.
      num_devices: Of this process, with a part of the state.
      facts: What was measured, or said.
      budget_bytes: Of the device; `None`: no limit.
      beside_bytes: Of what saves take that no leaf is, in this process.
    """

    cut: StepCut
    plan: Plan
    size: StateBytes
    num_devices: int
    facts: Facts
    budget_bytes: int | None = None
    beside_bytes: int = 0
    _shorter: dict[int, Plan] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    _departures: dict[Blocks, list[Departure]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def within(self, steps: int, options: WindowOptions, budget_bytes: int | None) -> "Planned":
        """The same, with K at most `steps`: planned for, as its blocks are larger.

        Args:
          steps: At least 2.
          options: The user's.
          budget_bytes: Of the device.
        """
        if steps >= self.plan.steps:
            return self
        if steps not in self._shorter:
            plan = plan_window(self.size, options, budget_bytes, self.facts, at_most=steps)
            why = f"{plan.reason}; the save was {counted(steps - 1, 'step')} away"
            self._shorter[steps] = dataclasses.replace(plan, reason=why)
        return dataclasses.replace(self, plan=self._shorter[steps])

    @property
    def host_bytes(self) -> tuple[int, int]:
        """What a window holds in this process: what it saves, and what follows its last step."""
        saved_bytes = self.size.taken.owned + self.beside_bytes
        return saved_bytes, self._following_bytes * self.num_devices

    @property
    def _following_bytes(self) -> int:
        """What one device sends behind its last step."""
        return sum(self.size.units[u].following_bytes for block in self.plan.blocks for u in block)

    def is_outdated_by(self, facts: Facts, budget_bytes: int | None) -> bool:
        """Whether facts or the device's budget have moved so far that it is made anew."""
        then, beside_bytes = self.facts, facts.beside.differs_by(self.facts.beside)
        is_more = beside_bytes > _LITTLE * self.size.taken.of_device
        takes_others = facts.unsaved != then.unsaved or is_more
        has_drifted = not facts.unknown and (  # both are needed to predict anything
            _has_drifted(facts.step_secs, then.step_secs)
            or _has_drifted(facts.link_bytes_per_sec, then.link_bytes_per_sec)
        )
        had_no_room = budget_bytes != self.budget_bytes  # a save, and there is less for all
        return takes_others or has_drifted or had_no_room or self._host_has_moved(facts)

    def _host_has_moved(self, facts: Facts) -> bool:
        """Whether the host's room has grown, and had bounded it, or it has been refused for want.

        Less room alone is no reason: it is looked for again when a window opens, and just behind a
        save there may be less than then.
        """
        then, now, size = self.facts.host_budget_bytes, facts.host_budget_bytes, self.size
        was_bound = then is not None and then < size.on_host(size.followers)
        has_grown = now is None or now > _DRIFT * (then or 0)
        if was_bound and has_grown and not facts.unknown:
            return True
        was_refused = facts.was_refused and self.plan.steps > 1
        return was_refused and now is not None and now < size.on_host(self._following_bytes)

    def with_departures_of(self, other: "Planned") -> "Planned":
        """The same with those of a plan that is the same, if they are of the same units."""
        if self.size.units != other.size.units:
            return self
        return dataclasses.replace(self, _departures=other._departures)

    def early_leaves(self) -> set[int]:
        """The leaves of which something leaves before the sealed version."""
        groups = {self.size.units[u].group for block in self.plan.blocks for u in block}
        return {j for g in groups for j in self.cut.groups[g].leaves}

    def rows_behind(self, leaves: Sequence[jax.Array]) -> list[tuple[int, Chunk]]:
        """Of leaves that leave early in part, the rest, each with the position of its leaf.

        Args:
          leaves: Of the state, alive or not.
        """
        left = {u for block in self.plan.blocks for u in block}
        behind = units_behind(self.cut, self.size.units, left)
        return [(j, unit.chunk_of(leaves[j])) for j, units in behind.items() for unit in units]

    @property
    def has_departures(self) -> bool:
        """Whether `departures` has been asked for."""
        return self.plan.blocks in self._departures

    def departures(self, leaves: Sequence[jax.Array]) -> list[Departure]:
        """The plan's blocks behind one of nothing, made once for each plan of the step.

        Their programs are compiled from then on.

        Args:
          leaves: Of the state, alive or not.
        """
        blocks = self.plan.blocks
        if blocks not in self._departures:
            made = [nothing_left(self.cut, leaves)]
            for block in blocks:
                units = {u: self.size.units[u] for u in block}
                made.append(make_departure(self.cut, units, leaves, made[-1]))
            for departure in made:
                departure.block.compile_ahead()
                departure.following.compile_ahead()
            self._departures[blocks] = made
        return self._departures[blocks]


def _has_drifted(now: float | None, then: float | None) -> bool:
    """Whether a number was not known then, or has moved by more than it does by itself."""
    return now is not None and (then is None or not 1 / _DRIFT <= now / then <= _DRIFT)
