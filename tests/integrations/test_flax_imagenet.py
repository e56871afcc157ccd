"""Flax's imagenet example: batch statistics, a dynamic loss scale, one save per epoch.

The label is the epoch; the loop itself decides when to save.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state

from integrations.loops import WINDOW, run_both

STEPS_PER_EPOCH, EPOCHS = 5, 5


class TrainState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: dynamic_scale_lib.DynamicScale


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, dtype=jnp.float16)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=jnp.float16)(x))
        return nn.Dense(4, dtype=jnp.float16)(x).astype(jnp.float32)


def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new_model_state = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (new_model_state, logits)

    grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
    dynamic_scale, is_fin, (loss, (new_model_state, _)), grads = grad_fn(state.params)
    new_state = state.apply_gradients(grads=grads, batch_stats=new_model_state["batch_stats"])
    select = functools.partial(jnp.where, is_fin)
    new_state = new_state.replace(
        opt_state=jax.tree.map(select, new_state.opt_state, state.opt_state),
        params=jax.tree.map(select, new_state.params, state.params),
        dynamic_scale=dynamic_scale,
    )
    return new_state, {"loss": loss, "scale": dynamic_scale.scale, "is_fin": is_fin}


@functools.cache
def setup():
    return Net(), optax.sgd(0.1, momentum=0.9), jax.jit(train_step, donate_argnums=0)


def create_train_state(model, tx):
    variables = model.init(jax.random.key(0), jnp.ones((2, 8)))
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
        # So large that the first steps overflow, and are skipped.
        dynamic_scale=dynamic_scale_lib.DynamicScale(growth_interval=4, scale=2.0**20),
    )


def train(directory, gockpt, *, announced):
    model, tx, p_train_step = setup()
    state, rows = create_train_state(model, tx), []
    with gockpt.GoCkptManager(directory, window=WINDOW) as manager:  # was: ocp.CheckpointManager(
        p_train_step = manager.wrap(p_train_step)  # new
        for epoch in range(EPOCHS):
            if announced:
                manager.expect_save(in_steps=STEPS_PER_EPOCH)  # new, and optional
            for n in range(STEPS_PER_EPOCH):
                rng = np.random.default_rng((epoch, n))
                image, label = rng.standard_normal((16, 8), np.float32), rng.integers(4, size=16)
                state, metrics = p_train_step(state, {"image": image, "label": label})
                rows.append(metrics)
            manager.save(epoch, args=ocp.args.StandardSave(state))
    return state, rows


def test_imagenet(tmp_path):
    """Two saves give the period; `expect_save` gives every one, the first included."""
    silent = run_both(train, tmp_path / "silent", announced=False)
    assert (silent.snapshots, silent.windows) == ([0, 1], [2, 3, 4])
    announced = run_both(train, tmp_path / "announced", announced=True)
    assert (announced.snapshots, announced.windows) == ([], [0, 1, 2, 3, 4])
    reports = (*silent.manager.reports, *announced.manager.reports)
    assert all(r.early_bytes > 0 for r in reports if r.kind == "window")
    _, rows = silent.final
    skipped = [not row["is_fin"] for row in rows]
    assert 0 < sum(skipped) < len(skipped)
    assert len({float(row["scale"]) for row in rows}) > 2
