"""Several updates in one call, by `scan`: the call is the unit, and nothing is ever wrong."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from window.training_loop import Options, assert_restores, to_host

from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions

TX = optax.adam(1e-2)
BATCHES = jnp.linspace(-1.0, 1.0, 4 * 64).reshape(4, 64)


def updates(state, batches):
    """Four updates of Adam."""

    def one(state, batch):
        grads = jax.grad(lambda p: jnp.sum(jnp.cosh(p["w"] + batch)))(state["params"])
        deltas, opt = TX.update(grads, state["opt"], state["params"])
        return {"opt": opt, "params": optax.apply_updates(state["params"], deltas)}, None

    return jax.lax.scan(one, state, batches)[0]


@functools.partial(jax.jit, donate_argnums=0)
def plain(state, batches):
    return state | updates({k: state[k] for k in ("opt", "params")}, batches)


@functools.partial(jax.jit, donate_argnums=0)
def averaged(state, batches):
    """Averages of the parameters are kept outside the loop, once a call: both have a cut there."""
    state = plain(state, batches)
    params = state["params"]

    def averages(decay, old):
        return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, old, params)

    return state | {"fast": averages(0.5, state["fast"]), "slow": averages(0.75, state["slow"])}


def fresh(*averages):
    params = {"w": jnp.ones(64)}
    state = {"opt": TX.init(params), "params": params}
    return state | {name: jax.tree.map(jnp.copy, params) for name in averages}


@pytest.mark.parametrize("steps", [3, None])
@pytest.mark.parametrize(("step", "averages"), [(plain, []), (averaged, ["fast", "slow"])])
def test_calls_are_the_unit(tmp_path, step, averages, steps):
    window = WindowOptions(steps=steps, device_budget_bytes=5 * 256)
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=5), window=window) as manager:
        wrapped, state, saved = manager.wrap(step), fresh(*averages), {}
        for label in range(16):
            state = wrapped(state, BATCHES * label)
            if wrapped.program is not None and wrapped.program.is_armed:
                wrapped.program.wait_until_ready()
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        assert_restores(manager, saved)
        kind = "window" if averages else "snapshot"
        assert [r.kind for r in manager.reports] == ["snapshot", kind, kind, kind]
        if averages:
            assert manager.last_report.early_bytes == 3 * 256
        else:
            assert "no leaf may leave early" in manager.last_report.reason
            assert "its new value comes out of a loop (`scan`)" in manager.last_report.reason
            explained = manager._gockpt_session.explain()
            assert explained.startswith("foreseen saves are snapshots: no leaf may leave early: ")
            assert "explain()" not in explained, "what it would tell follows"
