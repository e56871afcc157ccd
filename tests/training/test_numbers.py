"""What number a value is: one, however it is written, and as a rule another than others."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from training_helpers import graph_of

from gockpt_jax.training.drawn import Source, worked_out
from gockpt_jax.training.numbers import is_power_of_two, may_be_equal, number_of

X, Y = (jnp.ones(4) for _ in range(2))


def chosen(flag, x, y):
    """One of two, as a flag says."""
    return lax.select(flag, jnp.sin(x), jnp.cos(y))


# Two ways to write one number of two.
ONE = {
    "add": (lambda x, y: x + y, lambda x, y: y + x),
    "subtract": (lambda x, y: x - y, lambda x, y: -(y - x)),
    "multiply": (lambda x, y: (x + y) * x, lambda x, y: x * x + x * y),
    "divide": (lambda x, y: x / y, lambda x, y: x * (1.0 / y)),
    "absolute": (lambda x, y: jnp.abs(x), lambda x, y: jnp.maximum(x, -x)),
    "sign": (lambda x, y: jnp.sign(x) * y, lambda x, y: x / jnp.abs(x) * y),
    "larger": (lambda x, y: jnp.maximum(x, y), lambda x, y: -jnp.minimum(-x, -y)),
    "the larger is chosen": (
        lambda x, y: jnp.maximum(x, y),
        lambda x, y: lax.select(x < y, y, x),
    ),
    "bounded": (
        lambda x, y: lax.clamp(-1.0, x, 2.0) * y,
        lambda x, y: jnp.minimum(jnp.maximum(x, -1.0), 2.0) * y,
    ),
    "square": (lambda x, y: jnp.square(x), lambda x, y: x * x),
    "cube": (lambda x, y: x**3, lambda x, y: x * x * x),
    "power": (lambda x, y: lax.pow(x, 2.0), lambda x, y: x * x),
    "reciprocal square": (lambda x, y: lax.integer_pow(x, -2), lambda x, y: 1.0 / (x * x)),
    "root": (lambda x, y: jnp.sqrt(x) * jnp.sqrt(x), lambda x, y: x),
    "reciprocal root": (lambda x, y: lax.rsqrt(x), lambda x, y: 1.0 / jnp.sqrt(x)),
    "cubic root": (lambda x, y: lax.cbrt(x) ** 3, lambda x, y: x),
    "exponential": (lambda x, y: jnp.exp(x) * jnp.exp(y), lambda x, y: jnp.exp(x + y)),
    "power of two": (lambda x, y: lax.exp2(x) * lax.exp2(y), lambda x, y: lax.exp2(x + y)),
    "exponential less one": (lambda x, y: jnp.expm1(x), lambda x, y: jnp.exp(x) - 1.0),
    "logarithm": (lambda x, y: jnp.log(jnp.exp(x)), lambda x, y: x),
    "logarithm of one more": (lambda x, y: jnp.log1p(x), lambda x, y: jnp.log(x + 1.0)),
    "logistic": (lambda x, y: lax.logistic(x), lambda x, y: 1.0 / (1.0 + jnp.exp(-x))),
    "tanh": (lambda x, y: jnp.tanh(x), lambda x, y: -jnp.tanh(-x)),
    "sine": (lambda x, y: jnp.sin(x), lambda x, y: -jnp.sin(-x)),
    "cosine": (lambda x, y: jnp.cos(x), lambda x, y: jnp.cos(-x)),
    "tangent": (lambda x, y: jnp.tan(x), lambda x, y: jnp.sin(x) / jnp.cos(x)),
    "equal": (lambda x, y: chosen(x == y, x, y), lambda x, y: chosen(~(x != y), x, y)),
    "less": (lambda x, y: chosen(x < y, x, y), lambda x, y: chosen(y > x, x, y)),
    "at most": (lambda x, y: chosen(x <= y, x, y), lambda x, y: chosen(y >= x, x, y)),
    "not less": (lambda x, y: chosen(~(x < y), x, y), lambda x, y: chosen(x >= y, x, y)),
    "and": (
        lambda x, y: chosen((x < 1) & (y < 1), x, y),
        lambda x, y: chosen(~((x >= 1) | (y >= 1)), x, y),
    ),
    "turns": (
        lambda x, y: lax.scan(lambda c, _: (c * c, None), x, length=3, unroll=3)[0],
        lambda x, y: x**8,
    ),
    "no turn": (lambda x, y: lax.fori_loop(0, 0, lambda _, c: c + y, x), lambda x, y: x),
    "either": (
        lambda x, y: chosen((x < 1) ^ (y < 1), x, y),
        lambda x, y: chosen((x < 1) != (y < 1), x, y),
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_one_number_is_one_however_it_is_written(name):
    f, g = ONE[name]
    one, other, no = graph_of(lambda x, y: (f(x, y), g(x, y), 1.5 * g(x, y)), X, Y).outputs
    assert may_be_equal(one, other)
    assert may_be_equal(other, one)
    assert not may_be_equal(one, no)
    assert not may_be_equal(no, one)


MOVED = {
    "barrier": lax.optimization_barrier,
    "barrier of two": lambda x: lax.optimization_barrier((x + 1.0, x))[1],
    "bits": lambda x: x.view(jnp.int32),
    "converted": lambda x: x.astype(jnp.bfloat16),
    "copied": jnp.copy,
    "expanded": lambda x: lax.expand_dims(x, (0,)),
    "gathered": lambda x: jnp.take(x, jnp.array([0, 2])),
    "named": lambda x: checkpoint_name(x, "a"),
    "padded": lambda x: lax.pad(x, 0.0, [(0, 1, 0)]),
    "placed": lambda x: jax.sharding.reshard(x, jax.P()),
    "reshaped": lambda x: x.reshape(2, 2),
    "reversed": lambda x: x[::-1],
    "rounded": lambda x: lax.reduce_precision(x, 8, 7),
    "sliced": lambda x: lax.slice(x, (0,), (2,)),
    "sliced somewhere": lambda x: lax.dynamic_slice(x, (x[0].astype(jnp.int32),), (2,)),
    "spread": lambda x: lax.broadcast_in_dim(x, (2, 4), (1,)),
    "split": lambda x: lax.split(x, (1, 3))[1],
    "squeezed": lambda x: lax.squeeze(lax.broadcast_in_dim(x, (1, 4), (1,)), (0,)),
    "tiled": lambda x: jnp.tile(x, 2),
    "unstacked": lambda x: jnp.unstack(x.reshape(2, 2))[1],
    "transposed": lambda x: lax.transpose(x.reshape(2, 2), (1, 0)),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_is_moved_is_what_it_was(name):
    with jax.sharding.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))):
        graph = graph_of(lambda x: (jnp.sin(x), MOVED[name](jnp.sin(x))), X)
    one, other = map(number_of, graph.outputs)
    np.testing.assert_array_equal(one, other)


# Of the first, but nobody knows how compilers find that.
GUESSED = {
    "sum of sums": lambda x, y: (jnp.sum(x.reshape(2, 2)), jnp.sum(jnp.sum(x.reshape(2, 2), 0))),
    "sum of squares": lambda x, y: (jnp.dot(x, x), jnp.sum(x * x)),
    "product of one": lambda x, y: (x[:1] * y[:1], jnp.dot(x[:1, None], y[None, :1])[0]),
    "out of a stack": lambda x, y: (x, jnp.stack([y, x])[1]),
    "out of what is joined": lambda x, y: (x, jnp.concatenate([x, y])[:4]),
    "out of what is split": lambda x, y: (x, lax.split(jnp.concatenate([x, y]), (4, 4))[0]),
    "out of an update": lambda x, y: (x, jnp.zeros((2, 4)).at[1].set(x)[1]),
    "out of complex numbers": lambda x, y: (x, lax.real(lax.complex(x, y))),
    "sum over one": lambda x, y: (x, jnp.sum(x[None], axis=0)),
    "sum with zeros": lambda x, y: (x, jnp.sum(jnp.stack([jnp.zeros(4), x]), axis=0)),
    "product with ones": lambda x, y: (x, jnp.prod(jnp.stack([jnp.ones(4), x]), axis=0)),
    "larger of two of it": lambda x, y: (x, jnp.max(jnp.stack([x, x]), axis=0)),
    "sums so far": lambda x, y: (x, jnp.cumsum(x[None], axis=0)[0]),
    "sorted alone": lambda x, y: (x, jnp.sort(x[:, None], axis=1)[:, 0]),
    "convolved with one": lambda x, y: (x, jnp.convolve(x, jnp.ones(1))),
    "in a window": lambda x, y: (x, lax.reduce_window(x, 0.0, lax.add, (1,), (1,), "VALID")),
    "where it is everywhere": lambda x, y: (x, jnp.where(jnp.arange(4) >= 0, x, y)),
    "in a loop": lambda x, y: (x, lax.fori_loop(0, 2, lambda i, c: (c[0] + y, c[1]), (y, x))[1]),
}


@pytest.mark.parametrize("name", GUESSED)
@pytest.mark.parametrize("of", ["arguments", "products", "what is sorted"])
def test_what_is_not_elementwise_may_be_what_it_is_made_of(name, of):
    """And so may what is made of it."""

    def values(x, y):
        if of == "products":
            x, y = x @ jnp.ones((4, 4)), y @ jnp.full((4, 4), 2.0)
        if of == "what is sorted":
            x, y = jnp.sort(x), jnp.sort(y)
        one, guess = GUESSED[name](jnp.sin(x), y)
        return one, guess, jnp.abs(one), jnp.abs(guess)

    one, guess, of_one, of_guess = graph_of(values, X, Y).outputs
    for a, b in ((one, guess), (of_one, of_guess)):
        assert may_be_equal(a, b)
        assert may_be_equal(b, a)


def test_what_a_number_makes_of_a_guess_may_be_what_it_makes_of_the_value():
    values = graph_of(lambda x, y: (x * y[0], jnp.sort(x[:, None], 1)[:, 0] * y[0]), X, Y).outputs
    may_be_one = may_be_equal(*values)
    assert may_be_one


MULTIPLES = {
    "times": lambda v, s: v * s,
    "over": lambda v, s: v / s,
    "times, over": lambda v, s: (v / s) * 0.5,
    "times more": lambda v, s: s * (0.3 * v),
    "named, times": lambda v, s: -(checkpoint_name(v, "a") * s),
}


@pytest.mark.parametrize("name", MULTIPLES)
def test_a_multiple_is_no_guess_of_what_it_multiplies(name):
    """As of a gradient that is clipped by a norm of all gradients: but anything else may be."""

    def values(x, y):
        v, s = jnp.sort(x + y), 2.0 + jnp.square(jnp.max(x))
        of_another = MULTIPLES[name](jnp.sort(-x - y), s)
        return v, MULTIPLES[name](v, s), jnp.maximum(v, s), of_another, s / v

    v, multiple, *others = graph_of(values, X, Y).outputs
    for other, expected in ((multiple, False), *((other, True) for other in others)):
        assert may_be_equal(v, other) is expected
        assert may_be_equal(other, v) is expected


def test_a_multiple_by_one_is_what_it_multiplies():
    def values(x):
        v, s = jnp.sort(x), jnp.max(x)
        return v, v * jnp.minimum(1.0, jnp.exp(jnp.abs(s)))

    assert may_be_equal(*graph_of(values, X).outputs)


PRODUCTS = {
    "matrices": lambda x: x @ jnp.ones((4, 4)),
    "ragged": lambda x: lax.ragged_dot(x[None], jnp.ones((2, 4, 4)), jnp.array([1, 0]))[0],
    "convolution": lambda x: jnp.convolve(x, jnp.ones(3), mode="same"),
    "rows, turn by turn": lambda x: lax.scan(
        lambda c, r: (c + 1.0, (r * jnp.ones((3, 4))).T.astype(jnp.bfloat16) @ jnp.ones(3)),
        0.0, x.reshape(2, 2)[:, :1],
    )[1].reshape(-1)[:4],
    "the last turn": lambda x: lax.scan(
        lambda c, r: (jnp.full((4, 4), r) @ jnp.ones(4), r), x, x
    )[0],
    "turns of turns": lambda x: lax.fori_loop(
        0, 2, lambda i, c: lax.fori_loop(0, 3, lambda i, c: c @ jnp.ones((4, 4)), c), x
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_has_other_sources_is_no_guess_of_a_value(name):
    def values(x, y):
        product = PRODUCTS[name](x)
        return jnp.sort(x), y, product, jnp.sort(product), PRODUCTS[name](y)

    graph = graph_of(values, X, Y)
    (x, _), (of_x, y, product, of_product, another) = graph.inputs, graph.outputs
    assert not may_be_equal(of_x, y)  # it is of another argument
    assert not may_be_equal(x, product)  # a gradient is no parameter
    assert not may_be_equal(x, of_product)
    assert may_be_equal(product, of_product)
    assert not may_be_equal(product, another)


def test_what_is_not_worked_out_hides_nothing_else():
    """Beside what is, in what is made of less than it, and where it is one number for all."""

    def values(x, y):
        return [
            (jnp.sort(x) + y, 2.0 + y),
            (x + y, jnp.sort(x)),
            (y * jnp.max(x), x),
        ]

    outputs = graph_of(values, X, Y).outputs
    for a, b in zip(outputs[::2], outputs[1::2], strict=True):
        assert not may_be_equal(a, b)
        assert not may_be_equal(b, a)


@pytest.mark.parametrize(
    ("constant", "expected"),
    [
        (lambda: jnp.full(4, 0.25).astype(jnp.bfloat16).astype(jnp.float32), True),
        (lambda: jnp.full(4, 0.2500001).astype(jnp.bfloat16).astype(jnp.float32), False),
        (lambda: jnp.full(4, 0.5, jnp.bfloat16) * jnp.full(4, 8.0, jnp.bfloat16), True),
        (lambda: jnp.full(4, 0.1, jnp.bfloat16) * jnp.full(4, 2.5, jnp.bfloat16), False),
        (lambda: lax.reduce_precision(jnp.full(4, 0.2500001), 8, 7), False),
    ],
)
def test_a_constant_that_was_rounded_to_a_power_of_two_may_be_none(constant, expected):
    """A compiler may drop the rounding."""
    (value,) = graph_of(lambda x: constant(), X).outputs
    assert is_power_of_two(value) is expected


def test_what_a_constant_of_less_precision_is_the_compiler_alone_knows():
    """It may drop the rounding, because another follows."""
    (value,) = graph_of(lambda x: lax.reduce_precision(jnp.full(4, 0.2500001), 8, 7), X).outputs
    assert np.isnan(number_of(value))


def test_a_table_of_other_numbers_is_another():
    one, same, other = map(np.float32, ([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 4, 4]))
    values = graph_of(lambda x: (x * one, x * same, x * other), X).outputs
    assert may_be_equal(values[0], values[1])
    assert not may_be_equal(values[0], values[2])


def test_a_complex_constant_is_no_number_that_is_compared():
    (value,) = graph_of(lambda x: jnp.full(4, 0.25).astype(jnp.complex64), X).outputs
    assert np.isnan(number_of(value))
    assert not is_power_of_two(value)


def test_what_the_turns_of_a_loop_return_may_be_taken_out_of_it():
    def values(x):
        turns = lax.scan(lambda c, _: (jnp.cos(c), c), jnp.sin(x), length=2, unroll=2)[1]
        return turns[0], turns[1], jnp.sin(x), jnp.cos(jnp.sin(x))

    first, second, one, other = graph_of(values, X).outputs
    assert may_be_equal(first, one)
    assert may_be_equal(second, other)


TURNS = {
    "sums": lambda c, r: (c, jnp.sum(r[None], 0)),
    "added": lambda c, r: (c, r @ jnp.ones((4, 4)) + r),
    "passed on": lambda c, r: (r @ jnp.ones((4, 4)), c),
}


@pytest.mark.parametrize("name", TURNS)
def test_what_turns_make_of_other_things_than_products_may_be_anything(name):
    def values(x):
        return x, lax.scan(TURNS[name], jnp.zeros(4), x)[1]

    assert may_be_equal(*graph_of(values, jnp.ones((3, 4))).outputs)


def test_values_are_the_same_numbers_whenever_a_program_is_looked_at():
    """Or processes that have looked at other programs before would cut this one otherwise."""
    (one,), (other,) = (graph_of(lambda x, y: jnp.sort(x) - y, X, Y).outputs for _ in range(2))
    np.testing.assert_array_equal(number_of(one), number_of(other))


def test_what_is_made_of_some_values_is_named_after_them_in_whatever_order():
    sources = [Source.of(1 << n) for n in range(12)]
    for one, other in itertools.combinations(sources, 2):
        names = {Source.of(1, frozenset(pair)) for pair in ((one, other), (other, one))}
        assert len(names) == 1


def test_whether_it_is_a_multiple_is_asked_of_each_value_once():
    def values(x):
        power = jnp.sort(x)
        for _ in range(60):
            power = power * power
        return x, power

    may_be_one = may_be_equal(*graph_of(values, X).outputs)  # not within `assert`, as below
    assert may_be_one


def test_arguments_are_other_numbers_of_either_sign():
    one, other = (number_of(v) for v in graph_of(lambda x, y: (x, y), X, Y).inputs)
    assert not np.any(one == other)
    for numbers in (one, other):
        assert min(numbers) < 0 < max(numbers)


def test_what_a_value_is_made_of_is_kept_once():
    """Behind a norm of all gradients each leaf is made of all: copies would be their square."""

    def values(*all):
        total = sum(map(jnp.sum, all))
        return all[0] * total - total

    (difference,) = graph_of(values, *[X] * 9).outputs
    product, total = difference.op.inputs
    assert len(worked_out(total).near) == 9
    assert len(worked_out(product).near) == 10
    assert worked_out(difference).near is worked_out(product).near


def test_a_step_may_have_tens_of_thousands_of_arguments():
    """Python writes no integer of that many bits in decimals, and hashes every 61st bit alike."""
    *_, last = many = [np.float32(1)] * 15_000
    (value,) = graph_of(lambda *all: jnp.outer(all[-1], X) @ X, *many).outputs
    assert not may_be_equal(value, graph_of(lambda x: x, last).outputs[0])
    assert len({hash(Source.of(1 << n)) for n in range(15_000)}) == 15_000


def sums_of_each_other(x, turns):
    """Each is made of the next, all the way down."""
    fields = [x, x * x, jnp.sin(x)]
    for _ in range(turns):
        moved = [jnp.roll(field, 1) * fields[(n + 1) % 3] for n, field in enumerate(fields)]
        fields = [a + 0.1 * jnp.cumsum(b) for a, b in zip(fields, moved, strict=True)]
    return sum(map(jnp.sum, fields))


def sorted_again_and_again(x, turns):
    for _ in range(10 * turns):
        x = jnp.sort(jnp.cos(x))
    return x[0]


@pytest.mark.parametrize("far", [sums_of_each_other, sorted_again_and_again])
def test_what_is_computed_twice_is_one_however_far_it_has_come(far):
    """Compared in as many steps as there are ways through it, this would never end."""
    one, other = graph_of(lambda x, y: (far(x + y, 60), far(y + x, 60)), X, Y).outputs
    is_one = may_be_equal(one, other)  # not within `assert`, which would write down what they are
    of_x, of_y = graph_of(lambda x, y: (far(x, 60), far(y, 60)), X, Y).outputs
    is_other = not may_be_equal(of_x, of_y)
    assert is_one
    assert is_other
