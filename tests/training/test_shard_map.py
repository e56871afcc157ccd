"""A whole step inside `jax.shard_map`: the cut lies in its body, and comes out shard by shard."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gockpt_jax import _compat
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.program import StepProgram

AXES = ("a", "b")


def gradient(x, w):
    """As sharded steps make it: of its own rows from the rows of all, else the mean of all."""
    g = jnp.tanh(x)
    if w.shape == x.shape:
        return lax.pmean(g, AXES)
    return lax.psum_scatter(g, AXES, tiled=True)


def momentum(state, x):
    g = gradient(x, state["w"])
    m = 0.9 * state["m"] + 0.25 * g
    return {"m": m, "v": 0.5 * state["v"] + g, "w": state["w"] - 0.5 * m}


def norm_of_all(state, x):
    """Of the whole gradient: the same on all devices, so it is captured."""
    g = gradient(x, state["w"])
    bad = lax.psum(jnp.sum(g * g), AXES) > 1e9
    kept = jax.jit(lambda new, old: jnp.where(bad, old, new))  # a call in the body
    m, v = 0.9 * state["m"] + 0.25 * g, 0.5 * state["v"] + g
    return {"m": kept(m, state["m"]), "v": kept(v, state["v"]), "w": state["w"] - jnp.sin(m)}


WIDTHS = jnp.linspace(0.5, 2.0, 6)


@jax.jit
def around_an_array(state, x):
    """A call in the body, which closes over an array."""
    return momentum(state, x * WIDTHS)


def norm_of_each(state, x):
    """Of each device's own rows: no one number stands for all."""
    g = gradient(x, state["w"])
    bad = jnp.sum(g * g) > 1e9 if state["w"].shape != x.shape else lax.axis_index(AXES) > 99
    m, v = 0.9 * state["m"] + 0.25 * g, 0.5 * state["v"] + g
    pick = functools.partial(jnp.where, bad)
    return {"m": pick(state["m"], m), "v": pick(state["v"], v), "w": state["w"] - jnp.sin(m)}


def placed(spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), AXES)
    sharding = NamedSharding(mesh, spec)
    state = {k: np.random.default_rng(n).random((16, 6), np.float32) for n, k in enumerate("mvw")}
    x = np.random.default_rng(9).random((16, 6), np.float32)
    return mesh, jax.device_put(state, sharding), jax.device_put(x, NamedSharding(mesh, P()))


def traced(jitted, *args):
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    return StepProgram(jitted.trace(*args), form, args, {}, even_for_nothing=False)


def program_of(jitted, *args):
    program = traced(jitted, *args)
    program.arm()
    program.wait_until_ready()
    assert program.why_not_ready() is None
    return program


def early(program):
    return {program.positions.paths[j] for group in program.cut.groups for j in group.leaves}


SPECS = [P(AXES), P(AXES, None), P(), P(None, None)]


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(
    ("step", "scalars"), [(momentum, 0), (around_an_array, 0), (norm_of_all, 1)]
)
def test_what_leaves_early_is_repeated_from_the_cut(step, scalars, spec, check_vma):
    mesh, state, x = placed(spec)
    specs = dict.fromkeys(state, spec)
    same = dict.fromkeys(state, P(*filter(None, spec)))  # as others write it
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(same, P()), out_specs=specs, check_vma=check_vma
    )
    jitted = jax.jit(mapped)
    program = program_of(jitted, state, x)
    new, _, cut = program.call((state, x), {})
    jax.tree.map(np.testing.assert_array_equal, new, jitted(state, x))
    assert early(program) >= {"['m']", "['v']"}
    old, new = jax.tree.leaves(state), jax.tree.leaves(new)
    for group in program.cut.groups:
        retained = [cut[i] for i in group.retained]
        assert [v.sharding.is_equivalent_to(old[0].sharding, 2) for v in retained] == [True]
        assert [program.cut.arrays[i].shape for i in group.retained] == [(16, 6)]
        assert len(group.scalars) == scalars
        host = jax.device_get(([old[j] for j in group.leaves], retained))
        got = group.recipe.apply(*host, [jax.device_get(cut[i]) for i in group.scalars])
        for value, j in zip(got, group.leaves, strict=True):
            np.testing.assert_array_equal(value, new[j])


