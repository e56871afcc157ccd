"""Levanter's loop: Equinox, two jitted steps in turn, checkpoints by the clock.

A step with the hooks' extra results runs now and then, the plain one otherwise.
"""

from __future__ import annotations

import datetime
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from integrations.loops import WINDOW, run_both

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
MINUTE = datetime.timedelta(minutes=1)
K = WINDOW.steps


class TrainerState(eqx.Module):
    step: jax.Array
    model: eqx.nn.MLP
    opt_state: Any
    training_key: jax.Array
    optimizer: optax.GradientTransformation = eqx.field(static=True)

    def take_step(self, grads):
        updates, opt_state = self.optimizer.update(grads, self.opt_state)
        return TrainerState(
            self.step + 1, eqx.apply_updates(self.model, updates), opt_state,
            jax.random.split(self.training_key, 1)[0], self.optimizer,
        )  # fmt: skip


def initial_state():
    key, model_key = jax.random.split(jax.random.key(0))
    model = eqx.nn.MLP(8, 4, 16, 2, key=model_key)
    opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    return TrainerState(jnp.zeros((), jnp.int32), model, opt_state, key, TX)


def update(state, x, y):
    def loss_fn(model):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(state.model)
    return loss, state.take_step(grads), grads


@functools.cache
def setup():
    @functools.partial(eqx.filter_jit, donate="all")
    def train_step(state, x, y):
        loss, new_state, grads = update(state, x, y)
        return loss, new_state, {"grad_norm": optax.tree.norm(grads)}

    @functools.partial(eqx.filter_jit, donate="all")
    def train_step_no_hook(state, x, y):
        return update(state, x, y)[:2]

    return train_step, train_step_no_hook


class Checkpointer:
    """Saves when so much time has passed since the last save."""

    def __init__(self, manager, save, save_interval, now, *, announce):
        self.manager, self.save, self.now, self.announce = manager, save, now, announce
        self.save_interval = save_interval
        self.last_save_time, self.due_at = now(), None

    def on_step(self, step, state, *, force=False):
        if self.due_at is None and self.now() - self.last_save_time >= self.save_interval:
            self.due_at = step  # was: saved at once
            if self.announce:
                self.due_at = step + K - 1  # new: the window ends with the save
                self.manager.expect_save(in_steps=K - 1)  # new
        if force or step == self.due_at:
            # was: save_checkpoint({"state": state}, step, path)
            self.manager.save(step, args=self.save(eqx.filter(state, eqx.is_array)))
            self.last_save_time, self.due_at = self.now(), None


def train(directory, gockpt, *, minutes_per_step, announce, hooks_at=(), steps=20):
    """A clock that goes as fast as the test says: no sleeps."""
    train_step, train_step_no_hook = setup()
    state, losses, clock = initial_state(), [], [datetime.datetime(2030, 1, 1)]
    with gockpt.GoCkptManager(directory, window=WINDOW) as manager:
        checkpointer = Checkpointer(
            manager, gockpt.GoCkptSave, 5 * MINUTE, lambda: clock[0], announce=announce
        )
        train_step = manager.wrap(train_step)  # new
        train_step_no_hook = manager.wrap(train_step_no_hook)  # new: both count updates
        for step in range(1, steps + 1):
            rng = np.random.default_rng(step)
            x, y = (jnp.asarray(rng.standard_normal((4, n), np.float32)) for n in (8, 4))
            if step in hooks_at:
                loss, state, _ = train_step(state, x, y)
            else:
                loss, state = train_step_no_hook(state, x, y)
            losses.append(loss)
            clock[0] += minutes_per_step(step) * MINUTE
            checkpointer.on_step(step, state)
        checkpointer.on_step(steps, state, force=checkpointer.last_save_time != clock[0])
    return eqx.filter(state, eqx.is_array), losses


def steady(step):
    return 1


def unsteady(step):
    """Some steps take three minutes, say for an evaluation."""
    return 3 if step in (4, 12, 13) else 1


def test_announced_by_the_clock(tmp_path):
    run = run_both(train, tmp_path, minutes_per_step=unsteady, announce=True, steps=21)
    assert run.windows == [6, 13, 20]
    assert run.snapshots == [21]  # the forced one at the end
    assert run.least_early > 0.5


def test_a_steady_clock_is_a_period(tmp_path):
    run = run_both(train, tmp_path, minutes_per_step=steady, announce=False)
    assert (run.snapshots, run.windows) == ([5, 10], [15, 20])


@pytest.mark.parametrize("hooks_at", [(1, 2, 3, 8, 9), (1, 2, 3, 6, 13, 14)], ids=["out", "in"])
def test_two_steps_share_one_count_and_one_window(hooks_at, tmp_path):
    """They update alike, so a window that one of them opened goes on with the other."""
    run = run_both(
        train, tmp_path, minutes_per_step=steady, announce=True, hooks_at=hooks_at, steps=21
    )
    assert (run.snapshots, run.windows) == ([], [7, 14, 21])
    assert {r.window_steps for r in run.manager.reports} == {K}
