"""What leaves when.

K is the user's; or that of the plan with the least predicted stall, once step time and link are
known; or, until then, the smallest for which nothing exceeds the device budget.
"""

import dataclasses
import itertools
import logging
from collections.abc import Sequence

import jax

from gockpt_jax.checks import counted, describe_bytes
from gockpt_jax.options import WindowOptions
from gockpt_jax.training.step_cut import StepCut
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.choice import choose, into_blocks, why_one_copy
from gockpt_jax.window.cost import (
    STEPS_IN_FLIGHT,
    Blocks,
    Terms,
    Unit,
    copied_bytes,
)
from gockpt_jax.window.facts import Facts, SavedBytes
from gockpt_jax.window.units import GroupUnit, Shardings, retained_bytes, units_of

_log = logging.getLogger("gockpt_jax")

_LITTLE = 0.1
"""Of the state: a window of less spreads next to nothing."""

_NONE_AS_THEY_LIE = (
    "no leaf may leave early as they lie: what is updated together lies on different devices, or "
    "is sharded differently over several processes, or is in host memory"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A window.

    Attributes:
      blocks: The units that leave at each of the first K - 1 versions, by their position among
        `StateBytes.units`. A unit that is in none leaves at the sealed version.
      reason: Why K is what it is, for the report.
    """

    blocks: Blocks
    reason: str

    @property
    def steps(self) -> int:
        """K, the number of steps in which something leaves; 1 is a plain snapshot."""
        return len(self.blocks) + 1


@dataclasses.dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one device.

    Attributes:
      leaves: Of each leaf of the state, what is staged; none, if saves do not take it.
      retained: Of all cut values together, what it holds in every armed step.
      units: What may leave early.
      taken: Of all that a save takes. What the host holds already is copied there: it takes neither
        room on the device nor time on the link.
    """

    leaves: tuple[int, ...]
    retained: int
    units: tuple[GroupUnit, ...]
    taken: SavedBytes

    @property
    def followers(self) -> int:
        """Of retained values, what is sent after a step once all units have left."""
        return sum(u.following_bytes for u in self.units)

    @property
    def to_host(self) -> int:
        """Of what a save takes, what comes to the host: replicas of a process share the rest."""
        return min(self.taken.to_host, self.taken.of_device)

    def takes_more_than(self, foreseen: "StateBytes") -> bool:
        """Whether what is retained takes more of a device than was foreseen, itself or in copies.

        Args:
          foreseen: The same state's.
        """
        copied, before = (
            {(u.group, u.start) for u in size.units if u.is_copied} for size in (self, foreseen)
        )
        return self.retained > foreseen.retained or not copied <= before

    def on_host(self, followers: int) -> int:
        """Of what a window takes there at the most, if so many follow each of its last steps."""
        return self.to_host + STEPS_IN_FLIGHT * followers

    @property
    def staged(self) -> int:
        """Of what is staged on the device, to be sent."""
        return self.taken.of_device - self.taken.in_host_memory

    @property
    def late(self) -> int:
        """Of what is staged and no unit holds: it leaves at the sealed version."""
        return self.staged - sum(u.state_bytes for u in self.units)

    @property
    def late_shared(self) -> int:
        """Of that, what other replicas send."""
        shared = self.taken.of_device - self.to_host
        early = sum(u.state_bytes - u.sent_bytes for u in self.units)
        return min(max(0, shared - early), self.late)


def measure_bytes(
    cut: StepCut, leaves: Sequence[jax.Array], replicas: Replicas, facts: Facts | None = None,
    cut_shardings: Shardings = None,
) -> StateBytes:  # fmt: skip
    """Bytes of one device, of the state as the last update returned it.

    Args:
      cut: The step's.
      leaves: Of its state.
      replicas: How they share what leaves.
      facts: Which leaves saves do not take, and what they take beside. One that they do not is sent
        all the same if it is the smaller part of what is updated together, as replay reads it; if
        not, all of that is late.
      cut_shardings: Where the armed step returns its cut, if that is known.
    """
    facts = facts or Facts()
    unsaved = facts.unsaved
    weights = [replicas.source(a).shard_bytes for a in leaves]
    groups = {
        g: group.leaves
        for g, group in enumerate(cut.groups)
        if _is_most_saved(group.leaves, weights, unsaved)
    }
    units = tuple(u for u in units_of(cut, leaves, replicas, cut_shardings) if u.group in groups)
    unsent = unsaved.difference(*groups.values())
    sent = [a for j, a in enumerate(leaves) if j not in unsent]
    return StateBytes(
        leaves=tuple(0 if j in unsent else weight for j, weight in enumerate(weights)),
        retained=retained_bytes(cut, leaves, replicas, cut_shardings),
        units=units,
        taken=SavedBytes.of(sent, replicas).plus(facts.beside),
    )


def _is_most_saved(group: Sequence[int], weights: Sequence[int], unsaved: frozenset[int]) -> bool:
    left_out = sum(weights[j] for j in group if j in unsaved)
    return 2 * left_out < sum(weights[j] for j in group)


def plan_window(
    size: StateBytes, options: WindowOptions, budget_bytes: int | None, facts: Facts,
    at_most: int | None = None,
) -> Plan:  # fmt: skip
    """Chooses K and fills the blocks.

    Args:
      size: Bytes on one device, and what may leave early.
      options: The user's.
      budget_bytes: Bytes that may be staged and retained on one device; `None`: no limit.
      facts: Time and rate, with which stalls are predicted and the plan with the least is taken
        (`choice.py`). Without them, the smallest K that keeps within the device budget.
      at_most: The largest K, where the save is nearer; `None`: as the options say.

    Returns:
      The plan; `steps` is 1 if nothing may leave early, if one device copy fits the budget, or if
      no window gains enough.
    """
    if not size.units:
        return Plan((), _NONE_AS_THEY_LIE)
    most_steps = min(options.most_steps, at_most or options.most_steps)
    if options.steps is not None:
        plan = fill_blocks(size.units, most_steps, f"`steps={options.steps}`")
        return _told_of_excess(plan, size, budget_bytes)
    if (copy := why_one_copy(size.staged, budget_bytes)) is not None:
        return Plan((), copy)
    assert budget_bytes is not None, "without a budget one copy fits"
    if facts.step_secs is None or facts.link_bytes_per_sec is None:
        return _smallest_window(size, most_steps, budget_bytes, facts.unknown)
    host = facts.host_budget_bytes
    choice = choose(
        Terms(
            units=size.units,
            late_bytes=size.late,
            shared_bytes=size.late_shared,
            retained_bytes=size.retained,
            link_bytes_per_sec=facts.link_bytes_per_sec,
            step_secs=facts.step_secs,
            device_budget_bytes=budget_bytes,
            # Whatever is sent comes beside the copies that are made there.
            host_budget_bytes=None if host is None else host - size.taken.in_host_memory,
            max_steps=most_steps,
        )
    )
    return Plan(choice.cost.blocks, choice.reason)


def warn_of_late(size: StateBytes) -> bool:
    """Warns where saves will stall and no window could help much: nothing else tells.

    Args:
      size: Of a state of which the device has no room for a copy.

    Returns:
      Whether it has.
    """
    early = sum(unit.state_bytes for unit in size.units)
    if early >= _LITTLE * size.staged:
        return False
    _log.warning(
        "saves will stall until what exceeds the device budget has left: a copy of the state's %s "
        "does not fit, and only %.0f%% may leave early; `explain()` tells why",
        describe_bytes(size.staged), 100 * early / size.staged,
    )  # fmt: skip
    return True


def _smallest_window(size: StateBytes, max_steps: int, budget_bytes: int, unknown: str) -> Plan:
    """The smallest K that keeps within the device budget: more is not known yet."""
    budget = f"the device budget of {describe_bytes(budget_bytes)}"
    peaks = []
    for steps in range(2, max_steps + 1):
        plan = fill_blocks(size.units, steps, f"{steps} steps keep within {budget}")
        peaks.append(peak_device_bytes(plan, size))
        if peaks[-1] <= budget_bytes:
            return plan
    least = f": {describe_bytes(min(peaks))} would do" if peaks else ""
    why = f"no window of at most {counted(max_steps, 'step')} fits {budget}{least}"
    return Plan((), f"{why}; not known yet: {unknown}")


def _told_of_excess(plan: Plan, size: StateBytes, budget_bytes: int | None) -> Plan:
    """A plan of the user's own K, whose reason says where it exceeds the device budget."""
    peak_bytes = peak_device_bytes(plan, size)
    if budget_bytes is None or peak_bytes <= budget_bytes:
        return plan
    wanted, given = describe_bytes(peak_bytes), describe_bytes(budget_bytes)
    return dataclasses.replace(
        plan, reason=f"{plan.reason}, which takes {wanted} of the device budget of {given}"
    )


def fill_blocks(units: Sequence[Unit], steps: int, reason: str) -> Plan:
    """Lets all units leave over K - 1 steps, in even blocks."""
    return Plan(into_blocks(units, steps, shrinking=False), reason)


def peak_device_bytes(plan: Plan, size: StateBytes) -> int:
    """Most bytes staged and retained at once, if a transfer takes no longer than a step.

    A block, beside what follows the step before it and all that the next step retains. Or what one
    step retains, with the copies of what follows: those may wait for what went before.

    The late leaves follow when no further step will retain anything: they need to fit by
    themselves, and wait for what the last steps retained to be pulled.
    """
    blocks = [sum(size.units[u].state_bytes for u in block) for block in plan.blocks]
    follows = [sum(size.units[u].retained_bytes for u in block) for block in plan.blocks]
    before = [0, *itertools.accumulate(follows)]
    beside = [b + f + size.retained for b, f in zip(blocks, before, strict=False)]
    copied = sum(copied_bytes(size.units, plan.blocks))
    return max(size.staged - sum(blocks), *beside, size.retained + copied)