@pytest.mark.parametrize("spec", [P(AXES), P()], ids=str)
def test_a_number_of_each_devices_own_is_not_captured(spec):
    """It is gone round, or the leaf is late: what is captured is the same on all devices."""
    mesh, state, x = placed(spec)
    specs = dict.fromkeys(state, spec)
    jitted = jax.jit(
        jax.shard_map(norm_of_each, mesh=mesh, in_specs=(specs, P()), out_specs=specs,
                      check_vma=False)
    )  # fmt: skip
    program = program_of(jitted, state, x)
    assert all(not group.scalars for group in program.cut.groups)
    assert early(program) == set()


OF_ALL = {
    "sum": lambda n, axes: lax.psum(n, axes),
    "largest": lambda n, axes: lax.pmax(n, axes),
    "least": lambda n, axes: lax.pmin(n, axes),
    "the fourth's": lambda n, axes: lax.all_gather(n, axes)[3],
}
OF_EACH = {
    "its own": lambda n, axes: n,
    "sum along one axis": lambda n, axes: lax.psum(n, axes[1:]),
    "its neighbour's": lambda n, axes: lax.ppermute(n, axes, [(i, i - 1) for i in range(1, 8)]),
    "exchanged": lambda n, axes: lax.all_to_all(jnp.arange(8) * n, axes, 0, 0, tiled=True)[1],
    "scattered": lambda n, axes: lax.psum_scatter(jnp.arange(8) * n, axes, tiled=True)[0],
    "place": lambda n, axes: lax.axis_index(axes[0]) * 1.0,
    "place, from a loop": lambda n, axes: lax.fori_loop(
        0, 3, lambda _, c: c + lax.axis_index(axes[0]), 0
    ),
    "after one turn": lambda n, axes: lax.scan(
        lambda c, _: (2.0 * c, None), jnp.full(2, n), length=1
    )[0][0],
    "a host's": lambda n, axes: jax.pure_callback(
        np.negative, jax.ShapeDtypeStruct((), np.float32), lax.psum(n, axes)
    ),
    "sum in groups": lambda n, axes: lax.psum(
        n, axes[0], axis_index_groups=[[0, 1], [2, 3], [4, 5], [6, 7]][: 4 // len(axes)]
    ),
}


@pytest.mark.parametrize("axes", [("a",), AXES], ids=len)
@pytest.mark.parametrize("name", [*OF_ALL, *OF_EACH])
def test_a_number_is_captured_if_it_is_the_same_on_all_devices(name, axes):
    mesh = Mesh(np.array(jax.devices()).reshape((4, 2) if axes == AXES else 8), axes)

    def step(state, x):
        g = jnp.tanh(x)
        bad = (OF_ALL | OF_EACH)[name](jnp.sum(g), axes) > 1e9
        return {k: jnp.where(bad, old, 0.9 * old + g) for k, old in state.items()}

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    rows = jnp.ones((16, 6))
    program = traced(jax.jit(mapped), {"m": rows, "v": rows}, rows)  # jax 0.7 compiles not all
    assert [len(group.scalars) for group in program.cut.groups] == [1] * (name in OF_ALL)


def test_a_number_that_is_of_each_device_by_its_type_is_not_captured():
    """It is the same on all, but a checked `shard_map` returns no such number as one."""
    mesh, state, x = placed(P(AXES))

    def step(state, x):
        g = jnp.tanh(x)
        bad = OF_ALL["the fourth's"](jnp.sum(g), AXES) > 1e9
        return {k: jnp.where(bad, old, 0.9 * old + g) for k, old in state.items()}

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES))
    program = traced(jax.jit(mapped), state, jax.device_put(x, state["m"].sharding))
    assert not any(group.scalars for group in program.cut.groups)


