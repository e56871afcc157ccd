"""What may leave as one: rows of a group of leaves, the same on all devices.

A recipe is elementwise, so rows of a group can leave at another version than the rest of it: a
model of one leaf has even blocks too.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gockpt_jax.replay.programs import ReplaySpec
from gockpt_jax.training.step_cut import StepCut
from gockpt_jax.transfer.chunks import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Chunk,
    Source,
    can_be_cut,
    in_host_memory,
    row_ranges,
)
from gockpt_jax.transfer.layout import LARGE_BYTES, place_of
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.cost import Unit

_UNITS_PER_WINDOW = 60
"""About so many units, where leaves are large enough to be cut: two to six blocks are then equal,
the seven of the longest window within an eighth."""

Shardings = Sequence[jax.sharding.Sharding] | None
"""Where an armed step returns each of its cut's arrays; `None`: it has not been compiled yet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupUnit(Unit):
    """A unit of a cut: rows of one of its groups.

    Attributes:
      group: Its position among the cut's groups.
      start: Of the elements of a local shard, row by row, the first that leaves.
      stop: The one after the last.
      travels_by: By whose shards the group's leaves and retained values leave.
      retained_sharding: Where an armed step's retained values lie, or are foreseen to until it has
        been compiled.
    """

    group: int
    start: int
    stop: int
    travels_by: Any
    retained_sharding: Any

    def chunk_of(self, leaf: jax.Array) -> Chunk:
        """Its rows of a leaf of its group, alive or not."""
        return Chunk(Source.of(leaf, self.travels_by), self.start, self.stop)


