"""Recipes repeat the step's own result, bit for bit, on whatever part of a leaf they are given."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from training_helpers import N, analyse, vector
from updates import UPDATES, adam, gradient, momentum, state

from gockpt_jax.training.markers import mark_gradients
from gockpt_jax.training.recipe import Constant, make_recipe

enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
EARLY = [name for name, update in UPDATES.items() if update.groups]


def recipes_of(found):
    return [make_recipe(group, found.leaves) for group in found.cut.groups]


def inputs_of(found, group, cut, part=lambda x: x):
    """What a group's recipe is given: old leaves, retained values, scalars."""
    old = jax.tree.leaves(found.args)
    return (
        [part(old[j]) for j in group.leaves],
        [part(cut[v]) for v in group.retained],
        [cut[v] for v in group.scalars],
    )


def assert_same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    differing = int((got.view(np.uint8) != want.view(np.uint8)).sum())
    assert differing == 0, f"{differing} bytes differ"


def assert_replays(found, parts=(lambda x: x,), fence=None):
    """Every early leaf, from its old value and the cut, is the step's own new value."""
    new, cut = found.run()
    for group, recipe in zip(found.cut.groups, recipes_of(found), strict=True):
        apply = jax.jit(recipe.apply)
        for part in parts:
            got = apply(*inputs_of(found, group, cut, part), fence)
            for j, chunk in zip(group.leaves, got, strict=True):
                assert_same_bits(chunk, part(new[j]))


def flat(x):
    return np.array(x).reshape(-1)


def box(x):
    return x.reshape(4, -1)[1:, 2:]


PARTS = (lambda x: x, lambda x: x[5:12], lambda x: x[7:8], box, flat)


@pytest.mark.parametrize("name", EARLY)
def test_replay_is_the_step_on_the_whole_and_on_parts(name):
    update = UPDATES[name]
    assert_replays(analyse(update.step, update.state, gradient()), PARTS)


@pytest.mark.parametrize("name", EARLY)
def test_fence_keeps_the_bits_where_nothing_is_contracted(name):
    update = UPDATES[name]
    assert_replays(analyse(update.step, update.state, gradient()), fence=jnp.int32(0))


def test_wide_products_are_fenced_as_well():
    update, counts = UPDATES["adam"], []
    for dtype in (np.float32, np.float64):
        with enable_x64(True):
            given = (update.state, gradient())
            found = analyse(
                update.step, *jax.tree.map(functools.partial(jnp.asarray, dtype=dtype), given)
            )
            _, cut = found.run()
            (group,), (recipe,) = found.cut.groups, recipes_of(found)
            given = inputs_of(found, group, cut)
            traced = jax.jit(recipe.apply).trace(*given, fence=np.int32(0))
            counts.append(str(traced.jaxpr).count("bitcast_convert_type"))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("combine", "fences"),
    [
        (jnp.add, 2),
        (jnp.subtract, 2),
        (lambda x, y: -x + jnp.where(y > 0, y, x), 3),  # negated, and chosen
    ],
)
def test_a_product_is_fenced_on_either_side_of_a_sum(combine, fences):
    def step(s, g):
        return {"m": combine(0.9 * s["m"], g), "u": combine(g, jnp.square(s["u"]))}

    found = analyse(step, state("m", "u"), gradient())
    _, cut = found.run()
    (group,), (recipe,) = found.cut.groups, recipes_of(found)
    traced = jax.jit(recipe.apply).trace(*inputs_of(found, group, cut), fence=np.int32(0))
    assert str(traced.jaxpr).count("bitcast_convert_type") == 2 * fences  # there and back


# Where a product ends. XLA folds `(x * a) * b` into `x * (a * b)`, through whatever it erases.

_MESH = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
_SIDE = 32
SCALED = {
    "times 0.3": lambda g: (g @ g) * 0.3,
    "over 10": lambda g: (g @ g) / 10.0,
    "over a constant array": lambda g: (g @ g) / jnp.full(g.shape, 10.0),
    "spread scalar over 10": lambda g: jnp.full(g.shape, jnp.sum(g) / 10.0),
}
ERASED = {
    "nothing": lambda x: x,
    "mark": mark_gradients,
    "copy": jnp.copy,
    "sharding constraint": lambda x: lax.with_sharding_constraint(
        x, NamedSharding(_MESH, PartitionSpec("x"))
    ),
    "reshape there and back": lambda x: x.reshape(-1).reshape(x.shape),
    "one more dimension": lambda x: x[None][0],
    "select": lambda x: jnp.where(True, x, 0.0),
    "add zero": lambda x: x + 0.0,
    "negate": jnp.negative,
    "stack of one": lambda x: jnp.stack([x])[0],
    "pad by nothing": lambda x: jnp.pad(x, 0),
    "at least minus infinity": lambda x: jnp.maximum(x, -jnp.inf),
    "rematerialise": jax.checkpoint(lambda x: x * 1.0),
}  # fmt: skip


