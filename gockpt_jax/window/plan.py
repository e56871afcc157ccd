"""What leaves when.

The simplest honest planner: groups leave in equal bytes per step, late leaves last. K is the
user's, or the smallest for which nothing exceeds the device budget.
"""

import dataclasses
from collections.abc import Sequence

import jax

from gockpt_jax.options import WindowOptions
from gockpt_jax.training.program import ReplayGroup, StepProgram
from gockpt_jax.transfer.staging import device_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A window.

    Attributes:
      steps: K, the number of steps in which something leaves; 1 is a plain snapshot.
      blocks: The groups that leave at each of the first K - 1 versions, by position.
      reason: Why K is what it is, for the report.
    """

    steps: int
    blocks: tuple[tuple[int, ...], ...]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes on one device.

    Attributes:
      leaves: Of each leaf of the state.
      retained: Of all cut values together, in every armed step.
    """

    leaves: tuple[int, ...]
    retained: int


def measure_bytes(program: StepProgram, leaves: Sequence[jax.Array]) -> StateBytes:
    """Bytes on one device, of the state as the last update returned it.

    A retained value is counted with the placement of the leaf that it replays.
    """
    retained: dict[int, int] = {}
    for group in program.groups:
        like = leaves[group.leaves[0]]
        elements = device_bytes(like) // like.dtype.itemsize
        for i in group.retained:
            retained[i] = elements * program.cut_arrays[i].dtype.itemsize
    return StateBytes(tuple(device_bytes(a) for a in leaves), sum(retained.values()))


def plan_window(
    groups: Sequence[ReplayGroup],
    size: StateBytes,
    options: WindowOptions,
    budget_bytes: int | None,
) -> Plan:
    """Chooses K and fills the blocks.

    Args:
      groups: The groups that may leave early.
      size: Bytes on one device.
      options: The user's.
      budget_bytes: Bytes that may be staged and retained on one device; `None`: no limit.

    Returns:
      The plan; `steps` is 1 if nothing may leave early, or if one device copy fits the budget.
    """
    if not groups:
        return Plan(1, (), "no leaf may leave early")
    if options.steps is not None:
        return fill_blocks(groups, size, options.steps, f"`steps={options.steps}`")
    if budget_bytes is None or sum(size.leaves) <= budget_bytes:
        return Plan(1, (), "one device copy of the state fits the device budget")
    for steps in range(2, options.max_steps + 1):
        plan = fill_blocks(groups, size, steps, f"{steps} steps keep within the device budget")
        if peak_device_bytes(plan, groups, size) <= budget_bytes:
            return plan
    return Plan(1, (), f"no window of at most {options.max_steps} steps fits the device budget")


def fill_blocks(groups: Sequence[ReplayGroup], size: StateBytes, steps: int, reason: str) -> Plan:
    """Spreads the groups over K - 1 blocks: largest first, each into the emptiest block."""
    if steps == 1 or not groups:
        return Plan(1, (), reason)
    blocks: list[list[int]] = [[] for _ in range(steps - 1)]
    filled = [0] * (steps - 1)
    for g in sorted(range(len(groups)), key=lambda g: (-_bytes(groups[g], size), g)):
        emptiest = filled.index(min(filled))
        blocks[emptiest].append(g)
        filled[emptiest] += _bytes(groups[g], size)
    # Largest block first, so that blocks shrink while more and more gradients follow them.
    order = sorted(range(steps - 1), key=lambda b: (-filled[b], b))
    return Plan(steps, tuple(tuple(sorted(blocks[b])) for b in order), reason)


def peak_device_bytes(plan: Plan, groups: Sequence[ReplayGroup], size: StateBytes) -> int:
    """Most bytes staged and retained at once: a block, beside what two steps in flight retain.

    The late leaves follow when no further step will retain anything: they need to fit by
    themselves, and wait for what the last steps retained to be pulled.
    """
    early = {j for block in plan.blocks for g in block for j in groups[g].leaves}
    last_block = sum(n for j, n in enumerate(size.leaves) if j not in early)
    blocks = [sum(_bytes(groups[g], size) for g in block) for block in plan.blocks]
    return max(last_block, max(blocks) + 2 * size.retained)


def _bytes(group: ReplayGroup, size: StateBytes) -> int:
    return sum(size.leaves[j] for j in group.leaves)