@pytest.mark.parametrize("is_summed", [False, True])
def test_all_devices_are_those_along_the_axes_that_it_maps_over(is_summed):
    """Along the others it sees no shards."""
    mesh, state, x = placed(P("a"))

    def step(state, x):
        g = jnp.tanh(x)
        size = lax.psum(jnp.sum(g), "a") if is_summed else jnp.sum(g)
        return {k: jnp.where(size > 1e9, old, 0.9 * old + g) for k, old in state.items()}

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False, axis_names={"a"}
    )
    x = jax.device_put(x, state["m"].sharding)
    (mapping,) = jax.jit(mapped).trace(state, x).jaxpr.eqns
    is_told = "newly_manual_axes" in mapping.params  # jax 0.7 has another name for them
    program = traced(jax.jit(mapped), state, x)
    assert [len(group.scalars) for group in program.cut.groups] == [1] * (is_summed and is_told)


def test_what_goes_in_is_retained_as_it_goes_in():
    """A gradient is; a constant that it closes over needs not be, though it goes in too."""
    mesh, state, x = placed(P(AXES))
    decay = jnp.float32(0.9)

    def update(state, g):
        return {k: decay * old + g for k, old in state.items()}

    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False
    )  # fmt: skip
    step = jax.jit(lambda state, x: mapped(state, jnp.tanh(x)))
    x = jax.device_put(x, state["m"].sharding)
    program = program_of(step, state, x)
    assert early(program) == {"['m']", "['v']", "['w']"}
    new, _, (g,) = program.call((state, x), {})
    assert g.shape == x.shape
    for k, old in state.items():
        np.testing.assert_array_equal(decay * old + g, new[k])


@pytest.mark.parametrize("spec", [P(AXES), P()], ids=str)
def test_a_constant_that_is_cut_up_is_another_on_each_device(spec):
    mesh, state, x = placed(P(AXES))

    def update(state, x, limits):
        g = jnp.tanh(x)
        bad = lax.psum(jnp.sum(g), AXES) > limits[0]
        return {k: jnp.where(bad, old, 0.9 * old + g) for k, old in state.items()}

    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=(P(AXES), P(AXES), spec), out_specs=P(AXES), check_vma=False
    )
    step = jax.jit(lambda state, x: mapped(state, x, np.arange(8, dtype=np.float32)))
    program = traced(step, state, jax.device_put(x, state["m"].sharding))
    assert [len(group.scalars) for group in program.cut.groups] == [1] * (spec == P())


def test_a_number_is_captured_that_is_made_outside_of_what_lies_otherwise_on_each_device():
    mesh, state, x = placed(P(AXES))
    mapped = jax.shard_map(
        jnp.tanh, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False
    )

    def step(state, x):
        g = mapped(x)
        bad = jnp.sum(g) > 1e9
        return {k: jnp.where(bad, old, 0.9 * old + g) for k, old in state.items()}

    program = program_of(jax.jit(step), state, jax.device_put(x, state["m"].sharding))
    assert [len(group.scalars) for group in program.cut.groups] == [1]


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_number_that_comes_out_is_captured_if_jax_has_checked_it(check_vma):
    """Of what a loop makes we cannot tell; JAX's types can."""
    mesh, state, x = placed(P(AXES))

    def inside(x):
        g = jnp.tanh(x)
        return g, lax.fori_loop(0, 3, lambda _, c: 0.5 * c, lax.psum(jnp.sum(g), AXES))

    mapped = jax.shard_map(
        inside, mesh=mesh, in_specs=P(AXES), out_specs=(P(AXES), P()), check_vma=check_vma
    )

    def step(state, x):
        g, size = mapped(x)
        return {k: jnp.where(size > 1e9, old, 0.9 * old + g) for k, old in state.items()}

    program = program_of(jax.jit(step), state, jax.device_put(x, state["m"].sharding))
    assert [len(group.scalars) for group in program.cut.groups] == [1] * check_vma


THIRD = jnp.float32(0.3)  # a `shard_map` that closes over it takes it as one more argument


