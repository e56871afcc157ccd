"""What stays of a step's cut once its graph is dropped: positions, places and recipes."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gockpt_jax.checks import counted
from gockpt_jax.training.call import Positions
from gockpt_jax.training.cut import Cut, find_cut
from gockpt_jax.training.graph import flatten
from gockpt_jax.training.recipe import Recipe, make_recipe
from gockpt_jax.training.values import Site
from gockpt_jax.training.walk import Leaf


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of a global value (of a cut value: shape () for a captured scalar)."""

    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, value: Any) -> "ArraySpec":
        """That of a value, or of an abstract one."""
        return cls(tuple(value.shape), value.dtype)

    @property
    def num_bytes(self) -> int:
        """Of the global value; 0 for what has no size (tokens)."""
        return math.prod(self.shape) * int(getattr(self.dtype, "itemsize", 0))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayGroup:
    """A group without its graph.

    Attributes:
      leaves: Positions among the state's leaves.
      retained: Positions among the cut arrays, of the large ones.
      scalars: Positions among the cut arrays, of the scalars.
      recipe: The program from the leaves' old chunks to their new ones.
    """

    leaves: tuple[int, ...]
    retained: tuple[int, ...]
    scalars: tuple[int, ...]
    recipe: Recipe


@dataclasses.dataclass(frozen=True, slots=True)
class StepCut:
    """A step's cut without its graph; two are equal if a window may follow either of the steps.

    Attributes:
      paths: Of the state's leaves.
      leaf_specs: What they are, going in.
      groups: Those of them that may leave early, by groups.
      arrays: What the armed step returns of the cut: each value of it once, large ones first.
      sites: Where the step's own program has these.
      late: Why the other leaves may not leave early, by position.
      is_exact: Whether what leaves early is repeated bit for bit, or up to rounding.
    """

    paths: tuple[str, ...]
    leaf_specs: tuple[ArraySpec, ...]
    groups: tuple[ReplayGroup, ...]
    arrays: tuple[ArraySpec, ...]
    sites: tuple[Site, ...] = dataclasses.field(compare=False)
    late: Mapping[int, str] = dataclasses.field(compare=False)
    is_exact: bool = dataclasses.field(compare=False)

    @property
    def changed(self) -> list[int]:
        """Leaves that may leave early and that an update changes, unlike those it passes on."""
        return [group.leaves[i] for group in self.groups for i in group.recipe.changed]

    def explain(self) -> str:
        """The groups, what is retained for them, and what is late and why, as text."""
        early = [j for group in self.groups for j in group.leaves]
        size, kept_size = _in_mb(self.leaf_specs), _in_mb(self.arrays)
        lines = [
            f"in a window {counted(len(early), 'leaf leaves', 'leaves leave')} early, in "
            f"{counted(len(self.groups), 'group')}: {_in_mb(self.leaf_specs[j] for j in early)} of "
            f"{size} MB, retaining {kept_size} MB in each step; "
            f"{counted(len(self.late), 'leaf is', 'leaves are')} late."
        ]
        for group in self.groups:
            kept = [str(self.arrays[i]) for i in (*group.retained, *group.scalars)]
            lines.append(f"early, retaining {', '.join(kept) or 'nothing'}:")
            lines += map(self._leaf, group.leaves)
        late = defaultdict(list)
        for j in sorted(self.late):
            late[self.late[j]].append(self._leaf(j))
        for reason, leaves in late.items():
            lines += [f"late ({reason}):", *leaves]
        return "\n".join(lines)

    def _leaf(self, j: int) -> str:
        return f"  {self.paths[j]} {self.leaf_specs[j]}"


def _in_mb(specs: Iterable[ArraySpec]) -> str:
    return f"{sum(spec.num_bytes for spec in specs) / 1e6:.2f}"


def cut_step(jaxpr: Any, positions: Positions, *, even_for_nothing: bool, exact: bool) -> StepCut:
    """Cuts a traced step.

    Args:
      jaxpr: The closed jaxpr of it.
      positions: Of its state.
      even_for_nothing: Whether leaves may leave early that gain no bytes.
      exact: Whether what leaves early must be repeated bit for bit, or but for rounding.
    """
    carried = list(zip(positions.inputs, positions.outputs, strict=True))
    graph = flatten(jaxpr, carried)
    leaves = [
        Leaf.of(path, graph.inputs[i], graph.outputs[o])
        for path, (i, o) in zip(positions.paths, carried, strict=True)
    ]
    cut = find_cut(leaves, even_for_nothing=even_for_nothing, exact=exact)
    specs = tuple(ArraySpec.of(graph.inputs[i]) for i in positions.inputs)
    sites, arrays = _returned(cut, leaves, specs)
    groups = _without_graph(cut, leaves)
    return StepCut(positions.paths, specs, groups, arrays, sites, cut.late, exact)


def _returned(
    cut: Cut, leaves: Sequence[Leaf], specs: Sequence[ArraySpec]
) -> tuple[tuple[Site, ...], tuple[ArraySpec, ...]]:
    """Where the cut values are, and what the armed step returns of them."""
    whole = {v: group.leaves[0] for group in cut.groups for v in group.retained}
    sites, arrays = [], []
    for value in cut.values:
        site, array, j = value.site, ArraySpec.of(value), whole.get(value)
        assert site is not None, "only what can be returned is cut"
        if j is not None:  # of a `shard_map` it is a shard, seen from inside
            site = dataclasses.replace(site, spec=leaves[j].spec)
            array = ArraySpec(specs[j].shape, array.dtype)
        sites.append(site)
        arrays.append(array)
    return tuple(sites), tuple(arrays)


def _without_graph(cut: Cut, leaves: Sequence[Leaf]) -> tuple[ReplayGroup, ...]:
    """The groups of a cut; those of equal recipes share one."""
    recipes: dict[Recipe, Recipe] = {}
    position = {value: i for i, value in enumerate(cut.values)}
    return tuple(
        ReplayGroup(
            group.leaves,
            tuple(position[v] for v in group.retained),
            tuple(position[v] for v in group.scalars),
            recipes.setdefault(recipe := make_recipe(group, leaves), recipe),
        )
        for group in cut.groups
    )
