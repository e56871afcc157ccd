"""Where updates are cut."""

from __future__ import annotations

import collections
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from training_helpers import N, analyse, vector
from updates import UPDATES, adam, gradient, momentum, state

from gockpt_jax import _compat
from gockpt_jax.training import merging
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.markers import mark_gradients
from gockpt_jax.training.program import StepProgram

every_update = pytest.mark.parametrize("name", UPDATES)


@every_update
def test_groups_and_retained_values(name):
    update = UPDATES[name]
    g = gradient()
    found = analyse(update.step, update.state, g)
    assert found.groups == update.groups
    assert sum(len(group.scalars) for group in found.cut.groups) == update.scalars
    _, arrays = found.run()
    large = [arrays[v] for group in found.cut.groups for v in group.retained]
    # Compiled alone, the formula may round differently from the step by an ULP or so.
    expected = jax.jit(update.retained)(update.state, g)
    assert len(large) == len(expected)
    for got, want in zip(large, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@every_update
def test_every_leaf_is_early_or_late_with_a_reason(name):
    update = UPDATES[name]
    found = analyse(update.step, update.state, gradient())
    early = {path for group in found.groups for path in group}
    assert early.isdisjoint(found.late)
    assert early | found.late.keys() == {leaf.path for leaf in found.leaves}
    for path, reason in update.late.items():
        assert re.search(reason, found.late[path])


def test_retained_values_have_the_shape_of_their_leaves_and_scalars_none():
    update = UPDATES["skip step"]
    (group,) = analyse(update.step, update.state, gradient()).cut.groups
    assert [v.shape for v in group.retained] == [(N,)]
    assert [v.shape for v in group.scalars] == [()]


def test_the_same_cut_each_time():
    update = UPDATES["optax.adamw"]
    runs = [analyse(update.step, update.state, gradient()) for _ in range(2)]
    assert runs[0].groups == runs[1].groups
    positions = [[v.site.path for v in run.cut.values] for run in runs]
    assert positions[0] == positions[1]


# Gains: what leaves over what must follow it.


def sgd(s, g):
    return {"w": s["w"] - 0.1 * g}


@pytest.mark.parametrize(
    ("min_gain", "even_for_nothing", "early"),
    [(1.2, False, False), (1.2, True, True), (1.0, False, True)],
)
def test_leaf_that_saves_nothing_leaves_only_when_asked(min_gain, even_for_nothing, early):
    found = analyse(
        sgd, state("w"), gradient(), min_gain=min_gain, even_for_nothing=even_for_nothing
    )
    assert found.groups == ([["w"]] if early else [])
    if not early:
        assert re.search(r"1\.00 times what it retains, under 1\.20", found.late["w"])


def test_even_for_nothing_changes_nothing_where_something_gains():
    """The moments gain twice their gradient; the parameter would retain an array for itself."""
    found = analyse(adam, state("m", "v", "w"), gradient(), even_for_nothing=True)
    assert found.groups == [["m", "v"]]


def test_scalars_count_for_nothing_where_a_leaf_gains_nothing():
    def step(s, g, rate, scale):
        return {"w": s["w"] - rate * (scale * g)}

    given = state("w"), gradient(), jnp.float32(0.1), jnp.float32(0.3)
    found = analyse(step, *given, even_for_nothing=True)
    assert found.groups == [["w"]]
    assert len(found.cut.groups[0].scalars) == 2


@pytest.mark.parametrize(("min_gain", "groups"), [(2.0, [["m", "w"]]), (2.1, [])])
def test_gain_is_bytes_over_retained_bytes(min_gain, groups):
    found = analyse(momentum, state("m", "w"), gradient(), min_gain=min_gain)
    assert found.groups == groups


def test_leaves_that_become_one_value_gain_together():
    def step(s, g):
        new = 0.9 * s["a"] + g
        return {"a": new, "b": new}

    assert analyse(step, state("a", "b"), gradient(), min_gain=1.5).groups == [["a", "b"]]


def test_narrow_gradients_count_as_what_they_weigh():
    """A bf16 gradient is half as heavy, so even plain SGD gains, and it is retained narrow."""

    def step(s, g):
        return sgd(s, g.astype(jnp.float32))

    found = analyse(step, state("w"), gradient().astype(jnp.bfloat16))
    assert found.groups == [["w"]]
    assert [str(v.dtype) for v in found.cut.values] == ["bfloat16"]


SCHEDULES = {
    "cosine": optax.cosine_decay_schedule(0.1, 100),
    "warm cosine": optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100),
    "linear": optax.linear_schedule(0.1, 0.0, 100),
    "exponential": optax.exponential_decay(0.1, 10, 0.9),
    "inverse root": lambda count: 0.1 * (count + 1.0) ** -0.5,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_of_the_usual_schedules_are_captured(schedule):
    """Optax takes a cosine to the power of one, which compilers erase."""
    tx = optax.sgd(SCHEDULES[schedule], momentum=0.9)

    def step(s, g):
        updates, opt = tx.update(g, s["opt"], s["w"])
        return {"opt": opt, "w": optax.apply_updates(s["w"], updates)}

    start = {"opt": tx.init(vector(0)), "w": vector(0)}
    found = analyse(step, start, gradient(), even_for_nothing=True)
    assert any("w" in path for group in found.groups for path in group), found.late
    new, cut = found.run()
    for j, leaf in found.replayed(cut):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(new[j]))


