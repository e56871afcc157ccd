"""Many random updates in one step, and nothing around them: what one compilation can tell."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .random_program import expressions, new_value

SIZE, WIDTH = 37, 5  # elements of a leaf, and what each gradient is made of along another axis
# Zeros of both signs, what is beyond all numbers or none, neighbours, powers of two, halves. None
# so small or large that a product by a power of two is not exact (docs/guarantees.md).
_EPSILON = float(np.finfo(np.float32).eps)
SPECIAL = np.float32([
    0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 1.0 + _EPSILON, 1.0 - _EPSILON / 2, -1.0, 0.5, -2.0,
    8.0, 1.5, -2.5, 0.1, -0.3, 0.9, 9.0, 2.0**24, -(2.0**31), 1e-3,
])  # fmt: skip
# And these: denormals, the least and the largest numbers, what is lost beside others.
_TINY, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
EXTREME = np.concatenate([SPECIAL, np.float32([
    1e-45, -1e-45, _TINY / 2, -_TINY / 2, _TINY - 1e-45, _TINY, -_TINY, 1.5 * _TINY, 1e-30, -1e-20,
    1e20, -1e20, _LARGEST / 2, _LARGEST, -_LARGEST,
])])  # fmt: skip
_FEW, _MANY = 0.02, 0.25  # of the elements

GRADIENTS: tuple[Callable[[jax.Array], jax.Array], ...] = (
    lambda x: x @ x[0],
    lambda x: x.sum(1),
    lambda x: jnp.sort(x[:, 0]),
    lambda x: jnp.cumsum(x[:, 1]),
    lambda x: x[jnp.argsort(x[:, 0]), 1],
)


def with_special(
    rng: np.random.Generator, array: np.ndarray, part: float = _MANY, special: np.ndarray = SPECIAL
) -> np.ndarray:
    """An array of which about such a part is special."""
    return np.where(rng.random(array.shape) < part, rng.choice(special, array.shape), array)


def _cancelling(rng: np.random.Generator, array: np.ndarray, other: np.ndarray) -> np.ndarray:
    """An array that here and there is another one, or takes it away."""
    which = rng.random(array.shape)
    return np.where(which < 0.1, other, np.where(which > 0.9, -other, array))


def random_updates(
    seed: int, count: int, special: np.ndarray = SPECIAL
) -> tuple[Callable[..., Any], Any, Any]:
    """A step of so many updates, each of a parameter and a moment; its first state and a batch."""
    rng = np.random.default_rng(seed)
    arrays = lambda part, *shape: [  # noqa: E731
        with_special(rng, rng.standard_normal(shape).astype(np.float32), part, special)
        for _ in range(count)
    ]
    params, batch = arrays(_MANY, SIZE), arrays(_FEW, SIZE, WIDTH)
    moments = [_cancelling(rng, m, p) for m, p in zip(arrays(_MANY, SIZE), params, strict=True)]
    moments = [_cancelling(rng, m, x[:, 1]) for m, x in zip(moments, batch, strict=True)]
    state = {"params": params, "moments": moments, "count": np.int32(3)}

    def step(state: Any, batch: Any) -> Any:
        n = state["count"].astype(jnp.float32)
        scalars = [jnp.float32(0.1), 0.1 / (1.0 + n), 1.0 - 0.9 ** (n + 1.0)]
        new: dict[str, Any] = {"params": [], "moments": [], "count": state["count"] + 1}
        for i, x in enumerate(batch):
            own = Random(f"{seed} {i}")
            g, p, m = own.choice(GRADIENTS)(x), state["params"][i], state["moments"][i]
            drawn = expressions(own, [g, g, p, m], scalars)
            new["params"].append(new_value(own, drawn, p))
            new["moments"].append(new_value(own, drawn, m))
        return new, n

    return step, state, batch
