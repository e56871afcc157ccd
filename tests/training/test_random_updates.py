"""Random updates of numbers at the ends of their range, as replay's own programs repeat them.

On the CPU backend, which takes denormals for zero on both sides: in the step and in replay. What
lies between updates is in memory, and may be one.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from campaigns import seeds
from programs.random_updates import EXTREME, SPECIAL, random_updates, with_special
from training_helpers import analyse, bits

from gockpt_jax.replay.engine import Replayer
from gockpt_jax.replay.shards import ShardReplay, Update
from gockpt_jax.training.recipe import make_recipe

ASKED = seeds("PROGRAMS")
COUNT, UPDATES = (60, 6) if ASKED else (20, 3)
# A fenced sum of two halves may be beyond the largest number where the half of a sum is, and what
# is lost of it otherwise where it is denormal (docs/guarantees.md).
NUMBERS = {"cpu": EXTREME, "gpu": SPECIAL}


@pytest.mark.parametrize("platform", NUMBERS)
@pytest.mark.parametrize("seed", ASKED or range(4))
def test_what_replay_makes_of_extreme_numbers_is_what_the_step_makes(
    seed: int, platform: str
) -> None:
    """Bit for bit, but for which NaN one is: XLA's own programs differ there."""
    special = NUMBERS[platform]
    step, state, first = random_updates(seed, COUNT, special)
    found = analyse(lambda state, *batch: step(state, batch)[0], state, *first)

    def batch(n: int) -> list[Any]:
        rng = np.random.default_rng([seed, n])
        return [with_special(rng, rng.standard_normal(x.shape, np.float32), 0.02, special)
                for x in first]  # fmt: skip

    steps = [
        ([np.array(x) for x in leaves], {v: np.array(x) for v, x in cut.items()})
        for leaves, cut in found.run_many(UPDATES, batch)
    ]
    plain = state
    for n in range(UPDATES):
        plain = found.step(plain, *batch(n))
    new = steps[-1][0]
    for leaf, x in zip(jax.tree.leaves(plain), new, strict=True):
        np.testing.assert_array_equal(bits(leaf), bits(x))
    compared = 0
    for group in found.cut.groups:
        pending = [
            Update(tuple(cut[v] for v in group.retained), tuple(cut[v] for v in group.scalars))
            for _, cut in steps[1:]
        ]
        recipe = make_recipe(group, found.leaves)
        shard = ShardReplay(recipe, tuple(steps[0][0][j] for j in group.leaves), tuple(pending))
        if recipe.is_identity:
            continue
        Replayer(platform, 1).apply([shard])
        for j, x in zip(group.leaves, shard.states, strict=True):
            np.testing.assert_array_equal(bits(x), bits(new[j]), found.leaves[j].path)
            compared += 1
    assert compared > 3
