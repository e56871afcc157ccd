"""t5x's loop: its partitioner compiles the step ahead of time, and every save is forced.

A `Compiled` has no program to trace: its saves are snapshots, and one warning says what to do.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gockpt_jax
from integrations.loops import WINDOW, run_both

PERIOD, TOTAL_STEPS = 5, 20
TX = optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9)


@flax.struct.dataclass
class TrainState:
    step: jax.Array
    params: Any
    param_states: Any


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))


def train_step(train_state, batch):
    def loss_fn(params):
        return jnp.mean((Model().apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(train_state.params)
    updates, param_states = TX.update(grads, train_state.param_states, train_state.params)
    params = optax.apply_updates(train_state.params, updates)
    return TrainState(train_state.step + 1, params, param_states), {"loss": loss}


@functools.cache
def partition(mesh):
    everywhere = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def init():
        params = Model().init(jax.random.key(0), jnp.zeros((1, 8)))["params"]
        return TrainState(jnp.zeros((), jnp.int32), params, TX.init(params))

    step = jax.jit(
        train_step,
        in_shardings=(everywhere, rows),
        out_shardings=(everywhere, None),
        donate_argnums=0,
    )
    return jax.jit(init, out_shardings=everywhere), step, rows


def train(directory, gockpt, *, ahead_of_time):
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    init, partitioned_step, rows = partition(mesh)
    train_state = init()
    with gockpt.GoCkptManager(directory, window=WINDOW) as manager:  # was: ocp.CheckpointManager(
        for host_step in range(1, TOTAL_STEPS + 1):
            rng = np.random.default_rng(host_step)
            batch = {"x": rng.standard_normal((8, 8)), "y": rng.standard_normal((8, 4))}
            batch = jax.device_put(jax.tree.map(np.float32, batch), rows)
            if host_step == 1:
                step_fn = partitioned_step
                if ahead_of_time:
                    step_fn = partitioned_step.lower(train_state, batch).compile()
                step_fn = manager.wrap(step_fn)  # new; of what `jax.jit` returned, for windows
            train_state, metrics = step_fn(train_state, batch)
            if host_step % PERIOD == 0:
                args = ocp.args.StandardSave(train_state)
                manager.save(host_step, args=args, force=True)
    return train_state, metrics


def test_a_compiled_step_saves_by_snapshot(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gockpt_jax.SnapshotOnlyWarning)
        run = run_both(train, tmp_path, ahead_of_time=True)
    assert (run.snapshots, run.windows) == ([5, 10, 15, 20], [])
    told = [w for w in caught if issubclass(w.category, gockpt_jax.SnapshotOnlyWarning)]
    assert len(told) == 1
    assert "before `.lower().compile()`" in str(told[0].message)
    assert all("before `.lower().compile()`" in r.reason for r in run.manager.reports)


def test_with_the_jitted_step_forced_saves_are_foreseen_by_their_period(tmp_path):
    run = run_both(train, tmp_path, ahead_of_time=False)
    assert (run.snapshots, run.windows) == ([5, 10], [15, 20])
    assert run.least_early > 0.5