def divided(g):
    """XLA multiplies by one constant in place of two."""
    return (g / THIRD) * 7.0


def raised(g):
    """XLA adds one constant in place of two."""
    return (g * g + THIRD) + 7.0


def scattered(g):
    """XLA scatters into the sum, and not into zeros."""
    return g + THIRD


def divided_by(g, third):
    """The same, by a number that comes in as an argument."""
    return (g / third) * 7.0


@pytest.mark.parametrize(
    ("after", "given"),
    [
        *((after, None) for after in (divided, raised, scattered)),
        (divided_by, lambda: jnp.full((16, 6), 0.3)),
        (divided_by, lambda: lax.convert_element_type(np.float16(0.3), jnp.float32)),
    ],
)
def test_the_compiler_sees_no_wall(after, given):
    """What it folds is not cut where a constant, or the gradient, comes from outside."""
    mesh, state, x = placed(P())
    mapped = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=False)
    both = {"m": state["m"], "v": state["v"]}
    rows = jnp.array([1, 0, 1, 3, 1])

    def gradient(x):
        g = jnp.tanh(x)
        return jnp.zeros_like(x).at[rows].add(g[rows]) + x if after is scattered else g

    def update(state, g, *third):
        h = after(g, *third)
        return {k: 0.9 * old + 0.1 * h for k, old in state.items()}

    @jax.jit
    def step(state, x):
        g = mapped(gradient, in_specs=P())(x)
        third = [given()] if given else []
        return mapped(update, in_specs=P())(state, g, *third)

    program = program_of(step, both, x)
    old = jax.tree.leaves(both)
    new, _, cut = program.call((both, x), {})
    jax.tree.map(np.testing.assert_array_equal, new, step(both, x))
    for group in program.cut.groups:
        taken = [[a[i] for i in places] for a, places in (
            (old, group.leaves), (cut, group.retained), (cut, group.scalars)
        )]  # fmt: skip
        got = jax.jit(group.recipe.apply)(*jax.device_get(taken))  # which folds, too
        for value, j in zip(got, group.leaves, strict=True):
            np.testing.assert_array_equal(value, jax.tree.leaves(new)[j])


def added_outside(mapped, state, x):
    """A gradient that comes out of a `shard_map`."""
    return moved(state, mapped(rows_of_each, in_specs=P())(x))


def added_in_another_shape(mapped, state, x):
    """But for what XLA erases: of all shards outside, of one inside."""
    g = mapped(lambda x: rows_of_each(x).reshape(6, 2), in_specs=P())(x)
    return moved(state, g.reshape(16, 6))


def added_inside(mapped, state, x):
    """One that goes into a `shard_map`."""
    g = jnp.zeros_like(x).at[jnp.arange(64) % 5].add(jnp.tanh(jnp.tile(x, (4, 1))))
    return mapped(moved, in_specs=P(AXES))(state, g)


def moved(state, g):
    return state | {"m": 0.9 * state["m"] + g, "w": state["w"] - g}


def rows_of_each(x):
    """As the rows of an embedding, of which each device has some, are given their gradient."""
    each = jnp.tanh(jnp.tile(x, (4, 1)) + lax.axis_index(AXES))
    return jnp.zeros((2, 6)).at[jnp.arange(64) % 2].add(each)


@pytest.mark.parametrize("step", [added_outside, added_in_another_shape, added_inside])
def test_what_is_scattered_on_one_side_is_as_large_as_what_is_added_on_the_other(step):
    """A device has a shard of it there, which the compiler makes one with the sum's."""
    mesh, state, x = placed(P(AXES))
    mapped = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(AXES), check_vma=False)
    jitted, own = jax.jit(functools.partial(step, mapped)), state
    program = program_of(jitted, state, x)
    assert early(program) == {"['v']"}  # which no update changes
    for _ in range(5):
        own, (state, *_) = jitted(own, x), program.call((state, x), {})
    jax.tree.map(np.testing.assert_array_equal, state, own)