@pytest.mark.parametrize("erased", ERASED)
@pytest.mark.parametrize("scaled", SCALED)
def test_no_cut_within_a_chain_of_scalar_factors(scaled, erased):
    """The step goes on with a folded product; cutting inside the chain would return another."""

    def step(s, g):
        return adam(s, ERASED[erased](SCALED[scaled](g)))

    matrix = [vector(i, _SIDE * _SIDE).reshape(_SIDE, _SIDE) for i in range(4)]
    first = {"m": matrix[0], "v": jnp.abs(matrix[1]), "w": matrix[2]}
    assert_replays(analyse(step, first, matrix[3]))


# Likewise: `sqrt(x) * sqrt(x)` is `x`, `exp(a) * exp(b)` is `exp(a + b)`, `(x + a) + b` is
# `x + (a + b)`, and a loop of one turn is none.
_ROOT, _EXP = (lambda g: jnp.sqrt(jnp.abs(g @ g))), (lambda g: jnp.exp(jnp.tanh(g @ g)))
MERGED = {
    "root": (_ROOT, lambda x: x * x),
    "root of a mean": (lambda g: jnp.full(g.shape, _ROOT(g).mean() ** 0.5), lambda x: x * x),
    "inverse root": (lambda g: lax.rsqrt(jnp.abs(g @ g)), jnp.square),
    "root cubed": (_ROOT, lambda x: x**3),
    "root, then negated": (_ROOT, lambda x: (-x) * (-x)),
    "power": (lambda g: jnp.abs(g @ g) ** 0.5, jnp.square),
    "exponential": (_EXP, lambda x: x * x),
    "power of two": (lambda g: jnp.exp2(jnp.tanh(g @ g)), lambda x: x * x),
    "sum": (lambda g: (g @ g) + 0.1, lambda x: x + 0.3),
    "difference": (lambda g: 0.1 - (g @ g), lambda x: 0.3 - x),
    "one turn": (lambda g: lax.fori_loop(0, 1, lambda _, x: x * 0.3, g @ g), lambda x: x * 0.7),
}


@pytest.mark.parametrize("name", MERGED)
def test_no_cut_where_what_follows_merges_with_it(name):
    value, follows = MERGED[name]

    def step(s, g):
        x = follows(value(g))
        return {"m": 0.9 * s["m"] + x, "v": 0.5 * s["v"] - x}

    matrix = [vector(i, _SIDE * _SIDE).reshape(_SIDE, _SIDE) for i in range(3)]
    assert_replays(analyse(step, {"m": matrix[0], "v": matrix[1]}, matrix[2]))


def test_a_root_may_be_cut_where_nothing_merges_with_it():
    def step(s, g):
        x = jnp.sqrt(g)
        return {"m": 0.9 * s["m"] + 0.3 * x, "v": 0.5 * s["v"] - s["m"] * x}

    found = analyse(step, state("m", "v"), jnp.abs(gradient()))
    assert len(found.cut.groups) == 1
    assert_replays(found)


# Sharing of compilations.


def test_equal_updates_have_equal_recipes():
    def step(s, g, h):
        a = adam({"m": s["am"], "v": s["av"], "w": s["aw"]}, g)
        b = adam({"m": s["bm"], "v": s["bv"], "w": s["bw"]}, h)
        return {"am": a["m"], "av": a["v"], "aw": a["w"], "bm": b["m"], "bv": b["v"], "bw": b["w"]}

    small, large = state("m", "v", "w"), {k: vector(i, 77) for i, k in enumerate("mvw")}
    first = {f"a{k}": x for k, x in small.items()} | {f"b{k}": x for k, x in large.items()}
    one, other = recipes_of(analyse(step, first, gradient(), vector(9, 77)))
    assert one == other
    assert hash(one) == hash(other)
    assert (one.num_states, one.num_retained, one.num_scalars) == (2, 1, 0)


