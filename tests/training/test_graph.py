"""The step as a flat graph."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec, SingleDeviceSharding
from training_helpers import graph_of, ops_behind

from gockpt_jax.training.graph import flatten

X = jnp.arange(4.0)


def test_nested_jit_is_inlined():
    inner = jax.jit(lambda x: jnp.sin(x) * 2.0)
    outer = jax.jit(lambda x: inner(x) + 1.0)
    graph = graph_of(lambda x: outer(x) - 3.0, X)
    assert ops_behind(graph.outputs[0]) == {"sin", "mul", "add", "sub"}
    assert graph.outputs[0].shape == (4,)
    assert graph.outputs[0].nbytes == 16


def test_inputs_and_outputs_are_the_flat_arguments_and_results():
    graph = graph_of(lambda s: (s["b"], s["a"] + 1.0), {"a": X, "b": X})
    assert len(graph.inputs) == 2
    assert graph.outputs[0] is graph.inputs[1]
    assert graph.outputs[1].op.inputs[0] is graph.inputs[0]


def tripled(x, y):
    return jnp.sin(x) * (y + 1.0)


@jax.custom_jvp
def tripled_sine(x):
    return jnp.sin(x) * 3.0


tripled_sine.defjvps(lambda tangent, result, x: tangent)


@jax.custom_vjp
def tripled_backwards(x):
    return jnp.sin(x) * 3.0


tripled_backwards.defvjp(lambda x: (tripled_backwards(x), None), lambda _, g: (g,))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(tripled_sine, id="custom_jvp"),
        pytest.param(tripled_backwards, id="custom_vjp"),
        pytest.param(jax.checkpoint(lambda x: jnp.sin(x) * 3.0), id="checkpoint"),
        pytest.param(
            jax.jit(
                lambda x: jnp.sin(x) * 3.0, out_shardings=SingleDeviceSharding(jax.devices()[0])
            ),
            id="jit with a placement",
        ),
        pytest.param(
            jax.jit(
                lambda x: jnp.sin(x) * 3.0, in_shardings=SingleDeviceSharding(jax.devices()[0])
            ),
            id="jit that places what it is given",
        ),
    ],
)
def test_bodies_that_cannot_be_opened_can_be_read_only_where_they_return(call):
    graph = graph_of(lambda x: call(x * 2.0) + 1.0, X)
    result = graph.outputs[0].op.inputs[0]
    assert result.site is not None
    assert result.site.path == ()
    behind = {v.op.name: v for v in result.op.inputs if v.op is not None}
    assert "sin" in behind
    assert all(behind[n].site is None for n in ("sin", "cos") if n in behind)


@pytest.mark.parametrize(("decided", "inside"), [(True, "sin"), (False, "cos")])
def test_a_branch_that_is_decided_while_tracing_is_a_call(decided, inside):
    """Also where other operands are known, or what is not decided comes with one that is."""
    graph = graph_of(
        lambda x: lax.cond(decided, tripled, lambda x, y: jnp.cos(x) * y, x, 2.0), X
    )  # fmt: skip
    assert graph.outputs[0].op.name == "mul"
    value = graph.outputs[0].op.inputs[0]
    assert value.op.name == inside
    assert len(value.site.path) == 1
    undecided = graph_of(lambda i, x: lax.switch(i, [tripled, lambda y, x: x], 2.0, x), 0, X)
    assert undecided.outputs[0].op.name == "select_n"


def test_cond_becomes_select_with_a_case_per_branch():
    def step(i, x):
        return lax.switch(i, [lambda x: x, jnp.sin, lambda x: x * 2.0], x)

    graph = graph_of(step, 1, X)
    op = graph.outputs[0].op
    assert op.name == "select_n"
    assert op.inputs[1] is graph.inputs[1]
    assert [v.op.name for v in op.inputs[2:]] == ["sin", "mul"]
    assert [[entry.branch for entry in v.site.path] for v in op.inputs[1:]] == [[], [1], [2]]
    assert [v.site.is_in_branch for v in op.inputs[1:]] == [False, True, True]


def test_what_a_call_in_a_branch_makes_is_made_in_the_branch():
    twice = jax.jit(lambda x: jnp.sin(x) * 2.0)
    graph = graph_of(lambda b, x: lax.cond(b, twice, lambda x: x, x), True, X)
    sine = graph.outputs[0].op.inputs[2].op.inputs[0]
    assert [entry.branch for entry in sine.site.path] == [1, None]
    assert sine.site.is_in_branch


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0], "scan"),
        (lambda x: lax.while_loop(lambda c: c[0] < 1.0, lambda c: c + 1.0, x), "while"),
    ],
)
def test_loops_are_opaque(loop, name):
    assert ops_behind(graph_of(loop, X).outputs[0]) == {name}


def test_typed_keys_keep_their_cond_and_nothing_else_does():
    def step(b, key, x):
        return lax.cond(
            b, lambda k, x: (k, x), lambda k, x: (jax.random.split(k)[0], -x), key, x
        )  # fmt: skip

    outputs = graph_of(step, True, jax.random.key(0), X).outputs
    assert [value.op.name for value in outputs] == ["cond", "select_n"]


def test_sites_prefer_the_outermost():
    """Both call bodies hold the sum, and so does the top level: fewest calls are opened there."""
    inner = jax.jit(lambda x: (jnp.sin(x) + 1.0, jnp.cos(x)))
    outer = jax.jit(lambda x: (inner(x)[0], inner(x)[1] * 2.0))
    graph = graph_of(lambda x: outer(x), X)
    total, doubled = graph.outputs
    assert total.site.path == ()
    assert total.op.inputs[0].op.name == "sin"
    assert len(total.op.inputs[0].site.path) == 2  # inside inner, inside outer
    assert len(doubled.op.inputs[0].site.path) == 1  # returned by inner to outer
    assert len(graph.inputs[0].site.path) == 0


def test_dropped_results_are_no_sites():
    """A result that nobody uses has no variable to return."""
    inner = jax.jit(lambda x: (jnp.sin(x), jnp.sin(x) + 1.0))
    graph = graph_of(lambda x: inner(x)[1], X)
    assert len(graph.outputs[0].op.inputs[0].site.path) == 1


def test_what_the_next_call_is_given_may_be_another_on_each_device_as_it_is_returned():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    own = jax.shard_map(
        lambda x: x[0], mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec(),
        check_vma=False,
    )  # fmt: skip
    traced = jax.jit(lambda a, b, c, x: (own(x), a, c + 1.0)).trace(0.0, 0.0, 0.0, X)
    graph = flatten(traced.jaxpr, [(n, n) for n in range(3)])
    assert [v.is_everywhere for v in graph.inputs] == [False, False, True, True]


def test_constants_are_known_and_inputs_are_not():
    closed_over = np.arange(4.0, dtype=np.float32)
    graph = graph_of(lambda x: (x + closed_over) * 2.0, X)
    product = graph.outputs[0].op
    total = product.inputs[0].op
    assert product.inputs[1].is_constant
    assert product.inputs[1].constant == 2.0
    (constant,) = [v for v in total.inputs if v is not graph.inputs[0]]
    assert constant.is_constant
    np.testing.assert_array_equal(constant.constant, closed_over)
    assert constant.site is None
    assert not graph.inputs[0].is_constant


def test_what_is_made_of_constants_is_read_nowhere():
    """The step goes on with what the compiler makes of it, and of the constants around it."""
    graph = graph_of(lambda x: x * jnp.exp(-jnp.arange(4.0)), X)
    decay = graph.outputs[0].op.inputs[1]
    assert decay.op.name == "exp"
    assert decay.site is None
    assert decay.op.inputs[0].site is None


def test_a_body_called_twice_gives_two_values():
    f = jax.jit(lambda x: jnp.sin(x) + 1.0)
    a, b = graph_of(lambda x, y: (f(x), f(y)), X, X).outputs
    assert a is not b
    assert a.op.inputs[0].site.path != b.op.inputs[0].site.path


def test_deep_chains_need_no_recursion():
    def step(x):
        for _ in range(3000):
            x = x + 1.0
        return x

    assert flatten(jax.jit(step).trace(X).jaxpr).outputs[0].op.name == "add"


def test_what_all_turns_make_of_constants_the_compiler_knows():
    def turn(c, row):
        return c + row, (jnp.full(4, 0.3), row + 0.3)

    known, other = graph_of(lambda x: lax.scan(turn, 0.0, x)[1], X).outputs
    assert known.is_folded
    assert known.site is None  # the step goes on with what the compiler makes of it
    assert not other.is_folded
