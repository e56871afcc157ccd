"""Fine-tuning: the parameters of another run's stock checkpoint, under another optimizer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec

import gockpt_jax
from integrations.loops import WINDOW, run_both

MESH = jax.sharding.Mesh(jax.devices(), "fsdp")


def apply(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


@jax.jit
def train_step(state, x):
    grads = jax.grad(lambda p: jnp.mean(jnp.square(apply(p, x) - 1)))(state.params)
    return state.apply_gradients(grads=grads)


def fresh(tx, fill):
    """A state whose matrices lie in parts on all devices."""
    params = {"in": jnp.full((8, 32), fill), "out": jnp.full((32, 8), fill)}
    state = train_state.TrainState.create(apply_fn=apply, params=params, tx=tx)
    specs = {True: PartitionSpec("fsdp"), False: PartitionSpec()}
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(MESH, specs[jnp.ndim(x) > 0])), state
    )


def batch_at(step):
    return jnp.asarray(np.random.default_rng(step).standard_normal((8, 8)), jnp.float32)


def pretrain(directory):
    """A stock checkpoint of a whole state; returns its parameters."""
    state = fresh(optax.adam(1e-2), 0.1)
    with ocp.CheckpointManager(directory) as manager:
        for label in range(3):
            state = train_step(state, batch_at(label))
        manager.save(2, args=ocp.args.StandardSave(state))
    return jax.tree.map(np.asarray, state.params)


def pretrained_params(directory, state):
    """As in docs/integrations.md."""
    options = ocp.CheckpointManagerOptions(read_only=True)
    target = {"params": state.params}
    with gockpt_jax.GoCkptManager(directory, options=options) as pretrained:
        found = pretrained.restore(
            None, args=gockpt_jax.GoCkptRestore(target, partial_restore=True)
        )
    return found["params"]


def train(directory, gockpt, *, pretrained):
    state = fresh(optax.lion(1e-3), 0.0)
    state = state.replace(params=pretrained_params(pretrained, state))
    options = ocp.CheckpointManagerOptions(save_interval_steps=5)
    with gockpt.GoCkptManager(directory, options=options, window=WINDOW) as manager:
        step = manager.wrap(train_step)
        for label in range(16):
            state = step(state, batch_at(label))
            manager.save(label, args=gockpt.GoCkptSave(state))
    return state


def test_fine_tuning(tmp_path):
    """Parameters are those of the checkpoint, and lie as the target says; it is not touched."""
    source = tmp_path / "pretrained"
    want = pretrain(source)
    files = sorted(source.rglob("*"))
    state = fresh(optax.lion(1e-3), 0.0)
    found = pretrained_params(source, state)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert [x.sharding for x in jax.tree.leaves(found)] == [
        x.sharding for x in jax.tree.leaves(state.params)
    ]
    run = run_both(functools.partial(train, pretrained=source), tmp_path)
    assert (run.snapshots, run.windows) == ([0], [5, 10, 15])
    assert sorted(source.rglob("*")) == files