def test_equal_recipes_across_traces_and_other_constants_differ():
    def step(factor):
        return lambda s, g: {"m": factor * s["m"] + g, "w": s["w"] - g}

    made = [recipes_of(analyse(step(f), state("m", "w"), gradient()))[0] for f in (0.9, 0.9, 0.8)]
    assert made[0] == made[1]
    assert hash(made[0]) == hash(made[1])
    assert made[0] != made[2]


@pytest.mark.parametrize("value", [-0.0, np.nan, np.inf, -1e-37])
def test_constants_are_held_by_their_bits(value):
    """-0.0 equals 0.0 and NaN equals nothing, as numbers."""

    def step(s, g):
        chosen = jnp.where(g > 0.0, s["m"], jnp.float32(value))
        return {"m": chosen, "u": s["u"] + g}

    found = analyse(step, state("m", "u"), gradient())
    (recipe,) = recipes_of(found)
    constants = {o.data for i in recipe.instructions for o in i.operands if isinstance(o, Constant)}
    assert np.float32(value).tobytes() in constants
    assert recipe == recipes_of(analyse(step, state("m", "u"), gradient()))[0]
    assert_replays(found)


def test_sign_of_zero_tells_constants_apart():
    zeros = Constant("float32", np.float32(0.0).tobytes())
    assert zeros != Constant("float32", np.float32(-0.0).tobytes())
    assert np.signbit(Constant("float32", np.float32(-0.0).tobytes()).value())
    assert Constant("bfloat16", jnp.bfloat16(1.5).tobytes()).value() == jnp.bfloat16(1.5)


# Special recipes.


def test_frozen_leaves_are_the_identity():
    update = UPDATES["frozen"]
    found = analyse(update.step, update.state, gradient())
    frozen, moving = recipes_of(found)
    assert frozen.is_identity
    assert not moving.is_identity
    (same,) = frozen.apply([jnp.ones(3)], [], [])
    np.testing.assert_array_equal(same, np.ones(3))


def test_swapped_leaves_are_not_the_identity():
    """A target network that takes the other's place, old value for old value."""
    found = analyse(lambda s, g: {"a": s["b"], "b": s["a"]}, state("a", "b"), gradient())
    (recipe,) = recipes_of(found)
    assert not recipe.is_identity
    assert recipe.num_retained == 0
    assert_replays(found)


def test_leaf_reset_to_a_constant():
    found = analyse(
        lambda s, g: momentum({"m": s["m"], "w": s["w"]}, g) | {"acc": jnp.zeros(N)},
        state("acc", "m", "w"), gradient(),
    )  # fmt: skip
    assert ["acc"] in found.groups
    assert_replays(found, PARTS)


def test_nan_and_infinite_chunks_go_through():
    update = UPDATES["skip step"]
    first = {k: x.at[3].set(jnp.nan).at[4].set(jnp.inf) for k, x in update.state.items()}
    assert_replays(analyse(update.step, first, gradient()))
    assert_replays(analyse(update.step, first, gradient().at[0].set(jnp.inf)))  # skipped


@pytest.mark.parametrize("mode", lax.RoundingMethod)
def test_operations_keep_their_parameters(mode):
    def step(s, g):
        m = lax.round(s["m"] * 0.5 + g, mode)
        return {"m": m, "w": s["w"] + m}

    found = analyse(step, {k: jnp.arange(float(N)) for k in "mw"}, jnp.floor(gradient()))
    assert found.groups == [["m", "w"]]
    assert_replays(found)


def test_recipes_say_nothing_of_the_training_mesh():
    """A chunk of what was on eight devices is replayed on one."""
    spread = NamedSharding(_MESH, PartitionSpec("x"))

    def step(s, g):
        m = s["m"].astype(jnp.float32) * 0.5 + g
        return {"m": m.astype(jnp.bfloat16, device=spread), "u": s["u"] - g}

    found = analyse(step, {"m": gradient().astype(jnp.bfloat16), "u": gradient()}, gradient())
    (recipe,) = [r for r in recipes_of(found) if len(r.instructions) > 1]
    placed = [dict(i.params) for i in recipe.instructions if i.name == "convert_element_type"]
    assert [params["sharding"] for params in placed] == [None] * 2
    assert_replays(found, PARTS)
