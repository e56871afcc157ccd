"""What may leave when: on random updates, against every choice and every order."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.random_updates import with_special
from seeded import SEEDED
from training_helpers import Analysis, analyse, bits, vector
from updates import UPDATES, gradient

from gockpt_jax.training.cut import MIN_GAIN, find_cut
from gockpt_jax.training.recipe import make_recipe

LEAVES, DATA, UPDATES_AFTER = ("a", "b", "c"), 2, 3
OPS = {
    "add": lambda x, y: x + y,
    "blend": lambda x, y: 0.9 * x + 0.1 * y,
    "choose": lambda x, y: jnp.where(y > 0, x, y),
    "divide": lambda x, y: x / (1.0 + abs(y)),
    "multiply": lambda x, y: x * y,
    "root": lambda x, y: jnp.sqrt(abs(x)) - y,
    "scale": lambda x, y: 0.7 * x,
}


@st.composite
def random_updates(draw):
    """Leaves that read each other's old and new values, through what is exact and what is not."""
    program, size = [], len(LEAVES) + DATA
    for _ in range(draw(st.integers(2, 8))):
        operand = st.integers(0, size - 1)
        program.append((draw(st.sampled_from(sorted(OPS))), draw(operand), draw(operand)))
        size += 1
    results = [draw(st.integers(0, size - 1)) for _ in LEAVES]

    def step(state, *data):
        values = [*(state[k] for k in LEAVES), *data]
        for op, x, y in program:
            values.append(OPS[op](values[x], values[y]))
        return dict(zip(LEAVES, (values[i] for i in results), strict=True))

    return step


def state_and_data(update: int = 0):
    rng = np.random.default_rng(update)
    numbers = lambda seed: jnp.asarray(with_special(rng, np.asarray(vector(seed))))  # noqa: E731
    state = {k: numbers(i) for i, k in enumerate(LEAVES)}
    return state, [numbers(10 * update + 10 + i) for i in range(DATA)]


def assert_each_group_replays_alone(found: Analysis) -> None:
    """Group by group, as if all others were late: so they may leave in any order."""
    arrays = list(found.run_many(UPDATES_AFTER, lambda n: state_and_data(n)[1]))
    for group in found.cut.groups:
        replay = jax.jit(make_recipe(group, found.leaves).apply)
        chunks = [np.asarray(arrays[0][0][j]) for j in group.leaves]
        for _, cut in arrays[1:]:
            chunks = replay(chunks, [cut[v] for v in group.retained],
                            [cut[v] for v in group.scalars])  # fmt: skip
        for j, chunk in zip(group.leaves, chunks, strict=True):
            want = arrays[-1][0][j]
            np.testing.assert_array_equal(bits(chunk), bits(want), found.leaves[j].path)


@settings(SEEDED, max_examples=40)
@given(random_updates())
def test_a_groups_replay_needs_no_other_group(step):
    state, data = state_and_data()
    assert_each_group_replays_alone(analyse(step, state, *data))


def price(found: Analysis, early: set[int], retained_bytes: int) -> float:
    late = sum(x.old.nbytes for j, x in enumerate(found.leaves) if j not in early)
    return MIN_GAIN * retained_bytes + late


@settings(SEEDED, max_examples=150)
@given(random_updates())
def test_no_other_choice_of_leaves_is_cheaper(step):
    """Each choice with the fewest bytes that it can do with; other leaves are then late."""
    state, data = state_and_data()
    found = analyse(step, state, *data)
    early = {j for g in found.cut.groups for j in g.leaves}
    ours = price(found, early, sum(v.nbytes for g in found.cut.groups for v in g.retained))
    for size in range(len(LEAVES) + 1):
        for chosen in itertools.combinations(range(len(LEAVES)), size):
            alone = find_cut(
                [found.leaves[j] for j in chosen], min_gain=MIN_GAIN / 1024, even_for_nothing=False
            )
            if not alone.late:
                retained_bytes = sum(v.nbytes for g in alone.groups for v in g.retained)
                assert ours <= price(found, set(chosen), retained_bytes), chosen


@pytest.mark.parametrize("name", [name for name, update in UPDATES.items() if update.groups])
def test_recipes_read_what_leaves_with_them_or_is_retained(name):
    update = UPDATES[name]
    found = analyse(update.step, update.state, gradient())
    for group in found.cut.groups:
        recipe = make_recipe(group, found.leaves)  # asserts that it needs nothing else
        assert recipe.num_states == len(group.leaves)
        assert recipe.num_retained == len(group.retained)
