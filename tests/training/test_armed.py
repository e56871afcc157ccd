"""The armed program: the user's own, with more outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from training_helpers import graph_of

from gockpt_jax.training.armed import with_outputs
from gockpt_jax.training.graph import flatten

X, Y = jnp.arange(1.0, 5.0), jnp.arange(4.0)
Z = jnp.array([0.5, 0.25, 2.0, 3.0])


def traced(f, *args):
    jaxpr = jax.jit(f).trace(*args).jaxpr
    return jaxpr, flatten(jaxpr)


def find(value, name):
    """The first value behind `value` that the operation `name` makes."""
    todo = [value]
    while todo:
        value = todo.pop(0)
        if value.op is not None and value.op.name == name:
            return value
        todo += value.op.inputs if value.op is not None else ()
    raise LookupError(name)


def equations(jaxpr):
    """What the top level does, in order."""
    return [str(eqn.primitive) for eqn in jaxpr.eqns]


def test_top_level_values_leave_the_program_unmodified():
    def step(x, y):
        return jnp.where(x > 0, jnp.sin(x), y) + lax.cond(x[0] > 0, jnp.sin, jnp.cos, y)

    jaxpr, graph = traced(step, X, Y)
    armed = jax.make_jaxpr(with_outputs(jaxpr, [find(graph.outputs[0], "sin").site]))(X, Y)
    assert equations(armed) == equations(jaxpr)
    assert len(armed.jaxpr.outvars) == 2
    assert "jit" in equations(armed)
    # Equation for equation: only names of variables and the outputs may differ.
    for ours, users in zip(armed.eqns, jaxpr.eqns, strict=True):
        assert ours.params.keys() == users.params.keys()
        assert [v.aval for v in ours.outvars] == [v.aval for v in users.outvars]


def test_only_the_call_that_holds_the_value_is_opened():
    opened, closed = jax.jit(lambda x: jnp.sin(x) * 2.0), jax.jit(lambda x: jnp.cos(x) * 3.0)
    jaxpr, graph = traced(lambda x: opened(x) + closed(x), X)
    site = find(graph.outputs[0], "sin").site
    armed = jax.make_jaxpr(with_outputs(jaxpr, [site, site]))(X)
    assert equations(armed) == ["sin", "mul", "jit", "add"]
    result, *values = with_outputs(jaxpr, [site, site])(X)
    np.testing.assert_allclose(result, jnp.sin(X) * 2 + jnp.cos(X) * 3, rtol=1e-6)
    for value in values:
        np.testing.assert_allclose(value, jnp.sin(X), rtol=1e-6)


def test_nested_calls_and_one_body_called_twice():
    """Each call has values of its own, though both calls share one jaxpr."""
    inner = jax.jit(lambda x: jnp.sin(x) + 1.0)
    outer = jax.jit(lambda x: inner(x) * inner(x + 1.0))
    jaxpr, graph = traced(lambda x, y: outer(x) - outer(y), X, Y)
    minus = graph.outputs[0].op
    sines = [factor.op.inputs[0] for product in minus.inputs for factor in product.op.inputs]
    assert {v.op.name for v in sines} == {"sin"}
    results = jax.jit(with_outputs(jaxpr, [v.site for v in sines]))(X, Y)
    assert len(results) == 5
    for value, argument in zip(results[1:], (X, X + 1, Y, Y + 1), strict=True):
        np.testing.assert_allclose(value, jnp.sin(argument), rtol=1e-6)
    np.testing.assert_array_equal(results[0], jax.jit(lambda x, y: outer(x) - outer(y))(X, Y))


def test_calls_that_close_over_arrays():
    """One inside another: each keeps its own, the program gets no more arguments."""
    inner = jax.jit(lambda x: jnp.sin(x * Y) + 1.0)
    outer = jax.jit(lambda x: inner(x + Z) * Z)
    jaxpr, graph = traced(lambda x: outer(x) - 1.0, X)
    site = find(graph.outputs[0], "sin").site
    assert len(site.path) == 2
    result, value = jax.jit(with_outputs(jaxpr, [site]))(X)
    np.testing.assert_array_equal(result, jax.jit(lambda x: outer(x) - 1.0)(X))
    np.testing.assert_allclose(value, jnp.sin((X + Z) * Y), rtol=1e-6)


def test_values_of_calls_that_return_their_arguments():
    """A call may hand back an argument, a constant, or one value twice."""
    odd = jax.jit(lambda x: (x, 2.0, jnp.sin(x), jnp.sin(x) + 0.0))
    jaxpr, graph = traced(lambda x: [a + 1.0 for a in odd(x)], X)
    site = find(graph.outputs[3], "sin").site
    *results, value = with_outputs(jaxpr, [site])(X)
    np.testing.assert_allclose(value, jnp.sin(X), rtol=1e-6)
    for got, want in zip(results, (X + 1, 3.0, jnp.sin(X) + 1, jnp.sin(X) + 1), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_branches_return_what_they_make_and_the_others_zeros():
    """Of any type, in calls inside them and in branches of branches, which may be the same body."""
    halves = jax.jit(lambda x: (jnp.floor(x) != 1, jnp.sum(jnp.cos(x)) + 1.0))

    def inner(x):
        large, total = halves(x)
        return jnp.where(large, jnp.exp(x), total)

    def step(i, x):
        deep = lambda x: lax.cond(i > 1, lambda x: inner(x) + Y, jnp.tanh, x)  # noqa: E731
        return lax.switch(i, [lambda x: jnp.log(x) * 2.0, deep, deep], x)

    index = jnp.int32(0)
    jaxpr, graph = traced(step, index, X)
    chosen = graph.outputs[0].op.inputs
    values = [find(chosen[1], "log"), *(find(chosen[3], n) for n in ("tanh", "exp", "ne", "cos"))]
    scalar = find(chosen[3], "broadcast_in_dim").op.inputs[0]
    assert (scalar.shape, scalar.op.name) == ((), "add")
    values += [scalar, find(chosen[2], "tanh")]
    assert [len(v.site.path) for v in values] == [1, 2, 2, 2, 3, 2, 2]
    armed = jax.jit(with_outputs(jaxpr, [v.site for v in values]))
    # Which of them the i-th call makes; the shallow branch of the last is never taken.
    for i, made in enumerate([{0}, {6}, {2, 3, 4, 5}]):
        result, *got = armed(jnp.int32(i), X)
        np.testing.assert_array_equal(result, jax.jit(step)(jnp.int32(i), X))
        real = [jnp.log(X), jnp.tanh(X), jnp.exp(X), X != 1, jnp.cos(X), jnp.cos(X).sum() + 1,
                jnp.tanh(X)]  # fmt: skip
        for n, (value, want) in enumerate(zip(got, real, strict=True)):
            assert value.dtype == want.dtype
            np.testing.assert_allclose(value, want if n in made else want * 0, rtol=1e-6)


def test_a_branch_may_return_what_an_opened_call_returns():
    inner = jax.jit(lambda x: jnp.sin(x) + 1.0)
    jaxpr, graph = traced(lambda i, x: lax.switch(i, [inner, jnp.tanh], x), jnp.int32(0), X)
    armed = jax.jit(with_outputs(jaxpr, [find(graph.outputs[0], "sin").site]))
    for i, want in enumerate([(jnp.sin(X) + 1, jnp.sin(X)), (jnp.tanh(X), X * 0)]):
        for got, expected in zip(armed(jnp.int32(i), X), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_branches_return_lies_as_it_does_there(kind):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    spread = NamedSharding(mesh, PartitionSpec("d"))

    def step(x, y):
        return lax.cond(jnp.sum(x) > jnp.sum(y), lambda: jnp.sin(x) + y, lambda: x * y)

    x, y = (jax.device_put(jnp.arange(16.0) + i, spread) for i in (0, 1))
    with jax.set_mesh(mesh):
        jaxpr, graph = traced(step, x, y)
        armed = jax.jit(with_outputs(jaxpr, [find(graph.outputs[0], "sin").site]))
        for a, b, made in ((x, y, False), (y, x, True)):
            result, value = armed(a, b)
            np.testing.assert_array_equal(result, jax.jit(step)(a, b))
            np.testing.assert_allclose(value, jnp.sin(a) if made else jnp.zeros(16), rtol=1e-6)
            assert value.sharding.is_equivalent_to(spread, 1) or kind == AxisType.Auto


def test_branches_in_a_shard_map_are_not_opened():
    """What the others return would have to vary over the mesh as it does."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("d")

    def each(x):
        return lax.cond(x[0] > 1, lambda: jnp.sin(x) + 1.0, lambda: x)

    mapped = jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec)
    _, graph = traced(lambda x: mapped(x) * 2.0, jnp.arange(8.0))
    (inside,) = (v for v in graph.outputs[0].op.inputs if v.op is not None)
    (result,) = inside.op.stands_for
    assert result.site is not None
    assert find(result, "sin").site is None


