"""What stays of a group after analysis: positions, and the program of its replay."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from gockpt_jax.training.cut import Cut
from gockpt_jax.training.recipe import Recipe, make_recipe
from gockpt_jax.training.walk import Leaf


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of a global value (of a cut value: shape () for a captured scalar)."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayGroup:
    """A group without its graph: what stays after analysis.

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


def replay_groups(cut: Cut, leaves: Sequence[Leaf]) -> tuple[ReplayGroup, ...]:
    """The groups of a cut, without its graph; those of equal recipes share one."""
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
