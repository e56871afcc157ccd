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

GRADIENTS: tuple[Callable[[jax.Array], jax.Array], ...] = (
    lambda x: x @ x[0],
    lambda x: x.sum(1),
    lambda x: jnp.sort(x[:, 0]),
    lambda x: jnp.cumsum(x[:, 1]),
)


def random_updates(seed: int, count: int) -> tuple[Callable[..., Any], Any, Any]:
    """A step of so many updates, each of a parameter and a moment; its first state and a batch."""
    rng = np.random.default_rng(seed)
    arrays = lambda *shape: [  # noqa: E731
        rng.standard_normal(shape).astype(np.float32) for _ in range(count)
    ]
    state = {"params": arrays(SIZE), "moments": arrays(SIZE), "count": np.int32(3)}

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

    return step, state, arrays(SIZE, WIDTH)
