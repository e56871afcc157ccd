"""What a compiler sees on one side of a cut, and not on the other.

The device has the whole step, the host what follows the cut. Where a compiler makes something else
of what it sees on one of them alone, what is replayed has other bits: zeros of the other sign, and
numbers where there should be none (NaN), among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from training_helpers import analyse, bits

from gockpt_jax.training import handed_on, numbers

ROWS, COLUMNS = 64, 32


def scales(g: Any, axis: int = 1) -> Any:
    """One for each row, or column."""
    return 1 / (1 + jnp.linalg.norm(g, axis=axis))


def by_rows(g: Any) -> Any:
    return jnp.broadcast_to(scales(g)[:, None], g.shape)


def flags(g: Any) -> Any:
    """One for each row: small ones and large ones are about as many."""
    norms = jnp.linalg.norm(g, axis=1)
    return norms > jnp.median(norms)


def decayed(m: Any, v: Any, q: Any) -> tuple[Any, Any]:
    return 0.9 * m * q, 0.999 * v * q


def loss(g: Any) -> Any:
    """A number, or none where one of the gradients is none."""
    return jnp.exp(jnp.mean(jnp.sin(g)))


def where_right(is_right: Any, scale: Any, m: Any, v: Any, g: Any) -> tuple[Any, Any]:
    return jnp.where(is_right, m + scale, m), jnp.where(is_right, v + scale, v)


def either(g: Any, f: Callable[[], Any]) -> Any:
    return lax.cond(jnp.sum(jnp.sin(g)) > 0, f, f)


def among_zeros(g: Any) -> Any:
    place = jnp.argmax(g[:, 0]).astype(jnp.int32)
    return lax.dynamic_update_slice(jnp.zeros_like(g), jnp.sin(g[:8]), (place, 0))


def turns(g: Any) -> Any:
    """One or two: as often as a loop turns, of which nobody knows before."""
    return jnp.int32(jnp.sum(jnp.sin(g)) > 0) + 1


def handed(c: Any, turn: Callable[..., Any], g: Any) -> Any:
    """What a loop is given, and every turn hands on as `turn` says; beside what it adds up."""
    add = lambda _, c: (turn(c[0], g), c[1] + g)  # noqa: E731
    return lax.fori_loop(0, turns(g), add, (c, g))[0]


def handed_by_a_scan(c: Any, turn: Callable[..., Any], g: Any) -> Any:
    add = lambda c, x: ((turn(c[0], x), c[1] + x), None)  # noqa: E731
    return lax.scan(add, (c, g), jnp.stack([g, jnp.sin(g), g]))[0][0]


def through_one_turn(c: Any, g: Any) -> Any:
    """The same, out of a loop of one turn, beside what it adds up."""
    return lax.scan(lambda c, x: ((c[0] * 1.0, c[1] + x), None), (c, g), g[None])[0][0]


def through_a_mesh(c: Any, g: Any) -> Any:
    """The same, out of a `shard_map`."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("data")
    same = jax.shard_map(lambda c, g: (c, g + c), mesh=mesh, in_specs=spec, out_specs=spec)
    return same(c, g)[0]


def handed_from_outside(c: Any, g: Any) -> Any:
    """What a loop is given, and every turn takes from outside: it comes out of one of one turn."""
    c = through_one_turn(c, jnp.cos(g))
    return lax.fori_loop(0, turns(g), lambda _, x: (c * 1.0, x[1] + g), (c, g))[0]


def by_bits(x: Any, f: Callable[[Any], Any]) -> Any:
    return lax.bitcast_convert_type(f(lax.bitcast_convert_type(x, jnp.int32)), jnp.float32)


def made_again(x: Any, g: Any) -> Any:
    """What each turn of a loop makes of what it does not get from the one before."""
    made = lambda: x - 0.0  # noqa: E731
    return lax.fori_loop(0, turns(g), lambda _, c: (made(), c[1] + g), (made(), g))[0]


