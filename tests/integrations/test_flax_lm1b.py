"""Flax's lm1b example, and gemma as it was: a `TrainState`; `jax.jit` with shardings.

The model here is NNX's, split, with its graph in the `TrainState`, as gemma had it; lm1b's is
Linen's. It saves every so many steps and at the last one, and the loop itself decides.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from integrations.loops import WINDOW, run_both

VOCABULARY, LENGTH, STEPS, CHECKPOINT_EVERY_STEPS = 24, 6, 18, 5


class TransformerLM(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.1), (None, "fsdp"))
        self.embed = nnx.Embed(VOCABULARY, 16, embedding_init=init, rngs=rngs)
        self.mlp = nnx.Linear(16, 16, kernel_init=init, rngs=rngs)
        self.norm = nnx.RMSNorm(16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.embed.attend(self.norm(x + nnx.gelu(self.mlp(x))))


class TrainState(train_state.TrainState):
    graphdef: nnx.GraphDef[TransformerLM]


def train_step(state, batch, learning_rate_fn, label_smoothing):
    def loss_fn(params):
        logits = nnx.merge(state.graphdef, params)(batch[:, :-1])
        targets = jax.nn.one_hot(batch[:, 1:], VOCABULARY)
        targets = optax.smooth_labels(targets, label_smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()

    step = state.step
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, {"loss": loss, "learning_rate": learning_rate_fn(step)}


@functools.cache
def setup(mesh):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 4, STEPS)
    tx = optax.adamw(schedule, b2=0.98)

    def init():
        graphdef, params = nnx.split(TransformerLM(nnx.Rngs(0)), nnx.Param)
        return TrainState.create(apply_fn=graphdef.apply, params=params, tx=tx, graphdef=graphdef)

    shapes = jax.eval_shape(init)
    state_sharding = nnx.get_named_sharding(shapes, mesh)
    data_sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    jit_train_step = jax.jit(
        train_step,
        in_shardings=(state_sharding, data_sharding),
        out_shardings=(state_sharding, None),
        static_argnums=(2, 3),
        donate_argnums=0,
    )
    return jax.jit(init, out_shardings=state_sharding), jit_train_step, schedule


def train(directory, gockpt):
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    manager = gockpt.GoCkptManager(directory, window=WINDOW)  # was: ocp.CheckpointManager(
    with jax.set_mesh(mesh), manager:
        init, jit_train_step, learning_rate_fn = setup(mesh)
        state = init()
        jit_train_step = manager.wrap(jit_train_step)  # new
        for step in range(STEPS):
            is_last_step = step == STEPS - 1
            tokens = np.random.default_rng(step).integers(VOCABULARY, size=(8, LENGTH + 1))
            batch = jnp.asarray(tokens, device=NamedSharding(mesh, PartitionSpec("fsdp")))
            state, metrics = jit_train_step(state, batch, learning_rate_fn, 0.1)
            if step % CHECKPOINT_EVERY_STEPS == 0 or is_last_step:
                # was: checkpoints.save_checkpoint_multiprocess(directory, state, step)
                manager.save(step, args=ocp.args.StandardSave(state))
    return state, metrics


def test_lm1b(tmp_path):
    run = run_both(train, tmp_path)
    assert run.windows == [10, 15]  # by the period of the two saves before
    assert run.snapshots == [0, 5, 17]
    assert run.least_early > 0.5