def units_of(
    cut: StepCut, leaves: Sequence[jax.Array], replicas: Replicas, cut_shardings: Shardings = None
) -> tuple[GroupUnit, ...]:
    """What may leave early, in the cut's order: groups, and rows of large ones.

    A retained value is counted as if it lay like the leaf that it replays. A group that is in the
    host's memory does not leave early: it has no way to go, and a gradient would.

    Args:
      cut: The step's.
      leaves: Of its state, as the last update returned it.
      replicas: How they share what leaves.
      cut_shardings: As the armed step has them.
    """
    movable = [
        (g, travels_by, [Source.of(leaves[j], travels_by) for j in group.leaves])
        for g, group in enumerate(cut.groups)
        if not all(in_host_memory(leaves[j].sharding) for j in group.leaves)
        and (travels_by := common_sharding(leaves, group.leaves, replicas)) is not None
    ]
    total = sum(source.shard_bytes for _, _, sources in movable for source in sources)
    unit_bytes = max(MIN_CHUNK_BYTES, -(-total // _UNITS_PER_WINDOW))
    return tuple(
        unit
        for g, travels_by, sources in movable
        for unit in _units_of_group(cut, g, travels_by, sources, unit_bytes, cut_shardings)
    )


def _units_of_group(
    cut: StepCut, g: int, travels_by: jax.sharding.Sharding, sources: Sequence[Source],
    unit_bytes: int, cut_shardings: Shardings,
) -> Iterator[GroupUnit]:  # fmt: skip
    """One group's, by the arrays that its leaves are; of about so many bytes."""
    first, retained = sources[0], cut.groups[g].retained
    foreseen = _foreseen_sharding([s.sharding for s in sources], travels_by, len(first.shape))
    lie = [cut_shardings[i] for i in retained] if cut_shardings else []
    lies = next(iter(lie), foreseen)
    itemsizes = [cut.arrays[i].dtype.itemsize for i in retained]
    # Small ones are packed, replicas move slices, and what lies elsewhere is moved first.
    is_copied = (
        min(itemsizes, default=0) * first.shard_size < LARGE_BYTES
        or sharers(first) > 1
        or not all(x.is_equivalent_to(travels_by, len(first.shape)) for x in lie or [lies])
    )
    for start, stop in _ranges(sources, unit_bytes):
        yield GroupUnit(
            state_bytes=sum(_bytes(s, stop - start) for s in sources),
            retained_bytes=sum(itemsizes) * (stop - start),
            group=g, start=start, stop=stop, travels_by=travels_by, retained_sharding=lies,
            is_copied=is_copied, sharers=sharers(first),
        )  # fmt: skip


def sharers(source: Source) -> int:
    """How many replicas of a process share its way to the host: by slices, or in turn."""
    return place_of(source.travels_by).replicas if can_be_cut(source) else 1


def common_sharding(
    leaves: Sequence[jax.Array], group: Sequence[int], replicas: Replicas
) -> jax.sharding.Sharding | None:
    """By whose shards a group travels: those of its most sharded leaf.

    The moments of ZeRO-1 are cut over the replicas of their parameter: each device then takes of
    the parameter, and of its gradient, the rows of which it has the moments. Where all leaves are
    replicated, each replica takes the slice that it writes.

    Returns:
      The sharding; `None` if the group cannot leave early: its leaves lie on different devices, or
      differently on devices of several processes, where each writes what it has.
    """
    shardings = [replicas.source(leaves[j]).travels_by for j in group]
    like = min(shardings, key=lambda s: Source.of(leaves[group[0]], s).shard_size)
    others = [s for s in shardings if not s.is_equivalent_to(like, leaves[group[0]].ndim)]
    sources = [Source.of(leaves[j], like) for j in group]
    if others and not (
        all(s.device_set == like.device_set for s in others)
        and like.is_fully_addressable
        and all(can_be_cut(s) for s in sources)
    ):
        return None
    return like


def _foreseen_sharding(
    shardings: Sequence[jax.sharding.Sharding], travels_by: jax.sharding.Sharding, ndim: int
) -> jax.sharding.Sharding:
    """Where a group's retained values are taken to lie: as its leaves do, if all lie alike."""
    alike = all(s.is_equivalent_to(shardings[0], ndim) for s in shardings)
    return shardings[0] if alike else travels_by


def retained_bytes(
    cut: StepCut, leaves: Sequence[jax.Array], replicas: Replicas, cut_shardings: Shardings = None
) -> int:
    """What an armed step retains on one device: of all groups, also of those that must be late.

    Args:
      cut: The step's.
      leaves: Of its state, as the last update returned it.
      replicas: How they share what leaves; each holds all of what it retains.
      cut_shardings: As the armed step has them.
    """
    total = 0
    for group in cut.groups:
        travels_by = common_sharding(leaves, group.leaves, replicas)
        shardings = [leaves[j].sharding for j in group.leaves]
        if travels_by is not None:
            shardings = [_foreseen_sharding(shardings, travels_by, leaves[group.leaves[0]].ndim)]
        for i in group.retained:
            spec, lie = cut.arrays[i], [cut_shardings[i]] if cut_shardings else shardings
            total += max(Source(spec.shape, spec.dtype, s, s).shard_bytes for s in lie)
    return total


def _ranges(sources: Sequence[Source], unit_bytes: int) -> list[tuple[int, int]]:
    shape, size = sources[0].shard_shape, sources[0].shard_size
    of_leaves = [_bytes(s, size) for s in sources]
    parts = max(-(-sum(of_leaves) // unit_bytes), -(-max(of_leaves) // MAX_CHUNK_BYTES))
    if parts < 2 or not all(map(can_be_cut, sources)):
        return [(0, size)]
    return row_ranges(shape, parts)


def _bytes(source: Source, elements: int) -> int:
    return elements * int(source.stored_dtype.itemsize)


def units_behind(
    cut: StepCut, units: Sequence[GroupUnit], left: Collection[int]
) -> dict[int, list[GroupUnit]]:
    """Of each leaf of which some rows have left and some have not, the units that have not.

    Args:
      cut: The step's.
      units: All of it.
      left: Positions of those that have left.
    """
    begun = {units[u].group for u in left}
    behind: dict[int, list[GroupUnit]] = collections.defaultdict(list)
    for u, unit in enumerate(units):
        if unit.group in begun and u not in left:
            for j in cut.groups[unit.group].leaves:
                behind[j].append(unit)
    return behind


def replay_specs(cut: StepCut, units: Sequence[GroupUnit]) -> list[tuple[ReplaySpec, int]]:
    """What the replay programs of all units are made from, with the elements of their chunks."""
    specs: dict[tuple[ReplaySpec, int], None] = {}  # a set that keeps its order
    for unit in units:
        group = cut.groups[unit.group]
        if not group.recipe.is_identity:
            spec = ReplaySpec(
                group.recipe,
                tuple(np.dtype(cut.leaf_specs[j].dtype) for j in group.leaves),
                tuple(np.dtype(cut.arrays[i].dtype) for i in group.retained),
                tuple(np.dtype(cut.arrays[i].dtype) for i in group.scalars),
            )
            specs[spec, unit.stop - unit.start] = None
    return list(specs)
