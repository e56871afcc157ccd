"""NNX: `nnx.jit` that updates in place, and `jax.jit` around `nnx.split` and `nnx.merge`.

The model has every kind of variable: parameters, batch statistics, random keys and their counts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from integrations.loops import WINDOW, assert_same, bits, run_both

STEPS, OPTIONS = 17, ocp.CheckpointManagerOptions(save_interval_steps=5)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def fresh(seed=0):
    model = Model(nnx.Rngs(seed, dropout=seed + 1))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def update(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def batch_at(step):
    rng = np.random.default_rng(step)
    return {
        n: jnp.asarray(rng.standard_normal((6, w)), jnp.float32) for n, w in (("x", 8), ("y", 4))
    }


@functools.cache
def in_place():
    return nnx.jit(update, donate_argnames=("model", "optimizer"))


def train(directory, gockpt, *, steps=STEPS):
    (model, optimizer), losses = fresh(), []
    with gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager:
        train_step = manager.wrap(in_place(), state=("model", "optimizer"))  # new
        for step in range(steps):
            losses.append(train_step(model, optimizer, batch_at(step)))
            manager.save(step, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
    return nnx.state((model, optimizer)), losses


@functools.cache
def functional():
    graphdef, _ = nnx.split(fresh())

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        loss = update(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    return train_step


def train_split(directory, gockpt, *, steps=STEPS):
    state, losses = nnx.state(fresh()), []
    with gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager:
        train_step = manager.wrap(functional())  # new
        for step in range(steps):
            state, loss = train_step(state, batch_at(step))
            losses.append(loss)
            manager.save(step, args=ocp.args.StandardSave(state))
    return state, losses


def assert_windows(run):
    assert (run.snapshots, run.windows) == ([0], [5, 10, 15])


def test_split_and_merge(tmp_path):
    assert_windows(run_both(train_split, tmp_path))


def test_in_place_and_resumed_by_stock_orbax(tmp_path):
    run = run_both(train, tmp_path)
    assert_windows(run)
    model, optimizer = fresh(seed=7)  # another state, to be overwritten
    state = nnx.state((model, optimizer))
    kinds = {type(v) for v in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))}
    assert kinds > {nnx.Param, nnx.BatchStat, nnx.RngKey, nnx.RngCount}
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with ocp.CheckpointManager(run.manager.directory) as stock:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        nnx.update((model, optimizer), stock.restore(10, args=args).state)
    losses = [in_place()(model, optimizer, batch_at(step)) for step in range(11, STEPS)]
    final, unbroken = run.final
    assert_same(bits(losses), bits(unbroken[11:]))
    assert_same(bits(nnx.state((model, optimizer))), bits(final))
