"""A small training loop under a manager: what the manager's tests share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from gockpt_jax import GoCkptSave

SIZE = 64
BATCH = jnp.linspace(-1.0, 1.0, SIZE)
STATE_BYTES = 3 * SIZE * 4 + 4
TX = optax.adam(1e-2)
Options = ocp.CheckpointManagerOptions


def fresh():
    params = {"w": jnp.ones(SIZE)}
    return {"opt": TX.init(params), "params": params}


@jax.jit
def update(state, batch):
    grads = jax.grad(lambda p: jnp.sum(jnp.cosh(p["w"] + batch)))(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"opt": opt, "params": optax.apply_updates(state["params"], updates)}


def to_host(tree):
    return jax.tree.map(np.array, tree)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(a), jax.tree.leaves(b))


def train(manager, labels, *, save_args=None):
    """A loop that calls `save` at every label; returns the states that were saved, on the host."""
    step, state, saved = manager.wrap(update), fresh(), {}
    for label in labels:
        state = step(state, BATCH)
        if manager.save(
            label, **(save_args or (lambda s, _: {"args": GoCkptSave(s)}))(state, label)
        ):
            saved[label] = to_host(state)
    manager.wait_until_finished()
    return saved