def gradient_of_set_and_read(c: Any, x: Any) -> Any:
    return jax.vjp(lambda t: jnp.stack([x, x]).at[1].set(t)[1], x)[1](c)[0]


def at_most_once(happens: Any, turn: Callable[[Any], Any], c: Any) -> Any:
    """A loop that turns if something happens, and no second time."""
    body = lambda c: (jnp.array(False), turn(c[1]))  # noqa: E731
    return lax.while_loop(lambda c: c[0], body, (happens, c))[1]


def largest_of_two(x: Any, f: Callable[[Any], Any]) -> Any:
    return jnp.max(f(jnp.broadcast_to(x, (2,))))


def padded(g: Any) -> Any:
    return jnp.pad(jnp.sin(g), ((0, 0), (COLUMNS, 0)))


@jax.checkpoint
def seldom(g: Any) -> Any:
    return (jnp.sin(g) < 0).astype(jnp.float32)


# Of moments `m` and `v` and gradients: the moments behind an update.
SPREAD: dict[str, Callable[..., Any]] = {
    "rows": lambda m, v, g: decayed(m, v, by_rows(g)),
    "columns": lambda m, v, g: decayed(m, v, jnp.broadcast_to(scales(g, 0), g.shape)),
    "rows, computed with": lambda m, v, g: decayed(m, v, jnp.sqrt(by_rows(g)) + 0.5),
    "rows, nothing added": lambda m, v, g: decayed(m, v, by_rows(g) + 0.0),
    "rows of ones, scaled": lambda m, v, g: decayed(m, v, jnp.ones_like(g) * scales(g)[:, None]),
    "rows by rows": lambda m, v, g: decayed(m, v, by_rows(g) * by_rows(g * g)),
    "the larger of rows and themselves": lambda m, v, g: decayed(
        m, v, jnp.maximum(by_rows(g), by_rows(g))
    ),
    "numbers, one for each member": lambda m, v, g: jax.vmap(
        lambda m, v, g: decayed(m, v, jnp.full_like(m, 1 / (1 + jnp.linalg.norm(g))))
    )(m, v, g),
    "rows that are shared by products": lambda m, v, g: (
        (m * by_rows(g) + g * by_rows(g)) * 0.7, 0.999 * v * by_rows(g)
    ),
}  # fmt: skip
CHOSEN: dict[str, Callable[..., Any]] = {
    "flags of rows": lambda m, v, g: (
        m * jnp.broadcast_to(flags(g)[:, None], g.shape),
        v * jnp.repeat(flags(g), COLUMNS).reshape(g.shape),
    ),
    "flags of rows, negated": lambda m, v, g: (
        m * ~jnp.broadcast_to(flags(g)[:, None], g.shape), v
    ),
    "flags behind a transposition": lambda m, v, g: (m * (jnp.sin(g.T) < 0).T, v + g),
    "numbers of flags behind a transposition": lambda m, v, g: (
        m * (jnp.sin(g.T) < 0).astype(jnp.float32).T, v + g
    ),
    "numbers of flags, reshaped": lambda m, v, g: (
        m * (jnp.sin(g.reshape(-1)) < 0).astype(jnp.float32).reshape(g.shape), v + g
    ),
    "numbers of flags out of a block computed again": lambda m, v, g: (m * seldom(g), v + g),
    "numbers of flags times one": lambda m, v, g: (
        m * ((jnp.sin(g.T) < 0).T.astype(jnp.float32) * 1.0), v + g
    ),
    "flags of rows to the first power": lambda m, v, g: (
        m * jnp.broadcast_to(flags(g)[:, None], g.shape).astype(jnp.float32) ** 1, v + g
    ),
    "flags of rows, both negated": lambda m, v, g: (
        -m * -jnp.broadcast_to(flags(g)[:, None], g.shape).astype(jnp.float32), v + g
    ),
    "a flag, spread": lambda m, v, g: (
        m * jnp.broadcast_to(jnp.sum(g, keepdims=True) < 0, g.shape).astype(jnp.float32), v + g
    ),
    "a flag that is one number": lambda m, v, g: (m * (jnp.sum(jnp.sin(g)) < -1e9), v + g),
    "flags of rows, picked": lambda m, v, g: (
        m * jnp.take(flags(g), jnp.argsort(g[:, 0]))[:, None].repeat(COLUMNS, 1), v
    ),
}  # fmt: skip
NEVER_BELOW: dict[str, Callable[..., Any]] = {
    "an exponential": lambda m, v, g: where_right(loss(g) >= 0, loss(g), m, v, g),
    "an exponential, from the other side": lambda m, v, g: where_right(
        lax.le(0.0, loss(g)), loss(g), m, v, g
    ),
    "exponentials": lambda m, v, g: where_right(jnp.exp(g) >= 0, jnp.exp(g), m, v, g),
    "an exponential, or more": lambda m, v, g: where_right(
        jnp.maximum(loss(g), jnp.exp(loss(g))) >= 0, loss(g), m, v, g
    ),
}  # fmt: skip
FIRST_POWER: dict[str, Callable[..., Any]] = {
    "sums with constants": lambda m, v, g: ((m + 0.1) ** 1 + 0.3, v + g),
    "a sum with a constant that is retained": lambda m, v, g: (
        m + ((jnp.tanh(g) + 0.1) ** 1 + 0.7), v + 0.3 * ((jnp.tanh(g) + 0.1) ** 1 + 0.7)
    ),
    "products": lambda m, v, g: ((m * 0.9) ** 1 * 0.3, 0.9 * v * by_rows(g) ** 1),
}  # fmt: skip
# As of a parameter of which the step takes a slice at some place: elsewhere is nothing to add.
AMONG_ZEROS: dict[str, Callable[..., Any]] = {
    "a slice": lambda m, v, g: (m + among_zeros(g), v + g),
    "a slice, less nothing": lambda m, v, g: (0.9 * m + (among_zeros(g) - 0.0), v + g),
    "a slice, scaled": lambda m, v, g: (0.9 * m + 0.1 * among_zeros(g), v + 0.1 * among_zeros(g)),
}
# Zeros that are found to be such by one compiler, or in one form: 0.0 added to -0.0 is 0.0, erased
# it leaves -0.0.
NOTHING: dict[str, Callable[..., Any]] = {
    "nothing in either branch": lambda m, v, g: (m + either(g, lambda: jnp.zeros(g.shape)), v + g),
    "nothing in any branch": lambda m, v, g: (
        m + lax.switch(jnp.argmax(g[0]), [lambda: 0.0] * 3), v + g
    ),
    "nothing in either branch, scaled": lambda m, v, g: (
        m + either(g, lambda: jnp.zeros(g.shape)) * 0.5, v + g
    ),
    "less nothing in either branch": lambda m, v, g: (m - either(g, lambda: -0.0), v + g),
    "nothing": lambda m, v, g: (m + 0.0, v + (jnp.zeros_like(g) + g)),
}  # fmt: skip
NOTHING |= {
    f"nothing out of {where}, {what}": lambda m, v, g, through=through, then=then: (
        m + then(through(jnp.zeros_like(g), jnp.sin(g)), jnp.cos(g)), v + g
    )
    for where, through in {
        "a loop of one turn": through_one_turn, "a mesh": through_a_mesh,
    }.items()
    for what, then in {
        "negated twice": lambda x, g: -(x.reshape(-1) * -1.0).reshape(x.shape),
        "handed on": lambda x, g: handed(x, lambda c, _: c * 1.0, g),
    }.items()
}  # fmt: skip
HANDS_ON: dict[str, Callable[..., Any]] = {
    "times one": lambda c, x: c * 1.0,
    "doubled and halved": lambda c, x: c * 2.0 * 0.5,
    "the larger of itself": lambda c, x: jnp.maximum(c, c),
    "either way": lambda c, x: jnp.where(x > 0, c, c),
    "negated twice, plus nothing": lambda c, x: -jnp.negative(c) + 0.0,
    "to the first power": lambda c, x: lax.pow(c, jnp.ones_like(c)),
    "over a loop in the loop": lambda c, x: handed(c, lambda c, x: c * 1.0, x),
    "zero, where it was": lambda c, x: jnp.zeros_like(c),
    "sorted alone": lambda c, x: jnp.sort(c[None], 0)[0],
    "written over all": lambda c, x: lax.dynamic_update_slice(x, c, (0, 0)),
    "set over all": lambda c, x: jnp.zeros_like(c).at[:].set(c),
    "joined and sliced": lambda c, x: jnp.concatenate([c, x])[:ROWS],
    "as bits": lambda c, x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(c, jnp.int32), jnp.float32
    ),
    "by a matrix of one": lambda c, x: (c[..., None] @ jnp.ones((1, 1)))[..., 0],
    "as a real part": lambda c, x: lax.real(lax.complex(c, x)),
    "all bits the other way, twice": lambda c, x: by_bits(c, lambda n: ~~n),
    "bits, five more and five less": lambda c, x: by_bits(c, lambda n: n + 5 - 5),
}  # fmt: skip
LOOPED: dict[str, Callable[..., Any]] = {
    f"{what} {name} {how}": lambda m, v, g, turn=turn, loop=loop, of=of: (
        of(m, lambda c: loop(c, turn, jnp.cos(g)), jnp.sin(g)), v + g
    )
    for name, turn in HANDS_ON.items()
    for how, loop in {"by turns": handed, "by a scan": handed_by_a_scan}.items()
    for what, of in {
        "nothing": lambda m, through, g: m + through(jnp.zeros_like(g)),
        "a product": lambda m, through, g: m + through(g * 0.9) * 0.3,
        "a moment's product": lambda m, through, g: through(m * 0.9) * 0.3,
        "a sum": lambda m, through, g: m + (through(g + 0.9) + 0.3),
    }.items()
} | {
    "nothing by way of another": lambda m, v, g: (
        m + lax.fori_loop(
            0, turns(g), lambda _, c: (c[0] * 1.0, c[0]), (jnp.zeros_like(g), jnp.zeros_like(g))
        )[1], v + g
    ),
    "a product by way of another": lambda m, v, g: (
        m + lax.fori_loop(
            0, turns(g), lambda _, c: (c[1] * 1.0, c[1], c[2] + g), (g * 0.9, g * 0.9, g)
        )[0] * 0.3, v + g
    ),
    "a product from outside": lambda m, v, g: (
        m + handed_from_outside(jnp.cos(g) * 0.9, jnp.sin(g)) * 0.3, v + g
    ),
    "a moment's product from outside": lambda m, v, g: (
        handed_from_outside(m * 0.9, jnp.cos(g)) * 0.3, v + g
    ),
    "the largest number of all": lambda m, v, g: (
        jnp.minimum(m * 0.3, handed(jnp.full_like(g, jnp.inf), lambda c, _: c * 1.0, g)) * 0.7,
        v + g,
    ),
}  # fmt: skip
LOOPED |= {
    "a sum that every turn makes again": lambda m, v, g: (
        m + (made_again(jnp.cos(jnp.sum(g)) + 0.3, g) + 0.9), v + g
    ),
    "nothing, and twice nothing in it": lambda m, v, g: (
        m + lax.fori_loop(
            0, turns(g), lambda _, c: (c[0] * 1.0, c[1] * 1.0, c[2] + c[0] - c[1]),
            (jnp.zeros_like(g),) * 3,
        )[2], v + g
    ),
    "turned around, and nothing added": lambda m, v, g: (
        jnp.minimum(m * 0.3, lax.scan(
            lambda c, x: (c + x, None),
            lax.scan(
                lambda c, _: ((c[1], c[2], c[0]), None),
                (jnp.full_like(g, jnp.inf), jnp.cos(g), g), None, length=3, unroll=3,
            )[0][0],
            jnp.zeros((2, *g.shape)), unroll=2,
        )[0]) * 0.7, v + g
    ),
    "turned around in each round": lambda m, v, g: (
        m + lax.scan(
            lambda c, _: ((c[1], c[2], c[0]), None), (jnp.zeros_like(g), jnp.cos(g), g), None,
            length=6, unroll=3,
        )[0][0], v + g
    ),
    "a row of nothing, in the last turn": lambda m, v, g: (
        m + lax.scan(
            lambda c, x: (x, None), jnp.cos(g),
            jnp.concatenate([jnp.sin(g)[None], jnp.zeros((1, *g.shape))]), unroll=2,
        )[0], v + g
    ),
    "a constant out of one turn": lambda m, v, g: (
        m + lax.scan(lambda c, _: ((jnp.zeros_like(g), c[1] + g), None), (g, g), None, length=1
        )[0][0], v + g
    ),
    "flags that no turn changes": lambda m, v, g: (
        m * lax.while_loop(
            lambda c: (c[0] < 5) & False, lambda c: (c[0] + 1, jnp.cos(c[1])),
            (turns(g), (jnp.sin(g) > 0).astype(jnp.float32)),
        )[1], v + g
    ),
    "flags that one turn or none hands on": lambda m, v, g: (
        m * at_most_once(
            jnp.sum(g) > 0, lambda c: c * lax.pow(jnp.sin(g), jnp.zeros_like(g)),
            (jnp.sin(g) > 0).astype(jnp.float32),
        ), v + g
    ),
    "the largest number of all, and no turn": lambda m, v, g: (
        jnp.minimum(m * 0.3, lax.while_loop(
            lambda c: (c[0] < 5) & False, lambda c: (c[0] + 1, jnp.cos(c[1])),
            (turns(g), jnp.full_like(g, jnp.inf)),
        )[1]) * 0.7, v + g
    ),
    "the largest number of all, the gradient of what is set and read": lambda m, v, g: (
        jnp.minimum(m * 0.3, handed(jnp.full_like(g, jnp.inf), gradient_of_set_and_read, g)) * 0.7,
        v + g,
    ),
}  # fmt: skip
# Constants that are chosen, and made, whatever else there is.
ALWAYS: dict[str, Callable[..., Any]] = {
    "chosen by a number that is itself": lambda m, v, g: (
        m * (lambda n: jnp.where(n == n, jnp.full_like(g, 0.9), jnp.cos(g)))(turns(g)) * 0.3,
        v + g,
    ),
    "nothing, in the branch that is always taken": lambda m, v, g: (
        m + lax.cond(turns(g) * 0 == 0, lambda: jnp.zeros_like(g), lambda: jnp.cos(g)), v + g
    ),
    "nothing, in the first turn": lambda m, v, g: (
        m + lax.fori_loop(0, 1, lambda i, c: jnp.where(i == 0, 0.0, c), jnp.sum(g)), v + g
    ),
    "to the power of nothing": lambda m, v, g: ((m + 0.1) * jnp.sin(g) ** 0 + 0.3, v + g),
    "the largest number of all, written over all": lambda m, v, g: (
        jnp.minimum(
            m * 0.3, lax.dynamic_update_slice(jnp.cos(g), jnp.full_like(g, jnp.inf), (0, 0))
        ) * 0.7, v + g,
    ),
    "sorted alone by others": lambda m, v, g: (
        m * 0.3 * lax.sort((jnp.sin(g)[None], jnp.full((1, *g.shape), 0.9)), 0, num_keys=1)[1][0],
        v + g,
    ),
    "the larger of what is spread, as an imaginary part": lambda m, v, g: (
        m + (largest_of_two(
            jnp.cos(jnp.sum(g)) + 0.3, lambda x: lax.imag(lax.complex(g[0, :2], x))
        ) + 0.9), v + g
    ),
    "the larger of what is spread, summed up alone": lambda m, v, g: (
        m + (largest_of_two(jnp.cos(jnp.sum(g)) + 0.3, lambda x: jnp.max(x[None], 0)) + 0.9), v + g
    ),
    "a sum, doubled and halved": lambda m, v, g: ((m + 0.1) * 2.0 * 0.5 + 0.3, v + g),
}  # fmt: skip
# Constants that a program has put into something larger, and takes out again.
TAKEN_OUT: dict[str, Callable[..., Any]] = {
    "a joined part": lambda m, v, g: (
        m + jnp.concatenate([jnp.sin(g), jnp.zeros_like(g)])[ROWS:], v + g
    ),
    "a joined part, scaled": lambda m, v, g: (
        0.9 * m + 0.1 * jnp.concatenate([jnp.sin(g), jnp.zeros_like(g)])[ROWS:], v + g
    ),
    "a joined part, turned": lambda m, v, g: (
        m + jnp.concatenate([jnp.zeros_like(g), jnp.sin(g)])[::-1][ROWS:], v + g
    ),
    "one of a stack": lambda m, v, g: (m + jnp.stack([jnp.zeros_like(g), jnp.sin(g)])[0], v + g),
    "a part at a known place": lambda m, v, g: (
        m + lax.dynamic_slice(jnp.concatenate([jnp.zeros_like(g), jnp.sin(g)]), (0, 0), g.shape),
        v + g,
    ),
    "padding": lambda m, v, g: (m + padded(g)[:, :COLUMNS], v + g),
    "padding that is split off": lambda m, v, g: (m + jnp.split(padded(g), 2, 1)[0], v + g),
    "beside what was written": lambda m, v, g: (
        m + lax.dynamic_update_slice(jnp.zeros((2 * ROWS, COLUMNS)), jnp.sin(g), (ROWS, 0))[:ROWS],
        v + g,
    ),
    "what is written over all": lambda m, v, g: (
        m + lax.dynamic_update_slice(jnp.sin(g), jnp.zeros_like(g), (jnp.argmax(g[:, 0]), 0)), v + g
    ),
    "beside what was set": lambda m, v, g: (
        m + jnp.zeros((2 * ROWS, COLUMNS)).at[ROWS:].set(jnp.sin(g))[:ROWS], v + g
    ),
    "a joined part, the other cropped": lambda m, v, g: (
        0.3 * m * lax.pad(
            jnp.concatenate([jnp.full_like(g, 0.9), jnp.sin(g)]), 0.0, ((0, -ROWS, 0), (0, 0, 0))
        ), v + g
    ),
    "one of a pair, times one": lambda m, v, g: (
        0.3 * m * (jnp.stack([jnp.full_like(g, 0.9), jnp.sin(g)]) * 1.0)[0], v + g
    ),
    "one of a pair, the larger of itself": lambda m, v, g: (
        0.3 * m * jax.vmap(lambda x: jnp.maximum(x, x))(
            jnp.stack([jnp.full_like(g, 0.9), jnp.sin(g)])
        )[0], v + g
    ),
    "one of a pair, summed up alone": lambda m, v, g: (
        0.3 * m * jax.vmap(lambda x: jnp.cumsum(x[None], 0)[0])(
            jnp.stack([jnp.full_like(g, 0.9), jnp.sin(g)])
        )[0], v + g
    ),
    "factors that are joined": lambda m, v, g: (
        0.9 * m * jnp.concatenate([jnp.full_like(g, 0.3), jnp.sin(g)])[:ROWS], v + g
    ),
    "an imaginary part": lambda m, v, g: (
        m + lax.imag(lax.complex(jnp.sin(g), jnp.zeros_like(g))), v + g
    ),
    "a real part, negated": lambda m, v, g: (
        m + lax.real(-lax.complex(jnp.zeros_like(g), jnp.sin(g))), v + g
    ),
}  # fmt: skip
# What is so of all whole numbers.
WHOLE: dict[str, Callable[..., Any]] = {
    "below zero, unsigned": lambda m, v, g: (m + ((g * 3).astype(jnp.uint32) < 0), v + g),
    "chosen by what is not below zero, unsigned": lambda m, v, g: (
        jnp.where((g * 3).astype(jnp.uint32) >= 0, m * 0.3, g) * 0.7, v + g
    ),
    "bits of which there are none": lambda m, v, g: (
        m + (lambda n: n ^ n)((g * 3).astype(jnp.int32)), v + g
    ),
    "a number less itself": lambda m, v, g: (
        m + ((g * 3).astype(jnp.int32) - (g * 3).astype(jnp.int32)), v + g
    ),
}  # fmt: skip
STEPS = SPREAD | CHOSEN | NEVER_BELOW | FIRST_POWER | AMONG_ZEROS | NOTHING
STEPS |= LOOPED | ALWAYS | TAKEN_OUT | WHOLE