# Leaves that depend on each other.


def test_a_rate_that_the_host_is_asked_for_is_captured():
    """Though it is made of nothing, it is no constant."""

    def step(s, g):
        rate = jax.pure_callback(lambda: np.float32(0.1), jax.ShapeDtypeStruct((), np.float32))
        return {"m": 0.9 * s["m"] + rate * g, "w": s["w"] - rate * g}

    found = analyse(step, state("m", "w"), gradient())
    assert found.groups == [["m", "w"]]
    assert [v.op.name for v in found.cut.values if v.op] == ["pure_callback"]


def test_leaf_that_reads_a_failing_leaf_fails_with_it():
    """`b` reads `a`, `a` reads `p`, and `p` cannot leave: retaining `p` for `a` saves nothing."""

    def step(s, g):
        return {"a": s["a"] + s["p"], "p": jnp.exp(s["p"]), "q": s["q"] * 2.0 + 0.0 * g}

    found = analyse(step, state("a", "p", "q"), gradient())
    assert found.groups == []
    assert "saves too little: it is 1.00 times what it retains" in found.late["a"]


def test_what_reads_itself_again_and_again_is_walked_through_once():
    def step(s, g):
        m = s["m"]
        for _ in range(60):
            m = jnp.where(g > 0, m, -m)
        return {"m": m}

    assert analyse(step, state("m"), gradient(), even_for_nothing=True).groups == [["m"]]


def test_leaves_that_read_each_other_are_one_group_and_others_are_not():
    """`a` reads old `b`; `c` shares nothing with them, not even the gradient."""

    def step(s, g, h):
        a = 0.9 * s["a"] + s["b"]
        return {"a": a, "b": s["b"] + g, "c": s["c"] + h, "d": s["d"] - h}

    found = analyse(step, state("a", "b", "c", "d"), gradient(0), gradient(1))
    assert found.groups == [["a", "b"], ["c", "d"]]


def test_a_leaf_whose_new_value_is_retained_for_others_leaves_with_them():
    """A gradient that is kept for the next step, as Adan and optimistic gradient descent do."""

    def step(s, g):
        kept = jnp.tanh(g)
        m = 0.9 * s["m"] + 0.1 * kept
        return {"kept": kept, "m": m, "w": s["w"] - 0.1 * (kept - s["kept"])}

    found = analyse(step, state("kept", "m", "w"), gradient())
    assert found.groups == [["kept", "m", "w"]]
    assert [v.shape for v in found.cut.values] == [(N,)]
    new, cut = found.run()
    for j, leaf in found.replayed(cut, None):
        np.testing.assert_array_equal(leaf, new[j])


