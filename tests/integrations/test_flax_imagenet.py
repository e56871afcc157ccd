"""Flax's imagenet example: batch statistics, a dynamic loss scale, a save every ten epochs.

It is one of `jax.pmap`; here of `jax.shard_map`. The loop itself decides when to save.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gockpt_jax
from integrations.loops import WINDOW, assert_same, bits, run_both

STEPS_PER_CHECKPOINT, STEPS, DEVICES = 5, 23, 4


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

    grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True, axis_name="batch")
    dynamic_scale, is_fin, (loss, (new_model_state, _)), grads = grad_fn(state.params)
    new_state = state.apply_gradients(
        grads=grads, batch_stats=lax.pmean(new_model_state["batch_stats"], "batch")
    )
    select = functools.partial(jnp.where, is_fin)
    new_state = new_state.replace(
        opt_state=jax.tree.map(select, new_state.opt_state, state.opt_state),
        params=jax.tree.map(select, new_state.params, state.params),
        dynamic_scale=dynamic_scale,
    )
    metrics = {"loss": lax.pmean(loss, "batch"), "scale": dynamic_scale.scale, "is_fin": is_fin}
    return new_state, metrics


def shard_step(state, batch):  # new
    state, metrics = train_step(state, jax.tree.map(lambda x: x[0], batch))
    return state, jax.tree.map(lambda x: x[None], metrics)


@functools.cache
def setup(kind):
    model, tx = Net(), optax.sgd(0.1, momentum=0.9, nesterov=True)
    mesh = Mesh(jax.devices()[:DEVICES], "batch")
    if kind == "pmap":
        step = jax.pmap(
            train_step, axis_name="batch", in_axes=(None, 0), out_axes=(None, 0),
            devices=jax.devices()[:DEVICES],
        )  # fmt: skip
    else:  # new
        batch = P("batch")
        sharded = jax.shard_map(
            shard_step, mesh=mesh, in_specs=(P(), batch), out_specs=(P(), batch), check_vma=False
        )
        step = jax.jit(sharded)
    return model, tx, step, NamedSharding(mesh, P())


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


def train(directory, gockpt, *, announced=False, kind="shard_map"):
    model, tx, p_train_step, replicated = setup(kind)
    state, rows = create_train_state(model, tx), []
    if kind != "pmap":
        state = jax.device_put(state, replicated)  # new
    with gockpt.GoCkptManager(directory, window=WINDOW) as manager:  # was: flax's `checkpoints`
        p_train_step = manager.wrap(p_train_step)  # new
        for step in range(STEPS):
            if announced and step % STEPS_PER_CHECKPOINT == 0:
                manager.expect_save(in_steps=STEPS_PER_CHECKPOINT)  # new, and optional
            rng = np.random.default_rng(step)
            image = rng.standard_normal((DEVICES, 4, 8), np.float32)
            batch = {"image": image, "label": rng.integers(4, size=(DEVICES, 4))}
            state, metrics = p_train_step(state, batch)
            rows.append(jax.tree.map(lambda x: x[0], metrics))
            if (step + 1) % STEPS_PER_CHECKPOINT == 0 or step + 1 == STEPS:
                # was: save_checkpoint(state, workdir)
                manager.save(step + 1, args=ocp.args.StandardSave(state))
    return state, rows


def test_imagenet(tmp_path):
    """Two saves give the period; `expect_save` gives every one but the irregular last."""
    silent = run_both(train, tmp_path / "silent")
    assert (silent.snapshots, silent.windows) == ([5, 10, 23], [15, 20])
    announced = run_both(train, tmp_path / "announced", announced=True)
    assert (announced.snapshots, announced.windows) == ([23], [5, 10, 15, 20])
    assert min(silent.least_early, announced.least_early) > 0.5
    _, rows = silent.final
    skipped = [not row["is_fin"] for row in rows]
    assert 0 < sum(skipped) < len(skipped)
    assert len({float(row["scale"]) for row in rows}) > 2


def test_what_was_a_pmap_trains_as_before(tmp_path):
    """Without `check_vma=False` it would not: gradients would come summed over the devices."""
    with pytest.warns(gockpt_jax.SnapshotOnlyWarning, match="a `jax.pmap` has.*check_vma=False"):
        before = train(tmp_path / "pmap", gockpt_jax, kind="pmap")
    after = train(tmp_path / "shard_map", gockpt_jax)
    assert_same(bits(after), bits(before))
