"""No framework: optax on a dict; explicit mesh axes; `shard_map` inside the step."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from integrations.loops import WINDOW, run_both

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
OPTIONS = ocp.CheckpointManagerOptions(save_interval_steps=5)
STEPS = 17


def init_params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(keys[0], (8, 16)) / 3,
        "b1": jnp.zeros(16),
        "w2": jax.random.normal(keys[1], (16, 4)) / 4,
    }


def mean_loss(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def apply_gradients(params, opt_state, grads):
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@functools.partial(jax.jit, donate_argnums=(0, 1))
def plain(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mean_loss)(params, x, y)
    return *apply_gradients(params, opt_state, grads), loss


def varying(array):
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, "data", to="varying")
    return jax.lax.pvary(array, "data")  # jax 0.7


def mapped_gradients(params, x, y):
    """Each device differentiates its own examples; then the mean over devices."""
    value_and_grad = jax.value_and_grad(lambda p: mean_loss(p, x, y))
    loss, grads = value_and_grad(jax.tree.map(varying, params))
    return jax.lax.pmean((loss, grads), "data")


@functools.partial(jax.jit, donate_argnums=(0, 1))
def with_shard_map(params, opt_state, x, y):
    mapped = jax.shard_map(
        mapped_gradients, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P())
    )
    loss, grads = mapped(params, x, y)
    return *apply_gradients(params, opt_state, grads), loss


@functools.partial(jax.jit, donate_argnums=(0, 1))
def with_explicit_axes(params, opt_state, x, y):
    """Tensor parallelism by the arrays' own types: `w1` has its columns apart, `w2` its rows."""

    def loss_fn(params):
        hidden = jnp.tanh(x @ params["w1"] + params["b1"])
        out = jnp.einsum("bh,ho->bo", hidden, params["w2"], out_sharding=P())
        return jnp.mean((out - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return *apply_gradients(params, opt_state, grads), loss


LAYOUTS = {
    plain: None,
    with_shard_map: ({"w1": P(), "b1": P(), "w2": P()}, P("data")),
    with_explicit_axes: ({"w1": P(None, "data"), "b1": P("data"), "w2": P("data", None)}, P()),
}


def train(directory, gockpt, *, step_fn):
    params = init_params()
    batch_sharding, in_mesh = None, contextlib.nullcontext()
    if LAYOUTS[step_fn] is not None:
        specs, batch_spec = LAYOUTS[step_fn]
        kinds = (AxisType.Explicit,)  # the default, since jax 0.8
        mesh = jax.make_mesh((4,), ("data",), kinds, devices=jax.devices()[:4])
        params = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in params.items()}
        batch_sharding, in_mesh = NamedSharding(mesh, batch_spec), jax.set_mesh(mesh)
    with in_mesh, gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager:
        opt_state = jax.jit(TX.init)(params)
        update = manager.wrap(step_fn, state=("params", "opt_state"))  # new
        for step in range(STEPS):
            rng = np.random.default_rng(step)
            x, y = rng.standard_normal((8, 8), np.float32), rng.standard_normal((8, 4), np.float32)
            x, y = jax.device_put((x, y), batch_sharding)
            params, opt_state, loss = update(params, opt_state, x, y)
            state = {"params": params, "opt_state": opt_state}
            manager.save(step, args=ocp.args.StandardSave(state))
    return state, loss


@pytest.mark.parametrize("step_fn", LAYOUTS, ids=lambda f: f.__name__)
def test_plain_jax(step_fn, tmp_path):
    run = run_both(train, tmp_path, step_fn=step_fn)
    assert (run.snapshots, run.windows) == ([0], [5, 10, 15])