def test_a_number_that_jax_types_as_varying_is_not_captured():
    """It is the same, but cannot be returned as one."""
    mesh, state, x = placed(P(AXES))
    specs = dict.fromkeys(state, P(AXES))

    def step(state, x):
        g = gradient(x, state["w"])
        bad = lax.all_gather(jnp.sum(g), AXES)[3] > 1e9
        return {k: jnp.where(bad, old, 0.9 * old + g) for k, old in state.items()}

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=specs)
    assert early(program_of(jax.jit(mapped), state, x)) == set()


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("is_summed", [False, True])
def test_a_scalar_is_as_certain_as_where_it_came_out(is_summed, check_vma):
    """One that is said to be whole, and is not, goes into the next step as it is."""
    mesh, state, x = placed(P(AXES))
    specs = dict.fromkeys(state, P(AXES)) | {"scale": P()}

    def scaled(state, x):
        g, scale = gradient(x, state["w"]), state["scale"]
        size = lax.pmax(jnp.max(g), AXES) if is_summed else jnp.max(g)
        kept = {k: jnp.where(scale > 1e9, state[k], 0.9 * state[k] + g) for k in "mvw"}
        return kept | {"scale": 0.5 * scale + size}

    mapped = jax.shard_map(
        scaled, mesh=mesh, in_specs=(specs, P()), out_specs=specs, check_vma=check_vma
    )
    given = state | {"scale": jax.device_put(1.0, NamedSharding(mesh, P()))}
    if check_vma and not is_summed:
        with pytest.raises(ValueError, match="check_vma"):
            jax.jit(mapped).trace(given, x)
        return
    program = program_of(jax.jit(mapped), given, x)
    assert early(program) == ({"['m']", "['v']", "['w']"} if is_summed else set())


def as_it_is(kept):
    return kept


def through_an_array(kept):
    """Which a loop of one turn makes."""
    return lax.scan(lambda c, _: (~c, None), jnp.full(2, kept), length=1)[0][0]


@pytest.mark.parametrize("way", [as_it_is, through_an_array])
@pytest.mark.parametrize("is_summed", [False, True])
def test_what_is_made_of_an_uncertain_scalar_is_uncertain(is_summed, way):
    """However certain the other is that goes into it."""
    mesh, state, x = placed(P(AXES))

    def size_of(x):
        return lax.psum(jnp.sum(x), AXES) if is_summed else jnp.sum(x)

    mapped = jax.shard_map(
        size_of, mesh=mesh, in_specs=P(AXES), out_specs=P(), check_vma=False
    )  # fmt: skip

    def step(state, x, limit):
        g, kept = jnp.tanh(x), way(mapped(x) > limit)
        return {k: jnp.where(kept, old, 0.9 * old + g) for k, old in state.items()}

    program = program_of(jax.jit(step), state, jax.device_put(x, state["m"].sharding), 1e9)
    assert [len(group.scalars) for group in program.cut.groups] == [1] * is_summed


def test_a_leaf_that_comes_out_otherwise_than_it_went_in_is_late():
    mesh, state, x = placed(P(AXES))
    specs = dict.fromkeys(state, P(AXES))
    out = specs | {"v": P(("b", "a"))}
    mapped = jax.shard_map(momentum, mesh=mesh, in_specs=(specs, P()), out_specs=out)
    program = program_of(jax.jit(mapped), state, x)
    assert "['v']" not in early(program)
    assert "`shard_map`" in program.cut.late[program.positions.paths.index("['v']")]


def test_leaves_that_share_a_gradient_and_lie_differently_are_late():
    """Square shards fit both; the one value that would be retained lies as one of them."""

    def step(state, x):
        g = lax.psum_scatter(jnp.tanh(x), "a", tiled=True)
        return {k: 0.5 * s + g for k, s in state.items()}

    mesh, state, x = placed(P())
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    specs = {"m": P("a"), "v": P(None, "a"), "w": P("a")}
    state = {"m": jnp.ones((16, 4)), "v": jnp.ones((4, 16)), "w": jnp.ones((16, 4))}
    x = jnp.ones((16, 4))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=specs)
    assert early(program_of(jax.jit(mapped), state, x)) == set()