def test_nor_is_a_shard_map_in_a_branch():
    """The zeros of the other branches would be of one shard."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("d")
    mapped = jax.shard_map(lambda x: jnp.sin(x) + 1.0, mesh=mesh, in_specs=spec, out_specs=spec)
    _, graph = traced(lambda x: lax.cond(x[0] > 1, lambda: mapped(x), lambda: x), jnp.arange(8.0))
    (outside,) = (v for v in graph.outputs[0].op.inputs if v.op is not None and v.op.stands_for)
    assert outside.site.is_in_branch
    (inside,) = outside.op.stands_for
    assert find(inside, "sin").site is None


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_donated_input_returned_as_a_cut_is_a_copy(donate):
    jaxpr, graph = traced(lambda x, y: x * y, X, Y)
    program = with_outputs(jaxpr, [graph.inputs[0].site])
    _, kept = program(X, Y)
    assert kept.unsafe_buffer_pointer() != X.unsafe_buffer_pointer()
    x = jnp.copy(X)
    result, kept = jax.jit(program, donate_argnums=donate)(x, Y)
    assert x.is_deleted() == bool(donate)
    assert kept.unsafe_buffer_pointer() != result.unsafe_buffer_pointer()
    np.testing.assert_array_equal(kept, X)
    np.testing.assert_array_equal(result, X * Y)


def test_no_sites_is_the_program_itself():
    jaxpr, _ = traced(lambda x: {"a": jnp.sin(x), "b": x}, X)
    assert str(jax.make_jaxpr(with_outputs(jaxpr, []))(X)) == str(jaxpr)
    a, b = with_outputs(jaxpr, [])(X)
    np.testing.assert_array_equal(b, X)
    np.testing.assert_allclose(a, jnp.sin(X), rtol=1e-6)


def test_sites_of_the_graph_are_those_of_the_program():
    """Every site that the graph offers can be returned, and holds what the graph says."""

    def step(x, y):
        z = jax.jit(lambda a: jnp.clip(a * 2.0, 0.0, 3.0))(x)
        return lax.cond(z[0] > 0, lambda: z + y, lambda: z), jax.nn.relu(y) * x

    jaxpr, graph = traced(step, X, Y)
    values, todo = [], list(graph.outputs)
    while todo:
        value = todo.pop()
        if value.site is not None and value not in values:
            values.append(value)
        todo += value.op.inputs if value.op is not None else ()
    results = with_outputs(jaxpr, [v.site for v in values])(X, Y)[2:]
    assert len(values) > 8
    assert [(r.shape, r.dtype) for r in results] == [(v.shape, v.dtype) for v in values]
    assert graph_of(step, X, Y).outputs[0].shape == (4,)
