"""What leaves at one version of a window, and what follows it after each later step."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gockpt_jax.training.program import StepProgram
from gockpt_jax.transfer.block import Block, block_of
from gockpt_jax.transfer.chunks import Chunk, Source
from gockpt_jax.window.units import GroupUnit

Followers = tuple[tuple[int, ...], int]
"""A unit, or all of a group, and one of the group's cut values, by their positions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Departure:
    """A block of units.

    Attributes:
      units: Their positions in the plan.
      leaves: Of each chunk of `state`, the unit and the leaf.
      state: What is staged and leaves.
      values: Of each chunk of `cut`, the units whose rows it has, and the cut value.
      cut: What follows each armed step: a value of which all rows have left is one chunk, so that
        it can be pulled as it is.
    """

    units: tuple[int, ...]
    leaves: tuple[tuple[int, int], ...]
    state: Block
    values: tuple[Followers, ...]
    cut: Block

    def has_left(self, leaves: Sequence[jax.Array]) -> bool:
        """Whether these leaves lie as those that it was made for."""
        return self.state.is_cut_from([leaves[j] for _, j in self.leaves])

    def follows(self, cut: Sequence[jax.Array]) -> bool:
        """Whether these cut values lie as those that it was made for."""
        return self.cut.is_cut_from([cut[i] for _, i in self.values])

    def followed_by(
        self, program: StepProgram, units: Sequence[GroupUnit], cut: Sequence[Any]
    ) -> "Departure":
        """The same, followed by cut values of these shardings."""
        values, block = _cut_of(program, {u: units[u] for u in self.units}, cut)
        return dataclasses.replace(self, values=values, cut=block)

    def compile_ahead(self) -> None:
        """Has its programs compiled, on a thread of their own."""
        self.state.compile_ahead()
        self.cut.compile_ahead()


def make_departure(
    program: StepProgram, units: Mapping[int, GroupUnit], leaves: Sequence[jax.Array],
    cut: Sequence[Any] | None = None,
) -> Departure:  # fmt: skip
    """The departure of some units.

    Args:
      program: Theirs.
      units: By their positions in the plan.
      leaves: Of the state, alive or not.
      cut: Shardings of the cut values, if they are known; else they are taken to be those of the
        leaves that they replay.
    """
    of_state, chunks = [], []
    for u, unit in units.items():
        for j in program.groups[unit.group].leaves:
            of_state.append((u, j))
            chunks.append(Chunk(Source.of(leaves[j], unit.placed), unit.start, unit.stop))
    state = block_of(chunks, [j for _, j in of_state])
    return Departure(tuple(units), tuple(of_state), state, *_cut_of(program, units, cut))


def _cut_of(
    program: StepProgram, units: Mapping[int, GroupUnit], cut: Sequence[Any] | None
) -> tuple[tuple[Followers, ...], Block]:
    values: list[Followers] = []
    chunks = []
    for run in _runs(program, units):
        first, last = units[run[0]], units[run[-1]]
        for i in program.groups[first.group].retained:
            spec, given = program.cut_arrays[i], first.given if cut is None else cut[i]
            values.append((run, i))
            source = Source(spec.shape, spec.dtype, given, first.placed)
            chunks.append(Chunk(source, first.start, last.stop))
    return tuple(values), block_of(chunks, [i for _, i in values], donatable=False)


def _runs(program: StepProgram, units: Mapping[int, GroupUnit]) -> list[tuple[int, ...]]:
    """The units of each group together if they are all of it, and otherwise one by one."""
    of_groups: dict[int, list[int]] = collections.defaultdict(list)
    for u, unit in units.items():
        of_groups[unit.group].append(u)
    runs: list[tuple[int, ...]] = []
    for group, members in of_groups.items():
        spec, placed = program.leaf_specs[program.groups[group].leaves[0]], units[members[0]].placed
        size = Source(spec.shape, spec.dtype, placed, placed).shard_size
        is_whole = sum(units[u].stop - units[u].start for u in members) == size
        runs += [tuple(members)] if is_whole else [(u,) for u in members]
    return runs


def scalars_of(program: StepProgram) -> tuple[int, ...]:
    """Positions of the captured scalars among the cut values."""
    return tuple(sorted({i for group in program.groups for i in group.scalars}))


def scalar_block(program: StepProgram, cut: Sequence[Any]) -> Block:
    """The block of the captured scalars: every process replays with them, so each takes its own.

    Args:
      program: The step's.
      cut: Shardings of its cut values.
    """
    specs = [(program.cut_arrays[i], cut[i]) for i in scalars_of(program)]
    sources = [Source(spec.shape, spec.dtype, given, given) for spec, given in specs]
    return block_of([Chunk.whole(s, everywhere=True) for s in sources], donatable=False)
