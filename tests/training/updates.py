"""Small updates as optimizers do them, and what must be found in each.

`expected` groups and retained values are derived by hand from the rules in `cut.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from training_helpers import N, vector

State = dict[str, Any]
_MASK = np.arange(N, dtype=np.float32) / N


@dataclasses.dataclass(frozen=True)
class Update:
    """An update and its cut.

    Attributes:
      step: The update.
      state: Its first state.
      groups: Paths of the leaves that leave early, by group.
      retained: The large values that must be retained, by their formula; in any order.
      scalars: How many scalars are captured.
      late: For some late leaves, what the reason must say.
    """

    step: Callable[..., Any]
    state: State
    groups: list[list[str]]
    retained: Callable[[State, jax.Array], list[Any]] = lambda state, g: [g]
    scalars: int = 0
    late: dict[str, str] = dataclasses.field(default_factory=dict)


def state(*names: str) -> State:
    """Leaves of `N` elements; second moments and the like must not be negative."""
    return {name: jnp.abs(vector(i + 1)) for i, name in enumerate(names)}


def gradient(seed: int = 0) -> jax.Array:
    return vector(100 + seed)


def clipped(g: jax.Array) -> jax.Array:
    norm = jnp.sqrt(jnp.sum(g * g))
    return jnp.where(norm < 1.0, g, g / norm)


def worked_example(s: State, g: jax.Array) -> State:
    """The one in the docstring of `cut.py`."""
    c = clipped(g)
    m = 0.9 * s["m"] + 0.1 * c
    v = 0.999 * s["v"] + 0.001 * c * c
    return {"m": m, "v": v, "w": s["w"] - 0.01 * (m / (jnp.sqrt(v) + 1e-8))}


def adam(s: State, g: jax.Array) -> State:
    m = 0.9 * s["m"] + 0.1 * g
    v = 0.999 * s["v"] + 0.001 * (g * g)
    return {"m": m, "v": v, "w": s["w"] - 0.01 * (m / (jnp.sqrt(v) + 1e-8))}


def l2(s: State, g: jax.Array) -> State:
    """Coupled weight decay: the parameter, which is late, is added before the moments."""
    return adam(s, g + 0.1 * s["w"])


def momentum(s: State, g: jax.Array) -> State:
    m = 0.9 * s["m"] + g
    return {"m": m, "w": s["w"] - 0.01 * m}


def sgd_with_ema(s: State, g: jax.Array) -> State:
    w = s["w"] - 0.01 * g
    return {"ema": 0.99 * s["ema"] + 0.01 * w, "w": w}


def adam_with_ema(s: State, g: jax.Array) -> State:
    new = adam(s, g)
    return new | {"ema": 0.99 * s["ema"] + 0.01 * new["w"]}


def skip_step(s: State, g: jax.Array) -> State:
    """The whole update under `cond`; the predicate is one captured scalar."""
    return lax.cond(jnp.isfinite(jnp.sum(g)), lambda: momentum(s, g), lambda: s)


def clipped_inside_cond(s: State, g: jax.Array) -> State:
    """The division is inside a branch."""
    return lax.cond(g[0] > 0, lambda: momentum(s, g / jnp.sum(g)), lambda: s)


def in_a_scan(s: State, g: jax.Array) -> State:
    return lax.scan(lambda carry, x: (momentum(carry, x), None), s, jnp.stack([g, g]))[0]


def averaged(divisor: float) -> Callable[[State, jax.Array], State]:
    """A mean over micro-batches before the moments."""
    return lambda s, g: adam(s, g / divisor)


def tied(s: State, g: jax.Array) -> State:
    """One gradient is the sum of two, as for an embedding that is also the output layer."""
    return momentum(s, jnp.cos(g) + jnp.sin(g))


def masked(s: State, g: jax.Array) -> State:
    """By an array that the step closes over: of it a chunk would need its own part."""
    return momentum(s, g * _MASK)


def loss_scaled(s: State, g: jax.Array) -> State:
    """A learning rate from the count: a scalar that the host is sent."""
    rate = 0.1 / (1.0 + jnp.sqrt(s["count"]))
    m = 0.9 * s["m"] + g
    return {"count": s["count"] + 1.0, "m": m, "w": s["w"] - rate * m}


def counted(s: State, g: jax.Array) -> State:
    """Whole numbers, of which a product is never contracted with a sum."""
    codes = (g * 8.0).astype(jnp.int32)
    return {"m": 3 * s["m"] + codes, "n": s["n"] - codes}


def growing(s: State, g: jax.Array) -> State:
    return {"m": 0.9 * s["m"] + g, "queue": jnp.concatenate([s["queue"], g]), "u": s["u"] + g}


def frozen(s: State, g: jax.Array) -> State:
    return momentum({"m": s["m"], "w": s["w"]}, g) | {"frozen": s["frozen"]}


def reads_a_late_leaf(s: State, g: jax.Array) -> State:
    """`a` and `b` read `p`, which fails: then they need its old value sent, as any source."""
    return {"a": s["a"] + s["p"], "b": s["b"] - s["p"], "p": jnp.sqrt(s["p"] + g * g)}


def disguised_products(s: State, g: jax.Array) -> State:
    """Products that reach an addition negated, chosen, named, or divided."""
    return {
        "a": g + -(0.9 * s["a"]),
        "b": g + jnp.where(g > 0.0, 0.9 * s["b"], 0.8 * s["b"]),
        "c": g + checkpoint_name(0.9 * s["c"], "decayed"),
        "d": g + (0.9 * s["d"]) / 8.0,
    }


def through_jit(s: State, g: jax.Array) -> State:
    """`jnp` functions are calls of their own, and an update may be one as well."""
    return jax.jit(adam)(s, jnp.clip(g, -1.0, 1.0))


def from_optax(tx: optax.GradientTransformation) -> tuple[Callable[..., Any], State]:
    params = state("w")
    names = ["m", "v"]

    def step(s: State, g: jax.Array) -> State:
        inner = (optax.ScaleByAdamState(s["count"], {"w": s["m"]}, {"w": s["v"]}), *s["rest"])
        updates, new = tx.update({"w": g}, inner, {"w": s["w"]})
        w = optax.apply_updates({"w": s["w"]}, updates)["w"]
        return {"count": new[0].count, "m": new[0].mu["w"], "rest": new[1:], "v": new[0].nu["w"],
                "w": w}  # fmt: skip

    opt = tx.init(params)
    first = {"count": opt[0].count, "rest": opt[1:], **params}
    return step, first | dict.fromkeys(names, jnp.zeros(N))


def _quotient_and_gradient(s: State, g: jax.Array) -> list[jax.Array]:
    """What the device alone can divide is sent as it is; parameter and average then share it."""
    new = adam(s, g)
    return [new["m"] / (jnp.sqrt(new["v"]) + 1e-8), g]


_MOMENTS = [["m", "v"]]
_ADAMW, _ADAMW_STATE = from_optax(optax.adamw(1e-2))

UPDATES = {
    "worked example": Update(
        worked_example, state("m", "v", "w"), _MOMENTS, lambda s, g: [clipped(g)],
        late={"w": "saves too little"},
    ),
    "adam": Update(adam, state("m", "v", "w"), _MOMENTS),
    "optax.adamw": Update(_ADAMW, _ADAMW_STATE, _MOMENTS, late={"count": "small"}),
    # The moments read the parameter. It would retain an array for itself alone, so it is late, and
    # what the moments read of it is in the one array that follows them.
    "l2": Update(
        l2, state("m", "v", "w"), _MOMENTS, lambda s, g: [g + 0.1 * s["w"]],
        late={"w": "saves too little"},
    ),
    "momentum": Update(momentum, state("m", "w"), [["m", "w"]]),
    "sgd with ema": Update(sgd_with_ema, state("ema", "w"), [["ema", "w"]]),
    "adam with ema": Update(
        adam_with_ema, state("ema", "m", "v", "w"), [["ema", "w"], *_MOMENTS],
        _quotient_and_gradient,
    ),
    "skip step": Update(skip_step, state("m", "w"), [["m", "w"]], scalars=1),
    "clip inside cond": Update(
        clipped_inside_cond, state("m", "w"), [["m", "w"]],
        lambda s, g: [jnp.where(g[0] > 0, g / jnp.sum(g), 0.0)], scalars=1,
    ),
    "scan": Update(in_a_scan, state("m", "w"), [], lambda s, g: [], late={"m": "`scan`"}),
    "mean over 8": Update(averaged(8.0), state("m", "v", "w"), _MOMENTS),
    "mean over 10": Update(
        averaged(10.0), state("m", "v", "w"), [], lambda s, g: [], late={"m": "product"}
    ),
    "tied": Update(
        tied, state("m", "w"), [["m", "w"]], lambda s, g: [jnp.cos(g) + jnp.sin(g)]
    ),
    "masked": Update(
        masked, state("m", "w"), [["m", "w"]], lambda s, g: [masked(s, g)["m"]]
    ),
    "learning rate": Update(
        loss_scaled, state("m", "w") | {"count": jnp.float32(3)}, [["m", "w"]], scalars=1,
        late={"count": "small"},
    ),
    "counted": Update(
        counted, {k: jnp.arange(N) for k in "mn"}, [["m", "n"]],
        lambda s, g: [(g * 8.0).astype(jnp.int32)],
    ),
    "growing": Update(
        growing, state("m", "queue", "u"), [["m", "u"]], late={"queue": "float32.24. to .*48"}
    ),
    "frozen": Update(frozen, state("frozen", "m", "w"), [["frozen"], ["m", "w"]]),
    "reads a late leaf": Update(
        reads_a_late_leaf, state("a", "b", "p"), [["a", "b"]], lambda s, g: [s["p"]],
        late={"p": "`sqrt` on float32"},
    ),
    "disguised products": Update(disguised_products, state(*"abcd"), [[*"abcd"]]),
    "through jit": Update(through_jit, state("m", "v", "w"), _MOMENTS),
}  # fmt: skip