def test_groups_that_share_a_number_alone_may_lie_differently():
    def step(state, x):
        g, h = jnp.tanh(x), jnp.cos(x)
        bad = lax.psum(jnp.sum(g), "a") > 1e9
        return {k: jnp.where(bad, s, 0.5 * s + (g if k in "mn" else h)) for k, s in state.items()}

    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    specs = dict.fromkeys("mn", P("a")) | dict.fromkeys("vw", P(None, "a"))
    state = {k: jnp.ones((16, 4) if spec == P("a") else (4, 16)) for k, spec in specs.items()}
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=specs)
    program = program_of(jax.jit(mapped), state, jnp.ones((4, 4)))
    assert early(program) == {f"['{k}']" for k in specs}


def test_groups_that_share_what_is_made_of_scalars_and_lie_differently_are_not_both_early():
    """A quotient is no cut, and what is spread of two is an array: the scalars join no groups."""

    def step(state, x, y):
        spread = jnp.full((4, 4), x / 3.0) + jnp.full((4, 4), y / 7.0)
        m, v = (0.5 * state[k] + spread for k in "mv")
        return {"m": m, "n": state["m"] + spread, "v": v, "w": state["v"] + spread}

    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    specs = {"m": P("a"), "n": P("a"), "v": P(None, "a"), "w": P(None, "a")}
    state = {k: jnp.ones((16, 4) if spec == P("a") else (4, 16)) for k, spec in specs.items()}
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(), P()), out_specs=specs)
    program = traced(jax.jit(mapped), state, jnp.float32(0.3), jnp.float32(0.7))
    assert early(program) == {"['m']", "['n']"}


def of_many(state, h):
    return {k: (0.9 - 0.1 * n) * old + h for n, (k, old) in enumerate(state.items())}


def early_of(step, mesh, spec, shape=(16, 6)):
    """What leaves early of a step on shards, which replay is seen to repeat."""
    rows = (np.random.default_rng(n).random(shape, np.float32) for n in range(7))
    *leaves, x = jax.device_put(list(rows), NamedSharding(mesh, spec))
    state = dict(zip("abcdef", leaves, strict=True))
    jitted = jax.jit(step)
    program = program_of(jitted, state, x)
    for _ in range(3):
        old, own = jax.tree.leaves(state), jitted(state, x)
        state, _, cut = program.call((state, x), {})
        jax.tree.map(np.testing.assert_array_equal, state, own)
        new = jax.tree.leaves(state)
        for group in program.cut.groups:
            taken = [[a[i] for i in places] for a, places in (
                (old, group.leaves), (cut, group.retained), (cut, group.scalars)
            )]  # fmt: skip
            got = jax.jit(group.recipe.apply)(*jax.device_get(taken))
            for value, j in zip(got, group.leaves, strict=True):
                np.testing.assert_array_equal(value, new[j])
    return {path[2] for path in early(program)}


ALONE = [[n] for n in range(8)]
TO_THEMSELVES = {
    "a choice by one's place": lambda g: jnp.where(lax.axis_index("one") == 0, g, 0.0),
    "a branch by it": lambda g: lax.cond(
        lax.axis_index("one") == 0, lambda: g, lambda: jnp.tanh(g)
    ),
    "a sum": lambda g: lax.psum(g, "a", axis_index_groups=ALONE),
    "an exchange": lambda g: lax.all_to_all(g, "a", 0, 0, axis_index_groups=ALONE, tiled=True),
    "a gathering": lambda g: lax.all_gather(g, "a", axis_index_groups=ALONE, tiled=True),
    "a turn": lambda g: lax.ppermute(g, "a", [(n, n) for n in range(8)]),
}
TO_OTHERS = {
    "a choice by one's place": lambda g: jnp.where(lax.axis_index("a") == 0, g, 0.0),
    "an exchange": lambda g: lax.all_to_all(
        g, "a", 0, 0, axis_index_groups=[[n, n + 1] for n in range(0, 8, 2)], tiled=True
    ),
    "a turn": lambda g: lax.ppermute(g, "a", [(n, n ^ 1) for n in range(8)]),
}


