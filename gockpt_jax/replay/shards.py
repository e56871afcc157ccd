"""What replay is given: flat shards, and the updates that they have missed."""

import dataclasses

import numpy as np

from gockpt_jax.replay.programs import ReplaySpec
from gockpt_jax.training.recipe import Recipe


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What one update brings to a shard.

    Attributes:
      retained: Cut values, each of shape (size of the shard,).
      scalars: Captured scalars, shape ().
    """

    retained: tuple[np.ndarray, ...]
    scalars: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ShardReplay:
    """Updates to be applied to one local shard of a group.

    Attributes:
      recipe: The group's program.
      states: The group's leaves, shape (size,) each; written in place.
      updates: The updates, in order; one at least.
    """

    recipe: Recipe
    states: tuple[np.ndarray, ...]
    updates: tuple[Update, ...]

    @property
    def size(self) -> int:
        """Elements of the shard."""
        return self.states[0].size

    @property
    def spec(self) -> ReplaySpec:
        """What its programs are made from."""
        first = self.updates[0]
        return ReplaySpec(
            self.recipe,
            tuple(x.dtype for x in self.states),
            tuple(x.dtype for x in first.retained),
            tuple(x.dtype for x in first.scalars),
        )
