"""Flax's gemma example: NNX modules go through plain `jax.jit`, and come out as a `nnx.State`.

The loop puts what has come out into the modules (`nnx.update`). It saves every so many steps and at
the last one, and the loop itself decides.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from integrations.loops import WINDOW, run_both

VOCABULARY, STEPS, CHECKPOINT_EVERY_STEPS = 24, 23, 5


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, 16, rngs=rngs)
        self.mlp = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.RMSNorm(16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.embed.attend(self.norm(x + nnx.gelu(self.mlp(x))))


@functools.partial(
    jax.jit, static_argnames="label_smoothing", donate_argnames=("model", "optimizer")
)
def jit_train_step(model, optimizer, batch, train_metrics, label_smoothing=0.0):
    graphdef, params, nondiff = nnx.split(model, nnx.Param, ...)

    def loss_fn(params):
        logits = nnx.merge(graphdef, params, nondiff)(batch[:, :-1])
        targets = optax.smooth_labels(jax.nn.one_hot(batch[:, 1:], VOCABULARY), label_smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    optimizer.update(model, grads)
    train_metrics.update(values=loss)
    return nnx.state((model, optimizer, train_metrics)), loss


def train(directory, gockpt):
    model = Transformer(nnx.Rngs(0))
    tx = optax.MultiSteps(optax.adamw(1e-2), 2)  # its fields are not in the order of their names
    optimizer, train_metrics = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.metrics.Average()
    losses = []
    # was: ocp.CheckpointManager(
    with gockpt.GoCkptManager(directory, window=WINDOW) as checkpoint_mngr:
        train_step = checkpoint_mngr.wrap(jit_train_step, state=("model", "optimizer"))  # new
        for step in range(STEPS):
            is_last_step = step == STEPS - 1
            batch = jnp.asarray(np.random.default_rng(step).integers(VOCABULARY, size=(8, 7)))
            updates, loss = train_step(model, optimizer, batch, train_metrics, label_smoothing=0.1)
            nnx.update((model, optimizer, train_metrics), updates)
            losses.append(loss)
            if (step > 0 and step % CHECKPOINT_EVERY_STEPS == 0) or is_last_step:
                state = {"model": nnx.state(model), "optimizer": nnx.state(optimizer), "step": step}
                checkpoint_mngr.save(step, args=ocp.args.StandardSave(state))
    return nnx.state((model, optimizer, train_metrics)), losses


def test_gemma(tmp_path):
    run = run_both(train, tmp_path)
    assert run.windows == [15, 20]  # by the period of the two saves before
    assert run.snapshots == [5, 10, 22]
    assert run.least_early > 0.5
