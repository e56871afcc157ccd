"""Recipes, numbers and shards: what the tests of replay share."""

from __future__ import annotations

import jax
import numpy as np

from gockpt_jax.replay.shards import ShardReplay, Update
from gockpt_jax.training.cut import find_cut
from gockpt_jax.training.graph import flatten
from gockpt_jax.training.recipe import Recipe, make_recipe
from gockpt_jax.training.walk import Leaf


def moments(state, g):
    m, v = state
    return 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * (g * g)


def recipe_of(update, *args) -> Recipe:
    graph = flatten(jax.jit(update).trace(*args).jaxpr)
    leaves = [Leaf(str(i), graph.inputs[i], new) for i, new in enumerate(graph.outputs)]
    (group,) = find_cut(leaves, min_gain=0.5, even_for_nothing=True).groups
    return make_recipe(group, leaves)


def numbers(seed, size=1001):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(size).astype(np.float32)


def shard_of(recipe, states, updates, scalars=()) -> ShardReplay:
    """A shard with copies of the states, so that they can be replayed again."""
    made = tuple(Update((g,), tuple(scalars)) for g in updates)
    return ShardReplay(recipe, tuple(np.array(x) for x in states), made)


def replayed(replayer, *args) -> tuple[np.ndarray, ...]:
    """The states of a shard after its updates."""
    shard = shard_of(*args)
    replayer.apply([shard])
    return shard.states