@pytest.mark.parametrize("even_for_nothing", [False, True])
def test_a_leaf_is_not_retained_for_itself(even_for_nothing):
    def step(s, g):
        return {"w": jnp.tanh(s["w"] * g)}

    found = analyse(step, state("w"), gradient(), even_for_nothing=even_for_nothing)
    assert found.groups == []
    assert "comes out of `tanh`" in found.late["w"]


def test_groups_are_in_the_order_of_their_first_leaves():
    """Also where those that share a gradient part again: each adds something to it first."""

    def step(s, g, h, x, y):
        return {"a": s["a"] + (g + x), "b": s["b"] + h, "c": s["c"] + (g + y)}

    given = state("a", "b", "c"), *map(gradient, range(4))
    assert analyse(step, *given, even_for_nothing=True).groups == [["a"], ["b"], ["c"]]
    assert "it is 1.00 times what it retains" in analyse(step, *given).late["a"]


def test_a_scalar_that_groups_share_is_sent_once():
    def step(s, g, h, rate):
        return {"a": s["a"] + rate * g, "b": s["b"] + rate * h}

    given = state("a", "b"), gradient(0), gradient(1), jnp.float32(0.1)
    cut = analyse(step, *given, even_for_nothing=True).cut
    assert [len(group.scalars) for group in cut.groups] == [1, 1]
    assert [v.shape for v in cut.values] == [(N,), (N,), ()]


def test_what_the_host_can_make_itself_does_not_join_groups():
    """The ones that a sum's gradient begins with are one value, shared by all leaves."""

    def step(s, g, h):
        ones = jnp.ones(N) * 1.5
        return {"a": s["a"] + ones * g, "b": s["b"] + ones * h, "c": s["c"] - g, "d": s["d"] - h}

    found = analyse(step, state("a", "b", "c", "d"), gradient(0), gradient(1))
    assert found.groups == [["a", "c"], ["b", "d"]]


def test_a_leaf_that_becomes_another_type_is_late_and_so_is_one_of_no_elements():
    def step(s, g):
        new = momentum({"m": s["m"], "w": s["w"]}, g)
        return {"narrow": (s["narrow"] - g).astype(jnp.bfloat16), "none": s["none"] + 1.0, **new}

    first = state("m", "narrow", "w") | {"none": jnp.zeros(0)}
    found = analyse(step, first, gradient())
    assert found.groups == [["m", "w"]]
    assert "from float32[24] to bfloat16[24]" in found.late["narrow"]


def test_typed_key_is_late_and_the_rest_is_not():
    def step(s, g):
        new = momentum({"m": s["m"], "w": s["w"]}, g)
        return {"key": jax.random.split(s["key"], 1)[0], **new}

    found = analyse(step, state("m", "w") | {"key": jax.random.key(0)}, gradient())
    assert found.groups == [["m", "w"]]
    assert "key" in found.late["key"]


def test_a_step_that_may_be_skipped_leaves_early_beside_a_key():
    def step(s, g):
        def update():
            new = momentum({"m": s["m"], "w": s["w"]}, g)
            return {"key": jax.random.split(s["key"], 1)[0], **new}

        return lax.cond(jnp.all(jnp.isfinite(g)), update, lambda: s)

    found = analyse(step, state("m", "w") | {"key": jax.random.key(0)}, gradient())
    assert found.groups == [["m", "w"]]
    new, cut = found.run()
    for j, leaf in found.replayed(cut):
        np.testing.assert_array_equal(leaf, new[j])


@pytest.mark.parametrize("where", ["new state", "old and new state"])
def test_a_state_that_is_told_its_place_leaves_early_as_without(where):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))

    def placed(tree):
        place = NamedSharding(mesh, PartitionSpec("a"))
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, place), tree)

    def step(s, g):
        return placed(momentum(placed(s) if where != "new state" else s, placed(g)))

    found = analyse(step, state("m", "w"), gradient())
    assert found.groups == [["m", "w"]]
    assert [v.op.name for v in found.cut.values] == ["sharding_constraint"]


