"""What leaves at one version of a window, and what follows all that has left by then."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gockpt_jax.training.step_cut import StepCut
from gockpt_jax.transfer.block import Block, block_of
from gockpt_jax.transfer.chunks import Chunk, Source
from gockpt_jax.window.units import GroupUnit


class Follower(NamedTuple):
    """What of a cut value follows as one chunk.

    Attributes:
      units: Whose rows they are, by their positions: one, or all of a group; none for a captured
        scalar, which is everybody's.
      value: The cut value, by its position.
    """

    units: tuple[int, ...]
    value: int

    @property
    def is_scalar(self) -> bool:
        """Whether it is a captured scalar."""
        return not self.units


@dataclasses.dataclass(frozen=True, slots=True)
class Departure:
    """A block of units, and what follows them and those before them.

    Attributes:
      leaves: Of each chunk of `block`, the unit and the leaf.
      block: What is staged and leaves.
      units: All that have left with it, by their positions in the plan.
      followers: Of each chunk of `following`, the units whose rows it has, and the cut value.
      following: What follows the armed step behind it, staged by one program: captured scalars, and
        rows. A value of which all rows left in one block is one chunk, so that it can be pulled as
        it is.
    """

    leaves: tuple[tuple[int, int], ...]
    block: Block
    units: tuple[int, ...]
    followers: tuple[Follower, ...]
    following: Block

    def is_cut_from(self, leaves: Sequence[jax.Array]) -> bool:
        """Whether these leaves lie as those that it was made for."""
        return self.block.is_cut_from([leaves[j] for _, j in self.leaves])

    def arrays_of(self, cut: Sequence[jax.Array]) -> list[jax.Array]:
        """Of each chunk of `following`, the array that it is cut from."""
        return [cut[follower.value] for follower in self.followers]

    def followed_by(self, cut: Sequence[jax.Array]) -> "Departure":
        """The same, followed by cut values that lie as these do."""
        if self.following.is_cut_from(self.arrays_of(cut)):
            return self
        chunks = [
            dataclasses.replace(c, source=Source.of(cut[i], c.source.travels_by if run else None))
            for c, (run, i) in zip(self.following.chunks, self.followers, strict=True)
        ]
        return dataclasses.replace(self, following=_following(self.followers, chunks))


def nothing_left(cut: StepCut, leaves: Sequence[jax.Array]) -> Departure:
    """The departure before the first, which captured scalars follow already.

    Every process replays with them, so each takes its own.

    Args:
      cut: The step's.
      leaves: Of its state, alive or not. Scalars are taken to lie on all devices of one of them.
    """
    scalars = {i: group.leaves[0] for group in cut.groups for i in group.scalars}
    chunks = []
    for i, j in scalars.items():
        place = _on_all_devices(leaves[j].sharding)
        spec = cut.arrays[i]
        chunks.append(Chunk.whole(Source(spec.shape, spec.dtype, place, place), everywhere=True))
    followers = tuple(Follower((), i) for i in scalars)
    return Departure((), block_of(()), (), followers, _following(followers, chunks))


def _on_all_devices(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def make_departure(
    cut: StepCut, units: Mapping[int, GroupUnit], leaves: Sequence[jax.Array],
    before: Departure,
) -> Departure:  # fmt: skip
    """The departure of some units.

    Args:
      cut: The step's, with their groups.
      units: By their positions in the plan.
      leaves: Of the state, alive or not. Cut values are taken to lie as those that they replay.
      before: The one before it.
    """
    leaving, chunks = [], []
    for u, unit in units.items():
        for j in cut.groups[unit.group].leaves:
            leaving.append((u, j))
            chunks.append(unit.chunk_of(leaves[j]))
    block = block_of(chunks, [j for _, j in leaving])
    followers, cut_chunks = [*before.followers], [*before.following.chunks]
    for run in _runs(cut, units):
        first, last = units[run[0]], units[run[-1]]
        for i in cut.groups[first.group].retained:
            spec = cut.arrays[i]
            source = Source(spec.shape, spec.dtype, first.retained_sharding, first.travels_by)
            followers.append(Follower(run, i))
            cut_chunks.append(Chunk(source, first.start, last.stop))
    left, following = (*before.units, *units), _following(followers, cut_chunks)
    return Departure(tuple(leaving), block, left, tuple(followers), following)


def _following(followers: Sequence[Follower], chunks: Sequence[Chunk]) -> Block:
    return block_of(chunks, [i for _, i in followers], donatable=False)


def _runs(cut: StepCut, units: Mapping[int, GroupUnit]) -> list[tuple[int, ...]]:
    """The units of each group together if they are all of it, and otherwise one by one."""
    of_groups: dict[int, list[int]] = collections.defaultdict(list)
    for u, unit in units.items():
        of_groups[unit.group].append(u)
    runs: list[tuple[int, ...]] = []
    for group, members in of_groups.items():
        first = cut.groups[group].leaves[0]
        spec, travels_by = cut.leaf_specs[first], units[members[0]].travels_by
        size = Source(spec.shape, spec.dtype, travels_by, travels_by).shard_size
        is_whole = sum(units[u].stop - units[u].start for u in members) == size
        runs += [tuple(members)] if is_whole else [(u,) for u in members]
    return runs
