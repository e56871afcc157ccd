"""Keras on JAX: `stateless_call` and `stateless_apply`, in a loop of one's own or inside `fit`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from integrations.loops import WINDOW, run_both

OPTIONS = ocp.CheckpointManagerOptions(save_interval_steps=4)
STEPS = 14


def stateless_call(trainable, averages, x):
    w1, b1, w2 = trainable
    x = x @ w1 + b1
    averages = [0.9 * averages[0] + 0.1 * x.mean(0)]
    return jnp.tanh(x - averages[0]) @ w2, averages


def stateless_apply(optimizer_variables, grads, trainable):
    """Keras' Adam: count and rate are variables too, each moment lies behind the other."""
    count, rate, *moments = optimizer_variables
    updated, kept = [], []
    for p, g, m, v in zip(trainable, grads, moments[::2], moments[1::2], strict=True):
        m = m + (g - m) * 0.1
        v = v + (jnp.square(g) - v) * 0.001
        kept += [m, v]
        updated.append(p - m * rate / (jnp.sqrt(v) + 1e-7))
    return updated, [count + 1, rate, *kept]


@functools.cache
def jitted():
    def loss_and_updates(trainable, averages, x, y):
        out, averages = stateless_call(trainable, averages, x)
        return jnp.mean((out - y) ** 2), averages

    def train_step(state, data):
        trainable, averages, optimizer_variables, metrics = state
        (loss, averages), grads = jax.value_and_grad(loss_and_updates, has_aux=True)(
            trainable, averages, *data
        )
        trainable, optimizer_variables = stateless_apply(optimizer_variables, grads, trainable)
        metrics = [metrics[0] + loss, metrics[1] + 1]
        return {"loss": metrics[0] / metrics[1]}, (
            trainable, averages, optimizer_variables, metrics,
        )  # fmt: skip

    return jax.jit(train_step, donate_argnums=0)


class Model:
    """What `fit` is made of: the function that it calls takes the iterator."""

    def __init__(self, wrap):
        self.train_function = self._make_function(wrap(jitted()))

    def _make_function(self, step_function):
        def iterator_step(state, iterator):
            return step_function(state, next(iterator))

        return iterator_step


def fresh():
    rng = np.random.default_rng(0)
    trainable = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((8, 16), 16, (16, 4))]
    moments = [jnp.zeros_like(p) for p in trainable for _ in range(2)]
    rest = [jnp.zeros(16)], [jnp.zeros((), jnp.int32), jnp.float32(1e-2), *moments]
    return trainable, *rest, [jnp.zeros(()), jnp.zeros(())]


def batches():
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        yield rng.standard_normal((6, 8), np.float32), rng.standard_normal((6, 4), np.float32)


def train(directory, gockpt, *, is_fit):
    state, logs, iterator = fresh(), [], batches()
    with gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager:
        if is_fit:
            step = Model(manager.wrap).train_function  # new: `_make_function` wraps
        else:
            train_step = manager.wrap(jitted())  # new

            def step(state, iterator):
                return train_step(state, next(iterator))

        for label in range(STEPS):
            told, state = step(state, iterator)
            logs.append(told)
            names = ("trainable", "non_trainable", "optimizer")
            manager.save(label, args=ocp.args.StandardSave(dict(zip(names, state, strict=False))))
            if label % 5 == 4:  # the end of an epoch: the metrics are reset
                state = (*state[:3], [jnp.zeros_like(m) for m in state[3]])
    return state, logs


@pytest.mark.parametrize("is_fit", [False, True])
def test_all_saves_but_the_first_are_windows(tmp_path, is_fit):
    run = run_both(train, tmp_path, is_fit=is_fit)
    assert (run.snapshots, run.windows) == ([0], [4, 8, 12])
