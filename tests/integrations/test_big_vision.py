"""big_vision's loop: implicit transfers are forbidden, in all threads; the state is a dict.

It saves what `itstime` says: the first step, every so many, the last; and adds the clock's readings
to what it saves. A run that is started again goes on from there.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gockpt_jax
from integrations.loops import WINDOW, assert_same, bits, run_both

CKPT_STEPS, TOTAL_STEPS, MORE_STEPS = 5, 17, 4
STRATEGY = ((r"params/.*kernel|(mu|nu)/.*kernel", PartitionSpec("data")), (r".*", PartitionSpec()))


def itstime(step, every_n_steps, total_steps):
    """Every so many steps, and the first, and the last; not shortly before the last."""
    is_last, is_first = step == total_steps, step == 1
    is_step = step % every_n_steps == 0 and total_steps - step >= 0.25 * every_n_steps
    return is_step or is_last or is_first


class Model(nn.Module):
    @nn.compact
    def __call__(self, image, *, train):
        x = nn.gelu(nn.Dense(16)(image))
        return nn.Dense(4)(nn.Dropout(0.1, deterministic=not train)(x))


@functools.cache
def setup(mesh):
    model = Model()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, mu_dtype=jnp.bfloat16))

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((8, 8)), train=False)["params"]
        return {"params": params, "opt": tx.init(params)}

    def sharding(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, next(s for pattern, s in STRATEGY if re.search(pattern, name)))

    train_state_sharding = jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(init))
    repl_sharding = NamedSharding(mesh, PartitionSpec())

    @functools.partial(
        jax.jit, donate_argnums=(0,), out_shardings=(train_state_sharding, repl_sharding)
    )
    def update_fn(train_state, rng, batch):
        params, opt = train_state["params"], train_state["opt"]
        rng = jax.random.fold_in(rng, optax.tree.get(opt, "count"))

        def loss_fn(params):
            logits = model.apply(
                {"params": params}, batch["image"], train=True, rngs={"dropout": rng}
            )
            return optax.sigmoid_binary_cross_entropy(logits, batch["labels"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        measurements = {"training_loss": loss, "l2_grads": optax.tree.norm(grads)}
        measurements["l2_updates"] = optax.tree.norm(updates)
        return {"params": params, "opt": opt}, measurements

    return jax.jit(init, out_shardings=train_state_sharding), update_fn, repl_sharding


def train(directory, gockpt, *, total_steps=TOTAL_STEPS):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    init, update_fn, repl_sharding = setup(mesh)
    with jax.transfer_guard("allow"):
        train_state, key = init(), jax.random.key(1)
        rng_loop = jax.device_put(key, repl_sharding)
    with gockpt.GoCkptManager(directory, window=WINDOW) as manager:  # was: its own GlobalAsync...
        update_fn = manager.wrap(update_fn)  # new
        if manager.latest_step() is not None:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, train_state)
            jax.tree.map(lambda x: x.delete(), train_state)
            # was: u.load_checkpoint_ts(resume_ckpt_path, tree=shardings, shardings=shardings)
            target["chrono"] = {"accum_steps": 0.0}
            loaded = manager.restore(None, args=gockpt.GoCkptRestore(target))
            assert loaded.pop("chrono") == {"accum_steps": TOTAL_STEPS}
            train_state = loaded
        first_step = int(jax.device_get(optax.tree.get(train_state["opt"], "count")))
        for step in range(first_step + 1, total_steps + 1):
            rng = np.random.default_rng(step)
            batch = {
                "image": rng.standard_normal((8, 8), np.float32),
                "labels": rng.integers(2, size=(8, 4)).astype(np.float32),
            }
            batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
            train_state, measurements = update_fn(train_state, rng_loop, batch)
            if itstime(step, CKPT_STEPS, total_steps):
                chrono = jax.device_put({"accum_steps": np.float64(step)}, repl_sharding)
                ckpt = {**train_state, "chrono": chrono}
                # was: u.save_checkpoint_ts(ckpt_mngr, ckpt, save_ckpt_path, step, keep)
                manager.save(step, args=gockpt.GoCkptSave(ckpt))
    return train_state, measurements


@pytest.fixture
def no_implicit_transfers():
    """For all threads, as big_vision sets it; `jax.transfer_guard` is for one."""
    before = jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", "disallow")
    yield
    jax.config.update("jax_transfer_guard", before)


@pytest.mark.usefixtures("no_implicit_transfers")
def test_big_vision(tmp_path):
    run = run_both(train, tmp_path)
    assert run.windows == [15]  # 5 and 10 have given the period
    assert run.snapshots == [1, 5, 10, 17]
    assert run.least_early > 0.5

    resumed, _ = train(tmp_path / "WithWindows", gockpt_jax, total_steps=TOTAL_STEPS + MORE_STEPS)
    at_once, _ = train(tmp_path / "at_once", gockpt_jax, total_steps=TOTAL_STEPS + MORE_STEPS)
    assert_same(bits(resumed), bits(at_once))
