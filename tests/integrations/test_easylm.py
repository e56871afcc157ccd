"""EasyLM's loop: the label is the number of updates made; layouts come from rules on paths.

The state and the random key are donated; the loop itself decides when to save: before the first
step, every so many, and at the end, where it may have saved already.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from integrations.loops import WINDOW, run_both

PS = PartitionSpec
VOCABULARY, LENGTH = 24, 6
RULES = (
    ("wte/embedding", PS("mp", "fsdp")),
    ("w1/kernel", PS("fsdp", "mp")),
    ("w2/kernel", PS("mp", "fsdp")),
    (".*", PS(None)),
)


def match_partition_rules(rules, tree):
    def spec(path, leaf):
        if np.prod(leaf.shape) == 1:
            return PS()
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return next(spec for rule, spec in rules if re.search(rule, name))

    return jax.tree_util.tree_map_with_path(spec, tree)


class LLaMA(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, 16, name="wte")(tokens)
        gate = nn.silu(nn.Dense(32, use_bias=False, name="w1")(nn.RMSNorm()(x)))
        x = x + nn.Dense(16, use_bias=False, name="w2")(gate)
        return nn.Dense(VOCABULARY, use_bias=False, name="lm_head")(x)


def train_step(train_state, rng, batch):
    rng, _ = jax.random.split(rng)  # the other key is for dropout

    def loss_fn(params):
        logits = train_state.apply_fn({"params": params}, batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(train_state.params)
    train_state = train_state.apply_gradients(grads=grads)
    return train_state, rng, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}


@functools.cache
def setup(mesh):
    model = LLaMA()
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1, mu_dtype=jnp.float32)
    )

    def init_fn(rng):
        params = model.init(rng, jnp.zeros((4, LENGTH), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    specs = match_partition_rules(RULES, jax.eval_shape(init_fn, jax.random.PRNGKey(0)))
    train_state_partition = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    everywhere = NamedSharding(mesh, PS())
    sharded_train_step = jax.jit(  # `pjit`, as it was called
        train_step,
        in_shardings=(train_state_partition, everywhere, everywhere),
        out_shardings=(train_state_partition, everywhere, everywhere),
        donate_argnums=(0, 1),
    )
    return jax.jit(init_fn, out_shardings=train_state_partition), sharded_train_step


def train(directory, gockpt, *, ask_every_step, total_steps=20, save_model_freq=5):
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "mp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    sharded_init_fn, sharded_train_step = setup(mesh)
    interval = save_model_freq if ask_every_step else 1
    options = ocp.CheckpointManagerOptions(save_interval_steps=interval)
    with gockpt.GoCkptManager(directory, options=options, window=WINDOW) as manager:
        sharded_train_step = manager.wrap(sharded_train_step)  # new
        train_state, sharded_rng = sharded_init_fn(jax.random.PRNGKey(0)), jax.random.PRNGKey(1)
        # was: checkpointer.save_all(train_state=train_state, ...)
        manager.save(0, args=gockpt.GoCkptSave(train_state))
        for step in range(total_steps):
            tokens = np.random.default_rng(step).integers(VOCABULARY, size=(4, LENGTH + 1))
            train_state, sharded_rng, metrics = sharded_train_step(
                train_state, sharded_rng, tokens.astype(np.int32)
            )
            label = step + 1  # was: int(jax.device_get(train_state.step)), which waits for the step
            if ask_every_step or label % save_model_freq == 0:
                manager.save(label, args=gockpt.GoCkptSave(train_state))
        assert not manager.save(label, args=gockpt.GoCkptSave(train_state))  # it is there
        assert label == int(train_state.step)
    return train_state, sharded_rng, metrics


def test_easylm(tmp_path):
    """A gate is foreseen from its third save on, the first one among them; the policy at once."""
    gate = run_both(train, tmp_path / "gate", ask_every_step=False)
    assert (gate.snapshots, gate.windows) == ([0, 5], [10, 15, 20])
    policy = run_both(train, tmp_path / "policy", ask_every_step=True)
    assert (policy.snapshots, policy.windows) == ([0], [5, 10, 15, 20])
    assert min(gate.least_early, policy.least_early) > 0.5