def test_what_is_retained_of_a_late_leaf_may_be_told_its_place():
    """Two averages of a parameter: its old value is retained, as it went in."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("a"))

    def step(s, x):
        w = lax.with_sharding_constraint(s["w"], place)
        return {"a": 0.9 * s["a"] + 0.1 * w, "b": 0.5 * s["b"] + 0.5 * w, "w": w / (1 + x * x)}

    found = analyse(step, state("a", "b", "w"), gradient())
    assert found.groups == [["a", "b"]]
    new, cut = found.run()
    for j, leaf in found.replayed(cut):
        np.testing.assert_array_equal(leaf, new[j])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_one_that_a_gradient_begins_with_may_be_put_on_a_mesh(axis_type):
    place = NamedSharding(jax.make_mesh((2,), ("a",), axis_types=(axis_type,)), PartitionSpec("a"))

    def step(s, x):
        g = jax.grad(lambda w: jnp.sum(jnp.cosh(w + x)))(s["w"])
        return momentum(s, g)

    placed = jax.device_put((state("m", "w"), gradient()), place)
    assert analyse(step, *placed).groups == [["m", "w"]]


def test_a_new_state_that_is_named_leaves_early_as_without():
    def step(s, g):
        return mark_gradients(momentum(s, g))

    assert analyse(step, state("m", "w"), gradient()).groups == [["m", "w"]]


def test_numbers_of_less_than_a_byte_are_neither_replayed_nor_retained():
    """The programs of replay refuse them; what does not change leaves as it is."""

    def step(s, g):
        codes = jnp.round(g).astype(jnp.int4)
        new = momentum({"m": s["m"], "w": s["w"]}, codes.astype(jnp.float32))
        return {"codes": s["codes"] + codes, "kept": s["kept"], **new}

    packed = {k: jnp.zeros(N, jnp.int4) for k in ("codes", "kept")}
    found = analyse(step, state("m", "w") | packed, gradient())
    assert found.groups == [["kept"], ["m", "w"]]
    assert "less than a byte" in found.late["codes"]
    assert [v.dtype for v in found.cut.values] == [jnp.float32]


def test_row_means_of_factored_optimizers_stay_small_leaves():
    """What is spread from a row to a matrix is not elementwise: the leaf is late, never wrong."""

    def step(s, g):
        row = 0.9 * s["row"] + 0.1 * jnp.mean(g * g, axis=1)
        return {"row": row, "w": s["w"] - g * row[:, None]}

    matrix = vector(0, 16).reshape(4, 4)
    found = analyse(step, {"row": jnp.ones(4), "w": matrix}, matrix)
    assert found.groups == []
    assert found.late.keys() == {"row", "w"}


OF_AN_EMBEDDING = {
    "alone": lambda scattered, g: scattered,
    "marked": lambda scattered, g: mark_gradients(scattered),
    "tied": lambda scattered, g: scattered + g,
    "a mean of one": lambda scattered, g: scattered / 1.0,
    "chosen for certain": lambda scattered, g: jnp.where(True, scattered, 0.0),
    "reshaped and back": lambda scattered, g: scattered.reshape(4, -1).reshape(-1),
    "stacked alone": lambda scattered, g: jnp.stack([scattered])[0],
    "a mean over one": lambda scattered, g: jnp.mean(jnp.stack([scattered]), 0),
    "negated twice": lambda scattered, g: jnp.negative(-scattered),
    "split and joined": lambda scattered, g: jnp.concatenate(jnp.split(scattered, 2)),
}


def twice(s, g):
    return {"m": 0.9 * s["m"] + g, "w": s["w"] - g}


@pytest.mark.parametrize("name", OF_AN_EMBEDDING)
@pytest.mark.parametrize(("update", "groups"), [(adam, [["m", "v"]]), (twice, [])])
def test_what_an_embedding_scatters_is_cut_in_front_of_a_product_alone(update, groups, name):
    """With a sum that it feeds, XLA makes one scatter of it (`scatters`)."""
    rows = jnp.array([1, 5, 1])

    def step(s, g):
        return update(s, OF_AN_EMBEDDING[name](jnp.zeros(N).at[rows].add(g[:3]), g))

    names = ("m", "v", "w") if update is adam else ("m", "w")
    assert analyse(step, state(*names), gradient()).groups == groups


def test_the_sum_of_what_an_embedding_scatters_is_retained_if_it_is_a_leafs_own():
    def step(s, g):
        return momentum(s, jnp.zeros(N).at[jnp.array([1, 5, 1])].add(g[:3]))

    found = analyse(step, state("m", "w"), gradient())
    assert found.groups == [["m", "w"]]
    assert found.cut.values == (found.leaves[0].new,)


@pytest.mark.parametrize(
    ("given", "between"),
    [
        (jnp.zeros((4, 6)), lambda scattered: scattered.reshape(-1)),
        (jnp.zeros((6, 4)), lambda scattered: scattered.T.reshape(-1)),
        (jnp.zeros((N, 1)), lambda scattered: scattered[:, 0]),
        (jnp.zeros(N, jnp.bfloat16), lambda scattered: scattered.astype(jnp.float32)),
        (jnp.zeros(N), lax.optimization_barrier),
    ],
)
def test_what_was_scattered_otherwise_than_it_is_added_leaves_early(given, between):
    """XLA does not see it from the sum: training is the same where it is returned."""
    rows = jnp.array([1, 3, 1, 1, 1, 3, 3, 3])

    def step(s, x):
        rest = (1,) * (given.ndim - 1)
        each = jnp.sin(x[:8]).reshape(-1, *rest).astype(given.dtype)
        return momentum(s, between(given.at[rows].add(each)))

    found = analyse(step, state("m", "w"), gradient())
    assert found.groups == [["m", "w"]]
    new, cut = found.run()
    for j, leaf in found.replayed(cut):
        np.testing.assert_array_equal(leaf, new[j])
    for leaf, own in zip(new, jax.tree.leaves(found.step(*found.args)), strict=True):
        np.testing.assert_array_equal(leaf, own)


def test_what_a_compiler_makes_one_of_is_retained_behind_that():
    """The larger of two `tanh` becomes the `tanh` of the larger, unless these are returned."""

    def step(s, x, y):
        one, other = jnp.tanh(x), jnp.tanh(y)
        return {"m": 0.9 * s["m"] + jnp.maximum(one, other), "w": 0.9 * s["w"] + (one - other)}

    found = analyse(step, state("m", "w"), gradient(0), gradient(1), even_for_nothing=True)
    assert [v.op.name for v in found.cut.values] == ["max", "sub"]


@pytest.mark.parametrize(("rows", "early"), [(4, [["row"], ["v"]]), (1, [["v"]])])
def test_a_row_that_a_sum_spreads_itself_makes_its_leaf_late(rows, early):
    """`lax.add` takes rows of one element: of them a chunk of the matrix has some, or none."""

    def step(s, g):
        row = 0.9 * s["row"] + g[:rows, :1]
        return {"row": row, "v": s["v"] + g, "w": lax.add(lax.sub(s["w"], g), s["row"])}

    matrix = vector(0, 16).reshape(4, 4)
    first = {"row": jnp.ones((rows, 1)), "v": matrix, "w": matrix}
    assert analyse(step, first, matrix, even_for_nothing=True).groups == early


def test_a_mark_in_a_branch_ends_no_walk():
    """What was marked can be had from in front of the branch, which stays as it is."""

    def step(s, g):
        is_finite = jnp.isfinite(jnp.sum(g))
        return lax.cond(is_finite, lambda: momentum(s, mark_gradients(g)), lambda: s)

    found = analyse(step, state("m", "w"), gradient())
    assert found.groups == [["m", "w"]]
    assert not any(value.site.is_in_branch for value in found.cut.values)


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_branch_is_opened_only_where_nothing_in_front_of_it_or_behind_does(rounds):
    """A gradient that a branch makes can be had from behind it, for the same price.

    What tells which branch it was is captured anyway.
    """

    def step(s, g):
        is_positive = g[0] > 0
        for _ in range(rounds):
            g = lax.cond(is_positive, lambda g=g: jnp.cos(g), lambda g=g: jnp.zeros_like(g))
        return lax.cond(is_positive, lambda: adam(s, g), lambda: s)

    found = analyse(step, state("m", "v", "w"), gradient())
    assert found.groups == [["m", "v"]]
    (retained,) = (v for v in found.cut.values if v.shape)
    assert retained.site.path == ()


def test_a_mark_in_a_block_that_is_computed_again_ends_no_walk():
    """Nothing can be read within it."""

    def step(s, g):
        return jax.checkpoint(lambda s: momentum(s, mark_gradients(g)))(s)

    assert analyse(step, state("m", "w"), gradient()).groups == [["m", "w"]]


# The size of real models.


def test_twelve_hundred_leaves_in_under_ten_seconds():
    """400 parameters with Adam's moments under a global clip: seconds, not minutes."""
    params = {f"p{i:03}": jnp.ones((i % 7 + 2, 3)) for i in range(400)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(s, x):
        grads = jax.grad(lambda p: sum(jnp.sum(jnp.sin(a * x)) for a in jax.tree.leaves(p)))(s[0])
        updates, opt = tx.update(grads, s[1], s[0])
        return optax.apply_updates(s[0], updates), opt

    jitted = jax.jit(step)
    args = ((params, tx.init(params)), jnp.float32(0.5))
    jitted.trace(*args)  # the user's own trace, which the wrapped step shares
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    # CPU time of this thread: the machine may be busy with other tests.
    start = time.thread_time()
    program = StepProgram(jitted.trace(*args), form, args, {}, even_for_nothing=False)
    seconds = time.thread_time() - start
    assert len(program.positions.paths) >= 1200
    assert len(program.cut.groups) == 400
    assert all(len(group.leaves) == 2 for group in program.cut.groups)
    assert sum(len(group.retained) for group in program.cut.groups) == 400
    assert len({group.recipe for group in program.cut.groups}) == 1  # one compilation for all
    assert seconds < 10


def test_what_many_leaves_come_out_of_is_judged_once(monkeypatch):
    """Gradients that were one vector, in which a compiler sees each of them from each leaf."""
    asked = collections.Counter()

    def computes_apart(op):
        asked[op] += 1
        return False

    def step(s, g):
        halved = jnp.concatenate([jnp.tanh(g + n).reshape(-1) for n in range(30)]) * 0.5
        return {k: 0.9 * old + halved[n * N : (n + 1) * N] for n, (k, old) in enumerate(s.items())}

    monkeypatch.setattr(merging, "computes_apart", computes_apart)
    first = state(*(f"m{n:02}" for n in range(30)))
    found = analyse(step, first, gradient(), even_for_nothing=True)
    assert len(found.groups) == 30
    assert max(asked.values()) <= 4


@pytest.mark.parametrize(
    ("update", "why"),
    [
        (lambda w, g: lax.cond(g[0] > 0, lambda: w * 0.3, lambda: w * 0.7), "a choice between br"),
        (lambda w, g: (w * 0.9) * 0.3, "`mul`, which a compiler may make one with what is bef"),
        (lambda w, g: (w + 0.9) + 0.3, "`add`, which a compiler may make one with what is bef"),
        (lambda w, g: w / g, "`div` on float32, which the host does not repeat exactly"),
        (lambda w, g: w + g[:1], "`add`, which is not elementwise: the host repeats nothing else"),
        (lambda w, g: jnp.flip(w * g), "`rev`, which is not elementwise"),
        (lambda w, g: w.at[0].set(1.0), "`scatter`, which is not elementwise"),
        (lambda w, g: g, "an argument that the host will not have"),
        (
            lambda w, g: lax.fori_loop(0, 3, lambda _, x: x + g, w),
            "a loop (`scan`), within which nothing can be cut",
        ),
        (
            lambda w, g: lax.while_loop(lambda x: x[0] < 1.0, lambda x: x + g, w),
            "a loop (`while`), within which nothing can be cut",
        ),
    ],
)
def test_what_a_leaf_comes_out_of_is_told_as_it_is(update, why):
    """What the host could repeat, but a compiler may make something else of, is not inexact."""

    def step(state, g):
        return {"w": update(state["w"], g)}

    found = analyse(step, {"w": vector(0)}, vector(1))
    assert f"its new value comes out of {why}" in found.late["w"]
