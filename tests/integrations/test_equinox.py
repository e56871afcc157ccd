"""Equinox: `eqx.filter_jit` with several state arguments, and `eqx.partition` around `jax.jit`."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from integrations.loops import WINDOW, run_both

STEPS, OPTIONS = 17, ocp.CheckpointManagerOptions(save_interval_steps=5)
TX = optax.adam(1e-2)


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(8, 16, key=keys[0])
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.last = eqx.nn.Linear(16, 4, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x)), state


def fresh():
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    return model, state, TX.init(eqx.filter(model, eqx.is_inexact_array))


def update(model, state, opt_state, x, y):
    def loss_fn(model, state):
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = batched(x, state)
        return jnp.mean((out - y) ** 2), state

    (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state)
    updates, opt_state = TX.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), state, opt_state, loss


def batch_at(step):
    rng = np.random.default_rng(step)
    return [jnp.asarray(rng.standard_normal((6, n)), jnp.float32) for n in (8, 4)]


@functools.cache
def filtered():
    return eqx.filter_jit(update, donate="all")


def train_filtered(directory, gockpt):
    model, state, opt_state = fresh()
    with gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager:
        make_step = manager.wrap(filtered(), state=(0, 1, 2))  # new
        for step in range(STEPS):
            model, state, opt_state, loss = make_step(model, state, opt_state, *batch_at(step))
            arrays = eqx.filter((model, state, opt_state), eqx.is_array)
            manager.save(step, args=ocp.args.StandardSave(arrays))
    return arrays, loss


@functools.cache
def partitioned():
    _, static = eqx.partition(fresh(), eqx.is_array)

    @functools.partial(jax.jit, donate_argnums=0)
    def make_step(params, x, y):
        *new, loss = update(*eqx.combine(params, static), x, y)
        return eqx.filter(tuple(new), eqx.is_array), loss

    return make_step


def train_partitioned(directory, gockpt):
    params, _ = eqx.partition(fresh(), eqx.is_array)
    with gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager:
        make_step = manager.wrap(partitioned())  # new
        for step in range(STEPS):
            params, loss = make_step(params, *batch_at(step))
            manager.save(step, args=ocp.args.StandardSave(params))
    return params, loss


@pytest.mark.parametrize("train", [train_filtered, train_partitioned])
def test_equinox(train, tmp_path):
    run = run_both(train, tmp_path)
    assert (run.snapshots, run.windows) == ([0], [5, 10, 15])
