"""Kauldron's loop: a jitted method with a static `self`, a gate that asks `should_save`.

Saved is the state before the step of that number, under the name `default`, beside a clock; at some
steps losses are returned too, which makes another program of the step.
"""

from __future__ import annotations

import dataclasses
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from integrations.loops import WINDOW, run_both

STEPS = 23


@flax.struct.dataclass
class TrainState:
    step: jax.Array
    params: dict
    opt_state: optax.OptState


@dataclasses.dataclass(kw_only=True, eq=False, frozen=True)
class TrainStep:
    optimizer: optax.GradientTransformation = optax.adamw(1e-2)  # noqa: RUF009

    @functools.partial(
        jax.jit, static_argnames=("self", "return_losses"), donate_argnames=("state",)
    )
    def step(self, state, batch, *, return_losses=False):
        def loss_of(params):
            return jnp.mean((jnp.tanh(batch @ params["in"]) @ params["out"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
        return new, {"loss": loss} if return_losses else {}

    def init(self):
        rng = np.random.default_rng(0)
        shapes = {"in": (8, 16), "out": (16, 4)}
        params = {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()}
        return TrainState(
            step=jnp.zeros((), int), params=params, opt_state=self.optimizer.init(params)
        )


TRAIN_STEP = TrainStep()


def train(directory, gockpt, *, log_every):
    trainstep, losses = TRAIN_STEP, []
    options = ocp.CheckpointManagerOptions(save_interval_steps=5)
    manager = gockpt.GoCkptManager(directory, options=options, window=WINDOW)
    step = manager.wrap(trainstep.step)  # new, before: trainstep.step
    state = trainstep.init()
    with manager, jax.transfer_guard("disallow"):
        for i in range(STEPS):
            if manager.should_save(i):
                with jax.transfer_guard("allow"):
                    items = {
                        "default": ocp.args.StandardSave(state),
                        "timer": ocp.args.StandardSave({"steps": np.float64(i)}),
                    }
                    manager.save(i, args=ocp.args.Composite(**items))
            batch = np.random.default_rng(i).standard_normal((6, 8), np.float32)
            state, aux = step(state, jax.device_put(batch), return_losses=i % log_every == 0)
            losses += aux.values()
    return state, losses


@pytest.mark.parametrize(
    ("log_every", "windows"),
    [
        (5, [5, 10, 15, 20]),  # a step that logs comes behind the save
        (8, [5, 10, 15, 20]),  # the step of number 8 is another program, in the window of 10
    ],
)
def test_kauldron(tmp_path, log_every, windows):
    run = run_both(train, tmp_path, log_every=log_every)
    assert run.windows == windows
    assert run.manager.all_steps() == [0, 5, 10, 15, 20]
    assert set(run.manager.item_metadata(5).keys()) == {"default", "timer"}