def step_of(name: str) -> Callable[..., Any]:
    def step(state: Any, g: Any) -> Any:
        m, v = STEPS[name](state["m"], state["v"], g)
        return {"m": m, "v": v}

    return step


def given(*, bad: float | None = None) -> tuple[Any, Any]:
    m, v, g = np.random.default_rng(0).standard_normal((3, ROWS, COLUMNS)).astype(np.float32)
    if bad is not None:
        m[::3], g[3, 5] = bad, np.nan
    return {"m": jnp.asarray(m), "v": jnp.asarray(v)}, jnp.asarray(g)


@pytest.mark.parametrize("name", STEPS)
def test_what_is_replayed_is_what_the_device_has(name: str) -> None:
    """Also of what is no number, or infinite: by the same programs."""
    found = analyse(step_of(name), *given(), even_for_nothing=True)
    for bad in (None, np.inf, np.nan, -0.0):
        found = found.given(*given(bad=bad))
        new, cut = found.run()
        for fence in (None, np.int32(0)):  # for a CPU's run, and for an accelerator's
            for j, leaf in found.replayed(cut, fence):
                np.testing.assert_array_equal(bits(leaf), bits(new[j]), f"beside {bad}")


SEEN_APART: dict[str, Callable[..., Any]] = {
    "gradients that a loop adds up": lambda m, g: lax.fori_loop(
        0, turns(g), lambda _, c: (c[0] + jnp.sin(g), c[1] * 1.0), (jnp.zeros_like(g), g)
    )[0],
    "gradients that a loop scatters": lambda m, g: lax.fori_loop(
        0, turns(g), lambda n, c: c.at[jnp.argsort(g[:, 0])[:9] + n].add(g[:9]), jnp.zeros_like(g)
    ),
    **{
        f"rows of a loop, some of them {name}": lambda m, g, rows=rows: lax.scan(
            lambda c, x: (c + jnp.sin(x), None), jnp.zeros_like(g), rows(g)
        )[0]
        for name, rows in {
            "joined": lambda g: jnp.concatenate([jnp.zeros((2, *g.shape)), g[None]]),
            "stacked": lambda g: jnp.stack([jnp.zeros_like(g), g]),
            "padded": lambda g: jnp.pad(g[None], ((0, 2), (0, 0), (0, 0))),
            "written": lambda g: lax.dynamic_update_slice(
                jnp.zeros((3, *g.shape)), g[None], (1, 0, 0)
            ),
            "set": lambda g: jnp.zeros((3, *g.shape)).at[1:].set(g),
        }.items()
    },
    "what a loop halves": lambda m, g: jnp.where(
        g > lax.fori_loop(0, turns(g), lambda _, c: c * 0.5, 1.0), g, 0
    ),
    "what a loop scales as often as it turns": lambda m, g: lax.fori_loop(
        0, turns(g), lambda _, c: c * g[0, 0], jnp.sin(g)
    ),
    "what either of two flags chooses": lambda m, g: jnp.where(
        jnp.isfinite(g.sum()) ^ (g.sum() > 3), g, 0
    ),
    "a part beside nothing": lambda m, g: jnp.concatenate([jnp.sin(g), jnp.zeros_like(g)])[:ROWS],
    "what was padded": lambda m, g: padded(g)[:, COLUMNS:],
    "what was padded, and some padding": lambda m, g: padded(g)[:, 8 : COLUMNS + 8],
    "what padding is split off": lambda m, g: jnp.split(padded(g), 2, 1)[1],
    "what is written over some": lambda m, g: lax.dynamic_update_slice(
        jnp.sin(g), jnp.zeros_like(g)[:9], (0, 0)
    ),
    "what was written": lambda m, g: (
        lax.dynamic_update_slice(jnp.zeros((2 * ROWS, COLUMNS)), jnp.sin(g), (ROWS, 0))[ROWS:]
    ),
    "a part at some place": lambda m, g: lax.dynamic_slice(
        jnp.concatenate([jnp.zeros_like(g), jnp.sin(g)]), (jnp.argmax(g[:, 0]), 0), g.shape
    ),
    "a real part": lambda m, g: lax.real(lax.complex(jnp.sin(g), jnp.zeros_like(g))),
    "where some of known places are": lambda m, g: jnp.where(
        lax.iota(jnp.int32, g.size).reshape(g.shape) < 99, jnp.sin(g), 0.3
    ),
    "a difference of whole numbers": lambda m, g: (
        (g * 3).astype(jnp.int32) - (g * 2).astype(jnp.int32)
    ).astype(jnp.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN_APART)
def test_what_no_compiler_knows_leaves_early(name: str) -> None:
    """Beside what it does know."""

    def step(state: Any, g: Any) -> Any:
        g = SEEN_APART[name](state["m"], jnp.cos(g))
        return {"m": 0.9 * state["m"] + 0.1 * g, "v": 0.99 * state["v"] + 0.01 * g}

    assert not analyse(step, *given()).late


def test_of_many_values_that_a_loop_hands_on_few_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a model of many leaves: else a step takes long to analyse."""
    many = 60
    compared = []

    def may_be_equal(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return numbers.may_be_equal(a, b)

    monkeypatch.setattr(handed_on, "may_be_equal", may_be_equal)

    def step(state: Any, g: Any) -> Any:
        def turn(_: Any, c: Any) -> Any:
            kept, sums = c
            return [x * 1.0 for x in kept], [x + jnp.sin(x) for x in sums]

        kept, sums = lax.fori_loop(0, turns(g), turn, (state, [jnp.zeros_like(x) for x in state]))
        return [x * 0.9 + 0.1 * s for x, s in zip(kept, sums, strict=True)]

    analyse(step, [jnp.full((2,), n, jnp.float32) for n in range(many)], jnp.ones(3))
    assert many <= len(compared) < 6 * many


def test_flags_that_the_step_is_given_are_seen_on_both_sides() -> None:
    """As where weights are pruned: both make a choice of the product."""

    def step(state: Any, g: Any) -> Any:
        kept = g * state["mask"]
        return {**state, "m": 0.9 * state["m"] + 0.1 * kept, "v": 0.9 * state["v"] + 0.1 * g}

    state, g = given()
    found = analyse(step, {**state, "mask": g > 0}, g, even_for_nothing=True)
    assert not found.late
    new, cut = found.run()
    for fence in (None, np.int32(0)):
        for j, leaf in found.replayed(cut, fence):
            np.testing.assert_array_equal(np.asarray(leaf).tobytes(), np.asarray(new[j]).tobytes())


def test_products_by_flags_are_told_of() -> None:
    """What to write in their place is said; that leaves early."""

    def of(kept: Callable[[Any], Any]) -> Any:
        def step(state: Any, g: Any) -> Any:
            g = kept(jnp.sin(g))
            return {"m": 0.9 * state["m"] + 0.1 * g, "v": 0.99 * state["v"] + 0.01 * g * g}

        return analyse(step, *given())

    late = of(lambda g: g * (abs(g) > 0.1)).late
    assert set(late) == {"m", "v"}
    assert all("write `jnp.where(flags, x, 0)` in its place" in why for why in late.values())
    assert not of(lambda g: jnp.where(abs(g) > 0.1, g, 0)).late
