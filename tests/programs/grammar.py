"""A grammar of arithmetic: random expressions over arrays of one shape, and scalars.

It is run while a step is traced: what is drawn is computed at once. Functions that JAX may trace
more than once (bodies of loops, branches) begin a random generator of their own at every trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .explicit import is_explicit, put, together

CONSTANTS = (0.1, 0.9, 0.999, 0.5, 2.0, 1.0, 0.3, -0.7, 8.0, 3.0, 1e-3, 0.0, -1.0)


def _flat(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Of an array as one row, whatever its shape."""
    return lambda x: f(x.reshape(-1)).reshape(x.shape)


def _narrow(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: (x.astype(dtype) * 0.9).astype(jnp.float32)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x))


def _axis(x: jax.Array) -> int | None:
    return 0 if x.ndim else None


def _by_rows(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """An array times something of the sums of its rows."""

    def times(x: jax.Array) -> jax.Array:
        sums = jnp.sum(x, -1, keepdims=True) if x.ndim else x
        return x * jnp.broadcast_to(f(sums), x.shape)

    return times


@jax.custom_vjp
def identity(x: jax.Array) -> jax.Array:
    """Whose gradient is clipped."""
    return x


identity.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

# Of one array.
UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "neg": lambda x: -x, "abs": jnp.abs, "sign": jnp.sign, "square": jnp.square,
    "cube": lambda x: x**3, "sqrt": lambda x: jnp.sqrt(jnp.abs(x)), "tanh": jnp.tanh,
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 0.1), "exp": lambda x: jnp.exp(jnp.clip(x, -3, 3)),
    "log": lambda x: jnp.log1p(jnp.abs(x)), "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "relu": jax.nn.relu, "reciprocal": lambda x: 1.0 / (jnp.abs(x) + 0.1),
    "floor": lambda x: jnp.floor(x * 3.0), "round": jnp.round,
    "truncated": lambda x: jnp.clip(x * 9, -99, 99).astype(jnp.int32).astype(jnp.float32),
    "finite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    "bf16": _narrow(jnp.bfloat16), "fp16": _narrow(jnp.float16),
    "stored in bf16": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "reduced": lambda x: lax.reduce_precision(x, 8, 7),
    "named": lambda x: checkpoint_name(x, "value"), "stopped": lax.stop_gradient,
    "barrier": lax.optimization_barrier, "copied": jnp.copy, "own gradient": identity,
    "jit": jax.jit(lambda x: 0.3 * x), "halved": lambda x: x / 2.0,
    "times one": lambda x: x * 1.0, "plus zero": lambda x: x + 0.0,
    # Layout.
    "roll": lambda x: jnp.roll(x, 1), "reversed": _flat(lambda x: x[::-1]),
    "transposed": lambda x: x.T.reshape(x.shape), "twice": lambda x: x.T.T,
    "halves": _flat(lambda x: jnp.concatenate([x[x.size // 2 :], x[: x.size // 2]])),
    "taken": _flat(lambda x: jnp.take(x, jnp.arange(x.size)[::-1])),
    "set": _flat(lambda x: x.at[::2].set(0.25)), "added": _flat(lambda x: x.at[::2].add(0.1)),
    "spread": _flat(lambda x: jnp.broadcast_to(x[0], x.shape)),
    "updated": _flat(lambda x: lax.dynamic_update_slice(x, x[-1:], (0,))),
    # With reductions.
    "normed": lambda x: x / (jnp.sqrt(jnp.sum(x * x)) + 1.0),
    "centred": lambda x: x - jnp.mean(x, _axis(x)),
    "softmax": lambda x: jax.nn.softmax(x, 0) if x.ndim else x,
    "cumulative": _flat(jnp.cumsum), "sorted": _flat(jnp.sort),
    "columns": lambda x: x * jnp.max(jnp.abs(x), _axis(x)),
    "clipped by norm": lambda x: jnp.where(_norm(x) < 0.5, x, (x / _norm(x)) * 0.5),
    "scaled by norm": lambda x: x * jnp.minimum(1.0, 0.5 / (_norm(x) + 1e-6)),
    "if finite": lambda x: jnp.where(jnp.all(jnp.isfinite(x)), x, jnp.zeros_like(x)),
    "by rows": _by_rows(lambda sums: 1.0 / (1.0 + jnp.abs(sums))),
    "flags of rows": _by_rows(lambda sums: sums > 0),
    "flags, turned": lambda x: x * (jnp.sin(x.T) > 0).T,
    "if a number": lambda x: jnp.where(jnp.exp(jnp.mean(jnp.sin(x))) >= 0, x, 0.5 * x),
    # Loops.
    "loop": lambda x: lax.fori_loop(0, 2, lambda _, c: c * 0.9 + 0.1, x),
    "one turn": lambda x: lax.fori_loop(0, 1, lambda _, c: c * 0.9, x),
    "scan": lambda x: lax.scan(lambda c, _: (c * 0.5, None), x, None, length=3)[0],
    "once": lambda x: lax.scan(lambda c, t: (c, t * 0.3), 0.0, x[None])[1][0],
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * 0.7), (0, x)
    )[1],
}  # fmt: skip
# Of two arrays of a shape, and two constants.
BINARY: dict[str, Callable[..., jax.Array]] = {
    "add": lambda x, y, a, b: x + y, "sub": lambda x, y, a, b: x - y,
    "mul": lambda x, y, a, b: x * y, "max": lambda x, y, a, b: jnp.maximum(x, y),
    "min": lambda x, y, a, b: jnp.minimum(x, y),
    "scaled": lambda x, y, a, b: x + a * y, "both scaled": lambda x, y, a, b: a * x + b * y,
    "averaged": lambda x, y, a, b: 0.9 * x + (1 - 0.9) * y,
    "nearer": lambda x, y, a, b: x + a * (y - x),
    "quotient": lambda x, y, a, b: x / (jnp.sqrt(jnp.abs(y)) + 1e-2),
    "second moment": lambda x, y, a, b: 0.99 * x + 0.01 * (y * y),
    "product of scaled": lambda x, y, a, b: (x * a) * (y * b),
    "plus constants": lambda x, y, a, b: (x + a) + (y + b),
    "larger": lambda x, y, a, b: jnp.where(x > y, x * a, y),
    "where positive": lambda x, y, a, b: jnp.where(x > 0, y, x + b),
    "masked": lambda x, y, a, b: jnp.where(_mask(x), x * a, y * b),
    "like": lambda x, y, a, b: jnp.copysign(x, y),
    "times mean": lambda x, y, a, b: x * jnp.mean(y),
    "branch": lambda x, y, a, b: lax.cond(jnp.sum(y) > 0, lambda: x * a, lambda: y + b),
    "joined": lambda x, y, a, b: _flat(
        lambda t: jnp.concatenate([t[: t.size // 2], y.reshape(-1)[t.size // 2 :]])
    )(x),
    "dot": lambda x, y, a, b: x @ y.T @ x / x.size if x.ndim == 2 else x * y,
    "turns": lambda x, y, a, b: lax.fori_loop(0, 2, lambda _, c: a * c + y, x),
    # As optimizers do: averages by what is computed, schedules, bounds, steps that are skipped.
    "averaged by": lambda x, y, a, b: a * x + (1.0 - a) * y,
    "both by one": lambda x, y, a, b: x * a + a * y,
    "scaled twice": lambda x, y, a, b: x + (y * a) * b,
    "scaled square": lambda x, y, a, b: x * b + a * jnp.square(b * y),
    "polynomial": lambda x, y, a, b: a * x + b * (x * x) * y,
    "running mean": lambda x, y, a, b: x + (y - x) / (2.0 + a),
    "corrected": lambda x, y, a, b: x / (2.0 + a) + b * y,
    "infinity norm": lambda x, y, a, b: jnp.maximum(a * x, jnp.abs(y) + 1e-3),
    "largest moment": lambda x, y, a, b: jnp.maximum(x, 0.99 * x + 0.01 * (y * y)),
    "by a choice": lambda x, y, a, b: jnp.where(jnp.less(a, b), x, y),
    "not below zero": lambda x, y, a, b: jnp.where(x + y < 0.0, -x, y),
    "resized": lambda x, y, a, b: jnp.where(
        x * y > 0, jnp.minimum(y * 1.2, 5.0), jnp.where(x * y < 0, jnp.maximum(y * 0.5, 0.1), y)
    ),
    "either scaled": lambda x, y, a, b: lax.cond(jnp.sum(y) > 0, lambda: x * a, lambda: y * a),
    "added or not": lambda x, y, a, b: (
        x + lax.cond(jnp.sum(y) > 0, lambda: a * y, lambda: jnp.zeros_like(y))
    ),
}  # fmt: skip

# What the host can repeat: of updates made of these alone, leaves may leave early.
REPEATED = (
    "neg", "abs", "sign", "square", "cube", "clip", "relu", "finite", "named", "stopped",
    "copied", "jit", "times one", "plus zero", "halved",
    "add", "sub", "mul", "max", "min", "scaled", "both scaled", "averaged", "nearer",
    "second moment", "product of scaled", "plus constants", "larger", "where positive", "branch",
    "masked", "averaged by", "both by one", "scaled twice", "scaled square", "polynomial",
    "infinity norm", "largest moment", "by a choice", "not below zero", "resized", "either scaled",
    "added or not", "if finite", "scaled by norm", "by rows", "flags of rows", "flags, turned",
    "if a number",
)  # fmt: skip


def _mask(x: jax.Array) -> jax.Array:
    return (lax.iota(jnp.int32, x.size) % 3 == 0).reshape(x.shape)


class Expressions:
    """Draws expressions over what there is.

    Args:
      rng: Of the choices.
      arrays: fp32, of one shape.
      scalars: fp32.
      names: Of the operations to draw from.
    """

    def __init__(
        self, rng: Random, arrays: Sequence[jax.Array], scalars: Sequence[jax.Array],
        names: Sequence[str] = (*UNARY, *BINARY),
    ):  # fmt: skip
        self._rng, self._scalars = rng, list(scalars)
        self._unary = [together(UNARY[name]) for name in names if name in UNARY]
        self._binary = [together(BINARY[name]) for name in names if name in BINARY]
        self.arrays = list(arrays)

    def array(self, depth: int) -> jax.Array:
        """An expression of so many operations, nested; parts may be shared with others."""
        rng = self._rng
        if depth <= 0 or rng.random() < 0.1:
            return rng.choice(self.arrays)
        kind = rng.random()
        if kind < 0.15:
            value = self.array(depth - 1) * rng.choice(CONSTANTS)
        elif kind < 0.45:
            value = rng.choice(self._unary)(self.array(depth - 1))
        elif kind < 0.85:
            x, y = self.array(depth - 1), self.array(rng.randrange(depth))
            value = rng.choice(self._binary)(x, y, self.factor(), self.factor())
        else:
            value = self.array(depth - 1) * self.scalar()
        self.arrays.append(value)
        return value

    def factor(self) -> Any:
        """A constant, or a scalar that is computed."""
        return self._rng.choice(CONSTANTS) if self._rng.random() < 0.7 else self.scalar()

    def scalar(self) -> jax.Array:
        """An expression of scalars; it may be part of others."""
        x, y = (self._rng.choice(self._scalars) for _ in range(2))
        value = self._rng.choice([
            lambda: x, lambda: x * 0.1, lambda: 1.0 / (1.0 + jnp.abs(x)), lambda: x * y,
            lambda: jnp.where(x > y, x, 0.5), lambda: 1.0 - x, lambda: x - 0.3, lambda: x / 3.0,
            lambda: jnp.minimum(x, 1.0), lambda: jnp.square(x), lambda: x * x, lambda: x + y,
        ])()  # fmt: skip
        self._scalars.append(value)
        return value


# Around an update `(arrays, scalars) -> arrays`, whose first results are like its first arguments.
Update = Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]


def _scanned(turns: int) -> Callable[[Update, Any], Update]:
    def around(f: Update, _: Any) -> Update:
        def update(arrays: list[jax.Array], scalars: list[jax.Array]) -> list[jax.Array]:
            def body(olds: list[jax.Array], _: None) -> tuple[list[jax.Array], None]:
                return f([*olds, *arrays[len(olds) :]], scalars), None

            like = jax.eval_shape(f, arrays, scalars)
            return lax.scan(body, arrays[: len(like)], None, length=turns)[0]

        return update

    return around


def _skipped(f: Update, _: Any) -> Update:
    """The update, or none."""

    def update(arrays: list[jax.Array], scalars: list[jax.Array]) -> list[jax.Array]:
        like = jax.eval_shape(f, arrays, scalars)
        keep = arrays[: len(like)]
        return lax.cond(scalars[0] < scalars[-1], lambda: f(arrays, scalars), lambda: keep)

    return update


def _mapped(f: Update, place: Any) -> Update:
    """In a `shard_map`, where arrays are shards."""
    if not isinstance(place, jax.sharding.NamedSharding):
        return f
    spec, whole = place.spec, jax.P()
    mapped = functools.partial(jax.shard_map, mesh=place.mesh, in_specs=(spec, whole))
    update = mapped(f, out_specs=spec)
    if not is_explicit(place):
        return update
    return lambda arrays, scalars: update([put(x, place) for x in arrays], scalars)


def _jitted(f: Update, _: Any) -> Update:
    """In a `jit` that closes over an array."""
    table = jnp.array([1.0, 0.5])

    def update(arrays: list[jax.Array], scalars: list[jax.Array]) -> list[jax.Array]:
        return f(arrays, [*scalars, jnp.sum(table)])

    return jax.jit(update)


AROUND: dict[str, Callable[[Update, Any], Update]] = {
    "nothing": lambda f, place: f,
    "jit": _jitted,
    "checkpoint": lambda f, place: jax.checkpoint(f),
    "turns": _scanned(2), "one turn": _scanned(1),
    "skipped": _skipped,
    "shard_map": _mapped,
}  # fmt: skip


# Of one parameter as a matrix, and a batch of 16 rows of 8 and as many ids.
def _rows(w: jax.Array, x: jax.Array, ids: jax.Array) -> jax.Array:
    tiled = jnp.tile(x, (1, -(-w.shape[0] // x.shape[1])))[:, : w.shape[0]]
    return jnp.mean(jnp.tanh(tiled @ w) ** 2)


def _scan_of_rows(w: jax.Array, x: jax.Array, ids: jax.Array) -> jax.Array:
    micro = x.reshape(-1, 2, x.shape[1]).swapaxes(0, 1)
    return lax.scan(lambda c, t: (c + _rows(w, t, ids), None), 0.0, micro)[0]


LOSSES: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "rows": _rows,
    "elements": lambda w, x, ids: jnp.sum(jnp.sin(3 * w)) * (1 + jnp.mean(x)),
    "embedding": lambda w, x, ids: jnp.mean(jnp.cos(w[ids % w.shape[0]])) * 5,
    "scan": _scan_of_rows,
    "checkpoint": jax.checkpoint(_rows),
    "own gradient": lambda w, x, ids: _rows(identity(w), x, ids),
    "loop": lambda w, x, ids: _rows(lax.fori_loop(0, 2, lambda _, c: jnp.sin(c), w), x, ids),
    "branch": lambda w, x, ids: lax.cond(
        jnp.mean(x) > 0, lambda: _rows(w, x, ids), lambda: jnp.sum(w * w)
    ),
    "none": lambda w, x, ids: jnp.mean(x),
}
