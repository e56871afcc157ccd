"""What leaves when.

The simplest honest planner: groups leave in equal bytes per step, late leaves last. K is the
user's, or the smallest for which nothing exceeds the device budget.
"""

import dataclasses
from collections.abc import Sequence

import jax

from gockpt_jax.options import WindowOptions
from gockpt_jax.training.program import StepProgram
from gockpt_jax.transfer.staging import device_bytes
from gockpt_jax.window.cost import Unit


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A window.

    Attributes:
      steps: K, the number of steps in which something leaves; 1 is a plain snapshot.
      blocks: The units that leave at each of the first K - 1 versions, by their position among
        `StateBytes.units`. A unit that is in none leaves at the sealed version.
      reason: Why K is what it is, for the report.
    """

    steps: int
    blocks: tuple[tuple[int, ...], ...]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupUnit(Unit):
    """A unit of a program: one of its groups.

    Attributes:
      group: Its position among the program's groups.
    """

    group: int


@dataclasses.dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes on one device.

    Attributes:
      leaves: Of each leaf of the state.
      retained: Of all cut values together, in every armed step.
      units: What may leave early.
    """

    leaves: tuple[int, ...]
    retained: int
    units: tuple[GroupUnit, ...]

    @property
    def late(self) -> int:
        """Of what no unit holds: it leaves at the sealed version."""
        return sum(self.leaves) - sum(u.state_bytes for u in self.units)


def units_of(program: StepProgram, leaves: Sequence[jax.Array]) -> tuple[GroupUnit, ...]:
    """What may leave early: at present each group as a whole, in the program's order.

    A retained value is counted with the placement of the leaf that it replays.

    Args:
      program: The step's.
      leaves: Of its state, as the last update returned it.
    """
    units = []
    for g, group in enumerate(program.groups):
        like = leaves[group.leaves[0]]
        elements = device_bytes(like) // like.dtype.itemsize
        retained = (program.cut_arrays[i].dtype.itemsize for i in group.retained)
        units.append(
            GroupUnit(
                state_bytes=sum(device_bytes(leaves[j]) for j in group.leaves),
                retained_bytes=elements * sum(retained),
                group=g,
            )
        )
    return tuple(units)


def measure_bytes(program: StepProgram, leaves: Sequence[jax.Array]) -> StateBytes:
    """Bytes on one device, of the state as the last update returned it."""
    units = units_of(program, leaves)
    retained = sum(u.retained_bytes for u in units)
    return StateBytes(tuple(device_bytes(a) for a in leaves), retained, units)


def plan_window(size: StateBytes, options: WindowOptions, budget_bytes: int | None) -> Plan:
    """Chooses K and fills the blocks.

    Args:
      size: Bytes on one device, and what may leave early.
      options: The user's.
      budget_bytes: Bytes that may be staged and retained on one device; `None`: no limit.

    Returns:
      The plan; `steps` is 1 if nothing may leave early, or if one device copy fits the budget.
    """
    if not size.units:
        return Plan(1, (), "no leaf may leave early")
    if options.steps is not None:
        return fill_blocks(size.units, options.steps, f"`steps={options.steps}`")
    if budget_bytes is None or sum(size.leaves) <= budget_bytes:
        return Plan(1, (), "one device copy of the state fits the device budget")
    for steps in range(2, options.max_steps + 1):
        plan = fill_blocks(size.units, steps, f"{steps} steps keep within the device budget")
        if peak_device_bytes(plan, size) <= budget_bytes:
            return plan
    return Plan(1, (), f"no window of at most {options.max_steps} steps fits the device budget")


def fill_blocks(units: Sequence[Unit], steps: int, reason: str) -> Plan:
    """Spreads the units over K - 1 blocks: largest first, each into the emptiest block."""
    if steps == 1 or not units:
        return Plan(1, (), reason)
    blocks: list[list[int]] = [[] for _ in range(steps - 1)]
    filled = [0] * (steps - 1)
    for u in sorted(range(len(units)), key=lambda u: (-units[u].state_bytes, u)):
        emptiest = filled.index(min(filled))
        blocks[emptiest].append(u)
        filled[emptiest] += units[u].state_bytes
    # Largest block first, so that blocks shrink while more and more gradients follow them.
    order = sorted(range(steps - 1), key=lambda b: (-filled[b], b))
    return Plan(steps, tuple(tuple(sorted(blocks[b])) for b in order), reason)


def peak_device_bytes(plan: Plan, size: StateBytes) -> int:
    """Most bytes staged and retained at once: a block, beside what two steps in flight retain.

    The late leaves follow when no further step will retain anything: they need to fit by
    themselves, and wait for what the last steps retained to be pulled.
    """
    blocks = [sum(size.units[u].state_bytes for u in block) for block in plan.blocks]
    last_block = sum(size.leaves) - sum(blocks)
    return max(last_block, max(blocks) + 2 * size.retained)
