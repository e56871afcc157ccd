"""Whatever is retained is the number that the step goes on with, whatever follows it.

A compiler merges operations across a value that a program also returns: it then goes on with
another number than the one returned (docs/decisions/0001). Here every kind of value is followed by
every kind of operation; what leaves early must be replayed bit for bit. `make merges` tries all
pairs, `make test` some.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs.random_updates import with_special
from training_helpers import analyse, bits

SIZE, WIDTH = 600, 7
# Of numbers, rows of numbers, and a row.
VALUES: dict[str, Callable[..., Any]] = {
    **{
        name: lambda x, a, r, f=f: f(jnp.abs(x))
        for name, f in {
            "sqrt": jnp.sqrt, "rsqrt": lax.rsqrt, "cbrt": lax.cbrt, "exp": jnp.exp,
            "exp2": jnp.exp2, "expm1": jnp.expm1, "log1p": jnp.log1p, "tanh": jnp.tanh,
            "sin": jnp.sin, "logistic": jax.nn.sigmoid, "erf": lax.erf,
            "root as a power": lambda x: x**0.5, "power": lambda x: x**3.3,
            "reciprocal": lambda x: 1.0 / x, "floor": jnp.floor,
        }.items()
    },
    "power of a constant": lambda x, a, r: lax.pow(jnp.full_like(x, 0.9), x),
    "norm": lambda x, a, r: jnp.sqrt(jnp.sum(a * a, 1)),
    "quotient": lambda x, a, r: x / a[:, 0],
    "quotient by a root": lambda x, a, r: x / jnp.sqrt(jnp.abs(a[:, 0])),
    "quotient by a sum": lambda x, a, r: x / (a[:, 0] + 0.1),
    "quotient of a quotient": lambda x, a, r: (x / a[:, 0]) / a[:, 1],
    "sum": lambda x, a, r: jnp.sum(a, 1),
    "scaled sum": lambda x, a, r: jnp.sum(a * 0.1, 1),
    "mean": lambda x, a, r: jnp.mean(a, 1),
    "dot": lambda x, a, r: a @ r,
    "scaled dot": lambda x, a, r: (a * 0.1) @ r,
    "dot with what is scaled": lambda x, a, r: a @ (r * r[0]),
    "scaled dot outside": lambda x, a, r: (a @ r) * 0.1,
    "largest": lambda x, a, r: jnp.max(a * 0.1, 1),
    "at least": lambda x, a, r: jnp.maximum(x * 0.1, -0.5),
    "clipped": lambda x, a, r: jnp.clip(x * 0.1, -0.2, 0.2),
    "plus a constant": lambda x, a, r: x + 0.1,
    "from a constant": lambda x, a, r: 0.3 - x,
    "plus a constant, negated": lambda x, a, r: -(x + 0.1),
    "plus a constant, times one": lambda x, a, r: (x + 0.1) * 1.0,
    "plus a constant, twice": lambda x, a, r: (x + 0.1) * 2.0,
    "plus a constant, reversed": lambda x, a, r: (x + 0.1)[::-1],
    "plus a constant and more": lambda x, a, r: (x + 0.1) + a[:, 0],
    "both scaled": lambda x, a, r: x * 0.1 + a[:, 0] * 0.1,
    "all scaled": lambda x, a, r: x * 0.1 + a[:, 0] * 0.1 + a[:, 1] * 0.1,
    "a sum of thirds": lambda x, a, r: x / 3.0 + (a[:, 0] / 3.0 + a[:, 1] / 3.0),
    "both scaled, one moved": lambda x, a, r: (
        (x * 0.1).reshape(2, -1)[::-1].reshape(-1) + a[:, 0] * 0.1
    ),
    "chosen": lambda x, a, r: jnp.where(x > 0, x * 0.1, a[:, 0] * 0.1),
    "cumulative": lambda x, a, r: jnp.cumsum(x * 0.1),
    "narrowed": lambda x, a, r: (x * 0.1).astype(jnp.bfloat16).astype(jnp.float32),
    "sorted": lambda x, a, r: jnp.sort(x * 0.1),
    "gathered": lambda x, a, r: jnp.take(x * 0.1, jnp.arange(SIZE)[::-1]),
    "joined": lambda x, a, r: jnp.concatenate([x[:99] * 0.1, x[99:] * 0.1]),
    "scattered": lambda x, a, r: jnp.zeros_like(x).at[::2].set(x[::2] * 0.1),
    "updated": lambda x, a, r: lax.dynamic_update_slice(x * 0.1, r * 0.1, (3,)),
    "turns": lambda x, a, r: lax.fori_loop(0, 2, lambda _, c: c * 0.1, x),
    "one turn": lambda x, a, r: lax.fori_loop(0, 1, lambda _, c: c * 0.1, x),
    "scanned": lambda x, a, r: lax.scan(lambda c, t: (c, t * 0.1), 0.0, x)[1],
    "scanned once": lambda x, a, r: lax.scan(lambda c, t: (c, t * 0.1), 0.0, x[None])[1][0],
    "branch": lambda x, a, r: lax.cond(r[0] > 0, lambda t: t * 0.1, lambda t: t * 0.2, x),
}  # fmt: skip


def on_one_device(f: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


@jax.custom_batching.custom_vmap
def batched_by_hand(x: Any) -> Any:
    return x * 0.1


@custom_partitioning
def partitioned_by_hand(x: Any) -> Any:
    return x * 0.1


batched_by_hand.def_vmap(lambda size, batched, x: (batched_by_hand(x), batched[0]))
partitioned_by_hand.def_partition(
    partition=lambda mesh, given, made: (
        mesh, lambda x: x * 0.1, given[0].sharding, (given[0].sharding,)
    ),
    infer_sharding_from_operands=lambda mesh, given, made: given[0].sharding,
    sharding_rule="i -> i",
)  # fmt: skip


def in_a_kernel(x: Any) -> Any:
    def scale(given: Any, made: Any) -> None:
        made[...] = given[...] * 0.1

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(scale, out_shape=like, interpret=True)(x)


def in_place(x: Any, *, freeze: bool = False) -> Any:
    kept = jax.new_ref(x)
    kept[...] = kept[...] * 0.1
    return jax.freeze(kept) if freeze else kept[...]


# What the compiler erases, as its sizes are, or sees through: it merges what is on both sides.
ERASED: dict[str, Callable[..., Any]] = {
    "sorted alone": lambda x, a, r: jnp.sort((x * 0.1)[None], 0)[0],
    "largest of one": lambda x, a, r: lax.top_k((x * 0.1)[:, None], 1)[0][:, 0],
    "cumulative alone": lambda x, a, r: jnp.cumsum((x * 0.1)[None], 0)[0],
    "gathered at a place": lambda x, a, r: jnp.stack([x * 0.1, a[:, 0]])[jnp.array([0])][0],
    "scattered to a place": lambda x, a, r: (
        jnp.zeros((2, SIZE)).at[jnp.array([1])].add((x * 0.1)[None])[1]
    ),
    "no turn": lambda x, a, r: lax.fori_loop(0, 0, lambda _, c: jnp.cos(c), x * 0.1),
    "sum of what is spread": lambda x, a, r: jnp.sum(jnp.broadcast_to(x, (3, SIZE)), 0),
    "sum of what is spread and computed": lambda x, a, r: jnp.sum(
        jnp.cos(jnp.broadcast_to(x[None], (3, SIZE))) + 0.3, 0
    ),
    "sum of a pair": lambda x, a, r: jnp.sum(jnp.stack([x * 0.1, a[:, 0] * 0.1]), 0),
    "product of a pair": lambda x, a, r: jnp.prod(jnp.stack([x, jnp.full(SIZE, 0.1)]), 0),
    "dot of what is spread": lambda x, a, r: jnp.repeat(x[:, None], 3, 1) @ jnp.ones(3),
    "gathered alone": lambda x, a, r: (x * 0.1)[None][jnp.array([0])][0],
    "overwritten": lambda x, a, r: jnp.zeros_like(x).at[:].set(x * 0.1),
    "scattered alone": lambda x, a, r: jnp.zeros((1, SIZE)).at[jnp.array([0])].add(x * 0.1)[0],
    "dot with one": lambda x, a, r: ((x * 0.1)[:, None] @ jnp.ones((1, 1)))[:, 0],
    "dot with a number": lambda x, a, r: jnp.einsum("i,->i", x, jnp.float32(0.1)),
    "convolved with a constant each": lambda x, a, r: lax.conv_general_dilated(
        x[None, :, None], jnp.full((SIZE, 1, 1), 0.1), (1,), "VALID", feature_group_count=SIZE
    )[0, :, 0],
    "larger of itself": lambda x, a, r: jnp.maximum(x * 0.1, x * 0.1),
    "chosen either way": lambda x, a, r: jnp.where(a[:, 0] > 0, x * 0.1, x * 0.1),
    "handed on by turns": lambda x, a, r: lax.fori_loop(
        0, jnp.int32(r[0] > 0) + 1, lambda _, c: (c[0] * 1.0, c[1] + a[:, 0]), (x * 0.1, x)
    )[0],
    "handed on by a scan": lambda x, a, r: lax.scan(
        lambda c, t: ((jnp.maximum(c[0], c[0]), c[1] + t), None), (x * 0.1, x), a.T
    )[0][0],
    "one turn at most": lambda x, a, r: lax.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] * 0.1), (0, x)
    )[1],
    "logarithm of its exponential": lambda x, a, r: jnp.log(jnp.exp(x * 0.1)),
    "logarithm of a power": lambda x, a, r: jnp.log(jnp.abs(x) ** 3.3),
    "logarithm of a power of two": lambda x, a, r: jnp.log(lax.exp2(x)),
    "first power": lambda x, a, r: lax.pow(x * 0.1, jnp.ones_like(x)),
    "first power of a half": lambda x, a, r: lax.pow(jnp.cos(x) * 0.5, jnp.ones_like(x)),
    "all bits": lambda x, a, r: ((x * 0.1).view(jnp.int32) & -1).view(jnp.float32),
    "exchanged with nobody": lambda x, a, r: on_one_device(
        lambda t: lax.all_to_all(t * 0.1, "d", 0, 0, tiled=True)
    )(x),
    "summed with nobody, mapped": lambda x, a, r: jax.vmap(
        lambda t: lax.psum(t * 0.1, "d"), axis_name="d", out_axes=None
    )(x[None]),
    "by a batching of its own": lambda x, a, r: batched_by_hand(x),
    "by a partitioning of its own": lambda x, a, r: partitioned_by_hand(x),
    "in a kernel": lambda x, a, r: in_a_kernel(x),
    "both scaled, and sorted alone": lambda x, a, r: (
        jnp.sort((x * 0.1)[None], 0)[0] + jnp.sort((a[:, 0] * 0.1)[None], 0)[0]
    ),
    "both scaled in kernels": lambda x, a, r: in_a_kernel(x) + in_a_kernel(a[:, 0]),
    "sums of what is spread": lambda x, a, r: sum(
        jnp.sum(jnp.broadcast_to(v, (3, SIZE)), 0) for v in (x, a[:, 0])
    ),
}
if hasattr(jax, "new_ref"):
    ERASED["in place"] = lambda x, a, r: in_place(x)
if hasattr(jax, "freeze"):
    ERASED["in place, frozen"] = lambda x, a, r: in_place(x, freeze=True)
VALUES |= ERASED
# Of two such values and what the host has.
FOLLOWERS: dict[str, Callable[..., Any]] = {
    "times a constant": lambda v, w, z: v * 0.3,
    "times two constants": lambda v, w, z: v * 0.3 * 0.7,
    "times itself": lambda v, w, z: v * v,
    "square": lambda v, w, z: jnp.square(v),
    "cube": lambda v, w, z: v**3,
    "negated, times itself": lambda v, w, z: (-v) * (-v),
    "times the other": lambda v, w, z: v * w,
    "times what is there": lambda v, w, z: v * z,
    "twice times what is there": lambda v, w, z: (z * v) * v,
    "plus a constant": lambda v, w, z: v + 0.3,
    "plus two constants": lambda v, w, z: (v + 0.3) + 0.9,
    "from a constant": lambda v, w, z: 0.3 - v,
    "negated, plus a constant": lambda v, w, z: -v + 0.3,
    "plus the other": lambda v, w, z: v + w,
    "less the other": lambda v, w, z: v - w,
    "averaged": lambda v, w, z: 0.9 * z + 0.1 * v,
    "nearer": lambda v, w, z: z + 0.1 * (v - z),
    "both averaged": lambda v, w, z: v * 0.3 + w * 0.3,
    "both scaled": lambda v, w, z: (v * 0.3) * (w * 0.7),
    "halved": lambda v, w, z: v / 2.0,
    "the larger": lambda v, w, z: jnp.maximum(v, w),
    "chosen": lambda v, w, z: jnp.where(v > 0.3, v, z),
    "rounded": lambda v, w, z: jnp.floor(v * 3.0),
    "counted": lambda v, w, z: v.astype(jnp.int32).astype(jnp.float32),
}


def far_from(x: Any) -> Any:
    """Many operations away."""
    for n in range(6):
        x = jnp.cos(x) + n
    return x


def by_each(f: Callable[[Any], Any], v: Any, w: Any, z: Any) -> Any:
    """A product by one of some numbers: each may be the same, rounded otherwise."""
    del w
    return jnp.where(z > 3, z * f(v[0]), jnp.where(z > 0, z * f(v[1]), z * f(v[2])))


# Of constants the compiler makes one, and merges it with the next. And what it sees to be one.
FOLDED: dict[str, Callable[..., Any]] = {
    "times a root of a constant": lambda v, w, z: ((v + z) * jnp.sqrt(0.3)) * 0.7,
    "times a quotient of constants": lambda v, w, z: ((v + z) * (1.0 / jnp.abs(0.3))) * 0.7,
    "times a constant quotient": lambda v, w, z: ((v + z) * lax.div(1.0, 3.0)) * 0.7,
    "times a root over a constant": lambda v, w, z: ((v + z) * (jnp.sqrt(0.3) / 0.7)) * 0.7,
    "times an exponential of a constant": lambda v, w, z: ((v + z) * jnp.exp(-0.3)) * 0.7,
    "times a mean of constants": lambda v, w, z: (v + z) * jnp.mean(jnp.full(3, 0.3)) * 0.7,
    "over a root of a constant": lambda v, w, z: ((v + z) / jnp.sqrt(0.3)) * 0.7,
    "averaged by constants": lambda v, w, z: 0.9 * z + 0.1 * ((v + z) / (1.0 + jnp.abs(0.1))),
    "plus a root of a constant": lambda v, w, z: ((v + z) + jnp.sqrt(0.3)) + 0.9,
    "plus a product of constants": lambda v, w, z: ((v + z) + 0.1 * jnp.abs(0.1)) + 0.9,
    "plus an exponential of a constant": lambda v, w, z: ((v + z) + jnp.exp(-0.3)) + 0.9,
    "plus a constant, times one": lambda v, w, z: ((v + z + 0.1) * 1.0) + 0.9,
    "plus a product with nothing added": lambda v, w, z: v + ((z * 0.3) + 0.0) * 0.7,
    "plus the larger of one product": lambda v, w, z: v + jnp.maximum(z * 0.3, z * 0.3) * 0.7,
    "plus a product and a half": lambda v, w, z: v + (0.9 * z + 0.1 * (z / 2.0)),
    "plus products with nothing added": lambda v, w, z: v + (0.9 * z + 0.1 * (z + 0.0)),
    "plus products by what was squared otherwise": lambda v, w, z: (
        v * (w[0] ** 2 + 1) + z * (w[0] * w[0] + 1)
    ),
    "plus products by a difference and a sum": lambda v, w, z: v * (w[0] - 0.3) + z * (-0.3 + w[0]),
    "plus products by what is far": lambda v, w, z: v * far_from(w[0]) + z * far_from(w[0]),
    "larger of a product and it reordered": lambda v, w, z: (
        jnp.maximum((v + w) * 0.3, (w + v) * 0.3) * 0.7
    ),
    "bounded twice": lambda v, w, z: 0.9 * jax.nn.relu(jax.nn.relu(v)) + 0.1 * jax.nn.relu(v) + z,
    "plus products out of branches": lambda v, w, z: (
        lax.cond(w[0] > 0, lambda: v * 0.3, lambda: z * 0.3) + w * 0.3
    ),
    "times a constant behind branches": lambda v, w, z: (
        lax.cond(w[0] > 0, lambda: v * 0.3, lambda: w * 0.3) * 0.7
    ),
    "times a constant and products with another": lambda v, w, z: by_each(
        lambda x: 0.3 * jnp.prod(jnp.stack([x, jnp.float32(0.1)])), v, w, z
    ),
    "times a constant more than sums with another": lambda v, w, z: by_each(
        lambda x: 0.3 + jnp.sum(jnp.append(jnp.sin(v[3:9] * x), 0.1)), v, w, z
    ),
    "chosen by what was narrowed": lambda v, w, z: jnp.where(
        jnp.floor((1.0 + z * 1e-3).astype(jnp.bfloat16)) < 1, v, z
    ),
    "times a constant and a scalar": lambda v, w, z: (v * 0.3) * w[0] + z,
    "times a scalar and a constant": lambda v, w, z: (v * w[0]) * 0.3 + z,
    "plus products by a sum of sums": lambda v, w, z: (
        v * jnp.sum(jnp.sum(w.reshape(20, -1), 0)) + z * jnp.sum(w)
    ),
}
FOLLOWERS |= FOLDED
PAIRS = list(itertools.product(VALUES, FOLLOWERS))
SAMPLE = PAIRS if os.environ.get("GOCKPT_MERGES") else random.Random(0).sample(PAIRS, 16)
SAMPLE = list(
    dict.fromkeys(
        [
            *SAMPLE,
            *((value, "times a constant") for value in ERASED),
            *(("dot", follows) for follows in FOLDED),
        ]
    )
)


def step_of_pair(value: str, follows: str, in_a_branch: bool = False) -> Callable[..., Any]:
    """A kind of value, twice, and what is done with it before it reaches the state.

    In a branch it is all done where a condition holds, which here it does.
    """

    def step(state: Any, x: Any, a: Any, y: Any, b: Any, r: Any) -> Any:
        def update() -> Any:
            v, w = VALUES[value](x, a, r), VALUES[value](y, b, r)
            return {"m": FOLLOWERS[follows](v, w, state["m"]), "n": 0.9 * state["n"] + v - w}

        return lax.cond(r[0] < 100, update, lambda: state) if in_a_branch else update()

    return step


def arguments_of_pair() -> tuple[Any, ...]:
    """Of any such step: its state, and what it is given; zeros, NaN and the like among both."""
    rng = np.random.default_rng(0)

    def numbers(part: float, *shape: int) -> jax.Array:
        drawn = rng.standard_normal(shape).astype(np.float32)
        return jnp.asarray(with_special(rng, drawn if len(shape) > 1 else 3 * drawn, part))

    x, y, m, n = (numbers(0.1, SIZE) for _ in range(4))
    a, b = (numbers(0.01, SIZE, WIDTH) for _ in range(2))
    r = jnp.asarray(rng.standard_normal(WIDTH), jnp.float32)
    m = m.at[:20].set(-x[:20]).at[20:40].set(x[20:40])
    return {"m": m, "n": n}, x, a, y, b, r


@pytest.mark.parametrize(("value", "follows", "in_a_branch"), [
    *((*pair, False) for pair in SAMPLE),
    *((*pair, True) for pair in (SAMPLE if os.environ.get("GOCKPT_MERGES") else SAMPLE[:16])),
])  # fmt: skip
def test_what_is_retained_is_what_the_step_goes_on_with(
    value: str, follows: str, in_a_branch: bool
) -> None:
    step = step_of_pair(value, follows, in_a_branch)
    found = analyse(step, *arguments_of_pair(), even_for_nothing=True)
    new, cut = found.run()
    for fence in (None, np.int32(0)):  # for a CPU's run, and for an accelerator's
        for j, leaf in found.replayed(cut, fence):
            np.testing.assert_array_equal(bits(leaf), bits(new[j]))
