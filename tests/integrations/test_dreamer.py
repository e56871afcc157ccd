"""DreamerV3: what is donated and what the policy still reads are two arguments, and one result.

Parameters, moments and a slow copy lie in one flat dict. The policy's part of it goes in by itself
and is not donated: the loop moves it to the policy's devices, or deletes it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from integrations.loops import WINDOW, run_both

OPTIONS, STEPS = ocp.CheckpointManagerOptions(save_interval_steps=5), 17
MESH = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
MIRRORED = jax.NamedSharding(MESH, jax.P())
SHAPES = {"dyn/w": (6, 24), "pol/w": (24, 6), "val/w": (24, 1)}
POLICY = ("dyn/w", "pol/w")


def init():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    params = {
        n: jax.random.normal(k, s) / 5 for k, (n, s) in zip(keys, SHAPES.items(), strict=True)
    }
    moments = {f"{m}/{n}": jnp.zeros(s) for n, s in SHAPES.items() for m in ("mu", "nu")}
    return {**params, **moments, "slow/val/w": params["val/w"] + 0.0, "step": jnp.int32(0)}


def loss_of(trained, slow, x):
    hidden = jnp.tanh(x @ trained["dyn/w"])
    values = hidden @ trained["val/w"] - hidden @ slow
    return jnp.mean((hidden @ trained["pol/w"] - x) ** 2) + jnp.mean(values**2)


def train_fn(donated, allocated, carry, x):
    params = {**donated, **allocated}
    slow = params["slow/val/w"]
    loss, grads = jax.value_and_grad(loss_of)({n: params[n] for n in SHAPES}, slow, x)
    new = {"step": params["step"] + 1}
    for n, g in grads.items():
        mu = new[f"mu/{n}"] = 0.9 * params[f"mu/{n}"] + 0.1 * g
        nu = new[f"nu/{n}"] = 0.99 * params[f"nu/{n}"] + 0.01 * g * g
        new[n] = params[n] - 1e-2 * mu / (jnp.sqrt(nu) + 1e-6)
    new["slow/val/w"] = 0.98 * slow + 0.02 * new["val/w"]
    return new, 0.9 * carry + x.mean(), loss


TRAIN = jax.jit(train_fn, donate_argnums=0)


def train(directory, gockpt):
    params, carry = jax.device_put((init(), jnp.float32(0)), MIRRORED)
    with gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager:
        step_fn = manager.wrap(TRAIN, state=(0, 1))  # new
        for step in range(STEPS):
            allocated = {n: x for n, x in params.items() if n in POLICY}
            donated = {n: x for n, x in params.items() if n not in POLICY}
            x = np.random.default_rng(step).standard_normal((8, 6), np.float32)
            params, carry, loss = step_fn(
                donated, allocated, carry, jax.device_put(x, jax.NamedSharding(MESH, jax.P("d")))
            )
            jax.tree.map(lambda x: x.delete(), allocated)  # the policy has newer ones
            manager.save(step, args=ocp.args.StandardSave({"params": params, "carry": carry}))
    return params, carry, loss


def test_dreamer(tmp_path):
    run = run_both(train, tmp_path)
    assert (run.snapshots, run.windows) == ([0], [5, 10, 15])
    sizes = {name: 4 * math.prod(shape) for name, shape in SHAPES.items()}
    # The moments; and the value's weights, because an average of them is kept.
    early = 2 * sum(sizes.values()) + 2 * sizes["val/w"]
    assert run.manager.last_report.early_bytes == early
