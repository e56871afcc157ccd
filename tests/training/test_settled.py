"""Choices that a compiler erases, since it finds that their flag is always the same, and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from training_helpers import Analysis, analyse, bits, vector

SIZE = 256
Flag = Callable[[jax.Array, jax.Array], Any]

# Of an unsigned number and a signed one.
SETTLED: dict[str, Flag] = {
    "not below zero": lambda u, i: u >= 0,
    "nor if zero is the least": lambda u, i: jnp.maximum(u, 0) >= 0,
    "times zero": lambda u, i: i * 0 == 0,
    "without itself": lambda u, i: i - i == 0,
    "itself": lambda u, i: i == i,
    "no other": lambda u, i: ~(i != i),
    "zero is no more": lambda u, i: lax.le(jnp.uint32(0), u),
    "either": lambda u, i: (i > 3) | True,
    "both": lambda u, i: ~((i > 3) & False),
    "every turn": lambda u, i: i % 1 == 0,
    "an exponential, not below zero": lambda u, i: jnp.exp(i * 0.5) >= 0,
    "zero is no more than a square": lambda u, i: lax.le(0.0, jnp.square(i * 0.5)),
    "a size, below zero": lambda u, i: ~(jnp.abs(i * 0.5) < 0),
    "zero is more than a bound": lambda u, i: ~lax.gt(0.0, jnp.maximum(i * 0.5, 0.5)),
    "every turn of unsigned": lambda u, i: lax.rem(u, jnp.uint32(1)) == 0,
    "no bits": lambda u, i: i & 0 == 0,
    "all bits": lambda u, i: i | -1 == -1,
    "all bits of unsigned": lambda u, i: ~(u | jnp.uint32(2**32 - 1)) == 0,
    "of a table of one number": lambda u, i: jnp.zeros(4)[i] == 0,
    "gathered from such a table": lambda u, i: jnp.take(jnp.ones(4, bool), i, mode="clip"),
    "the largest of one": lambda u, i: jnp.argmax(i[None]) == 0,
    "the least of one is the largest": lambda u, i: jnp.argmin(i[None]) == jnp.argmax(u[None]),
    "one in order": lambda u, i: jnp.argsort(i[None] * 0.5)[0] == 0,
    "the first of one": lambda u, i: lax.top_k(i[None] * 0.5, 1)[1][0] == 0,
    "an expert of one": lambda u, i: jax.nn.one_hot(jnp.argmax(i[None]), 1)[0] > 0,
}
OPEN: dict[str, Flag] = {
    "a bound": lambda u, i: i > 3,
    "a bound of unsigned": lambda u, i: u > 0,
    "a late bound": lambda u, i: i < 1_000_000,
    "the last of its kind": lambda u, i: i < 2**31 - 1,
    "at five": lambda u, i: i == 5,
    "but at five": lambda u, i: i != 5,
    "every tenth": lambda u, i: i % 10 == 0,
    "but every tenth": lambda u, i: i % 10 != 0,
    "every eighth": lambda u, i: i & 7 == 0,
    "some of eight": lambda u, i: i & 7 < 4,
    "a number or none": lambda u, i: jnp.isnan(i * 0.5),
    "a float, not below zero": lambda u, i: i * 0.5 >= 0,
    "zero is no more than a float": lambda u, i: lax.le(0.0, i * 0.5),
    "an exponential, below one": lambda u, i: jnp.exp(i * 0.5) < 1,
    "an exponential, above zero": lambda u, i: jnp.exp(i * 0.5) > 0,
    "finite": lambda u, i: jnp.abs(i * 0.5) < jnp.inf,
    "one of two numbers": lambda u, i: jnp.where(i > 3, 0.3, 0.1) > 0.2,
    "of a table of several": lambda u, i: jnp.array([0, 1, 0, 0])[i] == 1,
    "the larger of two": lambda u, i: jnp.argmax(jnp.stack([i, u.astype(int)])) == 0,
    "two in order": lambda u, i: jnp.argsort(jnp.stack([i, u.astype(int)]))[0] == 0,
    "the first of two": lambda u, i: lax.top_k(jnp.stack([i * 0.5, u * 0.5]), 1)[1][0] == 0,
    "one of two": lambda u, i: (i > 3) | (u > 3),
}


def moments(s: Any, g: jax.Array, rate: jax.Array) -> Any:
    return {"m": s["m"] * 0.9 + g * rate, "v": s["v"] * 0.99 + g * 0.7}


def found(gradient: Callable[..., jax.Array], in_a_branch: bool = False) -> Analysis:
    """Of two averages, one of which goes on with another constant."""

    def step(s: Any, x: Any, u: Any, i: Any, rate: Any) -> Any:
        if not in_a_branch:
            return moments(s, gradient(x, u, i), rate)
        return lax.cond(rate > 0, lambda: moments(s, gradient(x, u, i), rate), lambda: s)

    state = {"m": vector(1, SIZE), "v": vector(1, SIZE)}
    scalars = jnp.uint32(1), jnp.int32(1), jnp.float32(0.7123)
    return analyse(step, state, vector(2, SIZE), *scalars)


def torn(found: Analysis) -> int:
    new, cut = found.run()
    return sum(int(np.sum(bits(leaf) != bits(new[j]))) for j, leaf in found.replayed(cut))


def where(flag: Flag) -> Callable[..., jax.Array]:
    return lambda x, u, i: jnp.where(flag(u, i), jnp.tanh(x) * 0.3, jnp.cos(x))


def branch(flag: Flag) -> Callable[..., jax.Array]:
    return lambda x, u, i: lax.cond(flag(u, i), lambda: jnp.tanh(x) * 0.3, lambda: x)


@pytest.mark.parametrize("name", SETTLED)
@pytest.mark.parametrize("choice", [where, branch])
def test_what_is_in_front_of_no_choice_is_not_cut(choice: Any, name: str) -> None:
    """The factor there is merged with the one behind it."""
    assert torn(found(choice(SETTLED[name]))) == 0


def test_nor_is_it_in_a_branch() -> None:
    assert torn(found(where(SETTLED["not below zero"]), in_a_branch=True)) == 0


@pytest.mark.parametrize("zero", [lambda i: i * 0, lambda i: i - i])
def test_what_adds_nothing_ends_no_chain(zero: Callable[[jax.Array], jax.Array]) -> None:
    assert torn(found(lambda x, u, i: x * 0.3 + zero(i).astype(jnp.float32))) == 0


RATES, RATE = jnp.full(4, 0.3, jnp.float32), jnp.float32(0.3)


@pytest.mark.parametrize(
    "rate",
    [
        lambda x, i: RATES[i],
        lambda x, i: jnp.where(x > 0, RATE, RATE),
        lambda x, i: x[:0].sum() + 0.3,
    ],
    ids=["of a table of one", "one of two that are the same", "more than nothing"],
)
def test_nor_is_what_meets_a_number_that_is_always_so(rate: Callable[..., Any]) -> None:
    def step(s: Any, x: Any, i: Any) -> Any:
        g = jnp.tanh(x) * rate(x, i) * 0.7
        return {"m": 0.9 * s["m"] + g, "v": 0.99 * s["v"] + g * g}

    state = {"m": vector(1, SIZE), "v": vector(1, SIZE)}
    assert torn(analyse(step, state, vector(2, SIZE), jnp.int32(1), even_for_nothing=True)) == 0


@pytest.mark.parametrize("in_a_branch", [False, True])
def test_each_platform_has_its_own(in_a_branch: bool) -> None:
    def gradient(x: jax.Array, u: Any, i: Any) -> jax.Array:
        return lax.platform_dependent(x, cpu=lambda x: jnp.tanh(x) * 0.3, default=jnp.cos)

    assert torn(found(gradient, in_a_branch)) == 0


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("choice", [where, branch])
def test_what_nobody_knows_makes_nothing_late(choice: Any, name: str) -> None:
    analysis = found(choice(OPEN[name]))
    assert analysis.groups == [["m", "v"]]
    assert torn(analysis) == 0


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("in_a_branch", [False, True])
def test_an_average_that_is_taken_now_and_then_leaves_early(every: int, in_a_branch: bool) -> None:
    """Or always, as the interval happens to be: the host finds that, too."""

    def step(s: Any, x: Any, i: Any) -> Any:
        g = jnp.tanh(x)
        m, taken = 0.9 * s["m"] + 0.1 * g, i % every == 0
        new = lambda: 0.99 * s["average"] + 0.01 * m  # noqa: E731
        if in_a_branch:
            average = lax.cond(taken, new, lambda: s["average"])
        else:
            average = jnp.where(taken, new(), s["average"])
        return {"m": m, "average": average}

    state = {"average": vector(3, SIZE), "m": vector(1, SIZE)}
    analysis = analyse(step, state, vector(2, SIZE), jnp.int32(20))
    assert analysis.groups == [["average", "m"]]
    assert torn(analysis) == 0
