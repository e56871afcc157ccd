"""tunix's trainer: `nnx.jit` bound to model and optimizer by `nnx.cached_partial`; LoRA.

Only the low-rank factors are trained. Saved are two items: the model's variables, and the
optimizer's.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from integrations.loops import WINDOW, run_both

STEPS = 17


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.LoRALinear(8, 16, lora_rank=2, rngs=rngs)
        self.last = nnx.LoRALinear(16, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


class CheckpointManager:
    """tunix's own, around Orbax's."""

    def __init__(self, root_directory, gockpt, policy):
        self.manager = gockpt.GoCkptManager(  # was: ocp.CheckpointManager(
            root_directory,
            options=ocp.CheckpointManagerOptions(save_decision_policy=policy),
            window=WINDOW,  # new
        )

    def save(self, step, model, optimizer, *, force=False):
        if not force and not self.manager.should_save(step):
            return False
        items = {
            "model_params": nnx.state(model),
            "optimizer_state": nnx.state(optimizer, nnx.optimizer.OptState),
        }
        args = {name: ocp.args.PyTreeSave(item) for name, item in items.items()}
        return self.manager.save(step, args=ocp.args.Composite(**args), force=force)


def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    wanted = nnx.DiffState(0, nnx.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=wanted)(model)
    optimizer.update(model, grads)
    return loss, optax.tree.norm(grads)


@functools.cache
def jitted():
    return nnx.jit(train_step, donate_argnames=("optimizer",))


def train(directory, gockpt):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam)
    policy = ocp.checkpoint_managers.FixedIntervalPolicy(5)
    checkpoints = CheckpointManager(directory, gockpt, policy)
    train_step = checkpoints.manager.wrap(jitted(), state=(0, 1))  # new, before:
    train_step = functools.partial(nnx.cached_partial(train_step, model, optimizer))
    assert train_step.func.jitted_fn._cache_size() >= 0  # which tunix logs
    losses = []
    with checkpoints.manager:
        for train_steps in range(1, STEPS + 1):
            rng = np.random.default_rng(train_steps)
            x, y = (jnp.asarray(rng.standard_normal((6, n)), jnp.float32) for n in (8, 4))
            loss, _ = train_step(x, y)
            losses.append(loss)
            checkpoints.save(train_steps, model, optimizer)
        checkpoints.save(train_steps, model, optimizer, force=True)
    return nnx.state((model, optimizer)), losses


def test_tunix(tmp_path):
    run = run_both(train, tmp_path)
    assert run.windows == [5, 10, 15]
    assert run.snapshots == [17]
    assert set(run.manager.item_metadata(5).keys()) == {"model_params", "optimizer_state"}
