"""FSDP by hand: the whole step inside `jax.shard_map`, and metrics that are carried along.

As scaling tutorials do it: parameters are gathered in the forward pass, and their gradients come
back summed and scattered. Loops of `jax.pmap` become such a step, with every spec `P()`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from integrations.loops import WINDOW, run_both

STEPS, LOG_EVERY, OPTIONS = 17, 6, ocp.CheckpointManagerOptions(save_interval_steps=5)
AXIS, WIDTHS = "data", {"in": (8, 32), "out": (32, 4), "scale": (4,)}


class State(TrainState):
    rng: jax.Array


def create_state():
    params = {
        name: jax.random.normal(jax.random.key(n), shape) / 4
        for n, (name, shape) in enumerate(WIDTHS.items())
    }
    tx = optax.chain(optax.clip(0.5), optax.adamw(1e-2))
    return State.create(apply_fn=None, params=params, tx=tx, rng=jax.random.key_data(
        jax.random.key(7)
    ))  # fmt: skip


def specs_of(state, *, sharded):
    def spec(x):
        return P(AXIS) if sharded and x.ndim == 2 and x.shape[0] % 8 == 0 else P()

    return jax.tree.map(spec, state)


def train_step(state, metrics, batch, specs):
    rng, noise_rng = jax.random.split(jax.random.wrap_key_data(state.rng))
    noise_rng = jax.random.fold_in(noise_rng, jax.lax.axis_index(AXIS))

    def loss_fn(params):
        whole = jax.tree.map(
            lambda p, s: jax.lax.all_gather(p, AXIS, tiled=True) if s == P(AXIS) else p,
            params, specs.params,
        )  # fmt: skip
        x = batch["x"] + 0.1 * jax.random.normal(noise_rng, batch["x"].shape)
        out = jnp.tanh(x @ whole["in"]) @ whole["out"] * whole["scale"]
        return jnp.mean((out - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = jax.tree.map(  # those of gathered parameters have been summed on the way back
        lambda g, s: g / 8 if s == P(AXIS) else jax.lax.pmean(g, AXIS), grads, specs.params
    )
    state = state.apply_gradients(grads=grads, rng=jax.random.key_data(rng))
    now = {"loss": (jax.lax.psum(loss, AXIS), jax.lax.psum(1, AXIS))}
    return state, now if metrics is None else jax.tree.map(jnp.add, metrics, now)


@functools.cache
def setup(sharded):
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    specs = specs_of(jax.eval_shape(create_state), sharded=sharded)
    mapped = jax.shard_map(
        functools.partial(train_step, specs=specs), mesh=mesh,
        in_specs=(specs, P(), P(AXIS)), out_specs=(specs, P()), check_vma=False,
    )  # fmt: skip
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    create = jax.jit(create_state, out_shardings=shardings)
    return mesh, create, jax.jit(mapped, donate_argnums=(0, 1))


def batch_at(step, mesh):
    rng = np.random.default_rng(step)
    batch = {n: rng.standard_normal((16, w), np.float32) for n, w in (("x", 8), ("y", 4))}
    return jax.device_put(batch, NamedSharding(mesh, P(AXIS)))


def train(directory, gockpt, *, sharded):
    mesh, create, step_fn = setup(sharded)
    state, rows = create(), []
    _, metrics_shape = jax.eval_shape(step_fn, state, None, batch_at(0, mesh))
    zeros = functools.partial(jnp.zeros, device=NamedSharding(mesh, P()))  # as the step returns it
    with gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager:
        step_fn = manager.wrap(step_fn)  # new
        for step in range(STEPS):
            if step % LOG_EVERY == 0:
                metrics = jax.tree.map(lambda m: zeros(m.shape, m.dtype), metrics_shape)
            state, metrics = step_fn(state, metrics, batch_at(step, mesh))
            rows.append(metrics["loss"][0] + 0)
            manager.save(step, args=ocp.args.StandardSave(state))
    return state, rows


@pytest.mark.parametrize(
    "sharded",
    [
        pytest.param(True, id="fsdp"),
        pytest.param(False, id="replicated", marks=pytest.mark.thorough),
    ],
)
def test_a_step_inside_shard_map(sharded, tmp_path):
    run = run_both(train, tmp_path, sharded=sharded)
    assert (run.snapshots, run.windows) == ([0], [5, 10, 15])