@pytest.mark.parametrize(
    ("exchanged", "is_early"),
    [*((f, False) for f in TO_THEMSELVES.values()), *((f, True) for f in TO_OTHERS.values())],
    ids=[*TO_THEMSELVES, *(f"{name}, of several" for name in TO_OTHERS)],
)
def test_what_each_device_says_to_itself_hides_no_factor(exchanged, is_early):
    """The compiler makes one of the two constants."""
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("a", "one"))

    def step(state, x):
        return of_many(state, 0.1 * exchanged(jnp.sin(x) * 3.3))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    assert early_of(mapped, mesh, P("a")) == set("abcdef" if is_early else "")


def spread_and_summed(mapped, state, x):
    """What is spread outside is as large as a shard of the sum only on the inside."""
    each = jnp.broadcast_to(jnp.sin(x), (3, *x.shape))

    def update(state, each):
        return of_many(state, 0.1 * each.sum(0))

    return mapped(update, in_specs=(P("a"), P(None, "a")))(state, each)


def put_together_again(mapped, state, x):
    """What comes from outside, or the same: the compiler erases the choice."""

    def update(state, g):
        return of_many(state, 0.1 * jnp.maximum(g, jnp.concatenate([g[:1], g[1:]])))

    return mapped(update, in_specs=P("a"))(state, jnp.sin(x) * 3.3)


@pytest.mark.parametrize("step", [spread_and_summed, put_together_again])
def test_sizes_are_compared_on_one_side_of_a_wall(step):
    mesh = Mesh(np.array(jax.devices()), ("a",))
    mapped = functools.partial(jax.shard_map, mesh=mesh, out_specs=P("a"), check_vma=False)
    assert not early_of(functools.partial(step, mapped), mesh, P("a"))


@pytest.mark.parametrize("is_spread_inside", [False, True])
def test_a_row_is_spread_though_the_whole_of_it_is_larger_than_a_shard(is_spread_inside):
    """Three rows of 24, of which a device has three columns: a constant folds with such a row."""
    mesh, columns = Mesh(np.array(jax.devices()), ("a",)), P(None, "a")

    def update(state, x, row):
        return of_many(state, (jnp.sin(x) * 3.3) * jnp.broadcast_to(row, x.shape))

    def step(state, x):
        row = jnp.tanh(x[0] + 1.0)
        row = row if is_spread_inside else jnp.broadcast_to(row, x.shape)
        specs = (columns, columns, P("a") if is_spread_inside else columns)
        mapped = jax.shard_map(update, mesh=mesh, in_specs=specs, out_specs=columns)
        return mapped(state, x, row)

    assert not early_of(step, mesh, columns, (3, 24))


@pytest.mark.parametrize(("rows", "is_row"), [(16, False), (8, True), (4, True)])
def test_flags_are_given_if_they_are_so_for_each_of_a_devices_numbers(rows, is_row):
    """Flags for columns may be as many in all as a device has numbers of eight rows."""
    mesh, columns = Mesh(np.array(jax.devices()), ("a",)), P(None, "a")
    flags = jax.device_put(np.arange(24) % 3 > 0, NamedSharding(mesh, P("a")))
    flags = flags if is_row else jnp.broadcast_to(flags, (rows, 24))

    def update(state, x, flags):
        kept = jnp.broadcast_to(flags, x.shape).astype(jnp.float32)
        return of_many(state, jnp.sin(x) * kept)

    specs = (columns, columns, P("a") if is_row else columns)
    mapped = jax.shard_map(update, mesh=mesh, in_specs=specs, out_specs=columns)
    state = {k: jnp.ones((rows, 24)) for k in "abcdef"}
    program = traced(jax.jit(mapped), state, jnp.ones((rows, 24)), flags)
    assert {p[2] for p in early(program)} == set("" if is_row else state)
