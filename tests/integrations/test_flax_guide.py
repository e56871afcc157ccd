"""The loop of Flax's first guide: a second jitted function adds to the metrics in the state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import train_state

from integrations.loops import WINDOW, run_both

STEPS = 17


class TrainState(train_state.TrainState):
    metrics: jax.Array


def apply(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def loss_of(params, batch):
    return jnp.mean((apply(params, batch["x"]) - batch["y"]) ** 2)


@jax.jit
def train_step(state, batch):
    return state.apply_gradients(grads=jax.grad(loss_of)(state.params, batch))


@jax.jit
def compute_metrics(*, state, batch):  # as in the guide
    return state.replace(metrics=state.metrics + loss_of(state.params, batch))


@jax.jit
def compute_metrics_alone(*, state, batch):
    return state.metrics + loss_of(state.params, batch)


def batch_at(step):
    rng = np.random.default_rng(step)
    return {name: jnp.asarray(rng.standard_normal((6, n)), jnp.float32) for name, n in SIZES}


SIZES = (("x", 8), ("y", 4))


def loop(*, returns_all):
    def train(directory, gockpt):
        params = {"in": jnp.full((8, 32), 0.1), "out": jnp.full((32, 4), 0.1)}
        state = TrainState.create(
            apply_fn=apply, params=params, tx=optax.sgd(1e-2, 0.9), metrics=jnp.zeros(())
        )
        options = ocp.CheckpointManagerOptions(save_interval_steps=5)
        with gockpt.GoCkptManager(directory, options=options, window=WINDOW) as manager:
            step = manager.wrap(train_step)
            for label in range(STEPS):
                state = step(state, batch := batch_at(label))
                if returns_all:
                    state = compute_metrics(state=state, batch=batch)
                else:
                    metrics = compute_metrics_alone(state=state, batch=batch)
                    state = state.replace(metrics=metrics)
                if label % 6 == 0:
                    state = state.replace(metrics=jnp.zeros(()))
                manager.save(label, args=ocp.args.StandardSave(state))
        return state

    return train


@pytest.mark.parametrize("returns_all", [True, False])
def test_flax_guide(tmp_path, returns_all):
    run = run_both(loop(returns_all=returns_all), tmp_path)
    assert run.snapshots == ([0, 5, 10, 15] if returns_all else [0])
    assert run.windows == ([] if returns_all else [5, 10, 15])
    if returns_all:
        assert "and so is another step's state" in run.manager.last_report.reason
