"""JAX without `jit`, or looking for NaNs: the loop is debugged as it would be without us."""

from __future__ import annotations

import contextlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from window.training_loop import SIZE, Options, assert_restores, assert_same, manage, to_host

from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.window import ahead

SETTINGS = {
    "jax_disable_jit": jax.disable_jit,
    "jax_debug_nans": lambda: jax.debug_nans(True),
    "jax_debug_infs": lambda: jax.debug_infs(True),
}


@jax.jit
def masked(state, batch):
    """A gradient that is infinite, and NaN at a batch of zero, of which nothing is returned."""
    grad = batch / jnp.abs(batch)
    grad = jnp.where(batch == 1, jnp.inf, grad)
    good = jnp.isfinite(grad)
    m = jnp.where(good, 0.9 * state["m"] + grad, state["m"])
    return {"m": m, "w": jnp.where(good, state["w"] - 0.1 * m, state["w"])}


@jax.jit
def returns_nan_at_zero(state, batch):
    new = masked(state, batch)
    return new, jnp.sum(batch) / jnp.sum(batch)


def fresh():
    return {"m": jnp.zeros(SIZE), "w": jnp.ones(SIZE)}


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("debugged", [range(17), range(6, 9), range(5, 6), range(8, 9)])
def test_no_step_runs_armed(tmp_path, setting, debugged, arm):
    state, alone, saved = fresh(), fresh(), {}
    options, window = Options(save_interval_steps=4), WindowOptions(steps=3, arm=arm)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        step = manager.wrap(masked)
        for n in range(17):
            batch = jnp.arange(SIZE) % 3 - 0.0
            with SETTINGS[setting]() if n in debugged else contextlib.nullcontext():
                state, alone = step(state, batch), masked(alone, batch)
                if manager.save(n, args=GoCkptSave(state)):
                    saved[n] = to_host(state)
        manager.wait_until_finished()
        assert_same(to_host(state), to_host(alone))
        assert_restores(manager, saved)
        reports = {r.step: r for r in manager.reports}
        last_is_debugged = 16 in debugged
        assert reports[16].kind == ("snapshot" if last_is_debugged else "window")
        assert (setting in reports[16].reason) == last_is_debugged


@pytest.mark.skipif(
    os.environ.get("GOCKPT_TEST_PLATFORM") == "pretended", reason="only the CPU is asked"
)
def test_nothing_is_tried_out_while_debugging(tmp_path, monkeypatch):
    """Whether the CPU contracts, say: operation by operation it never does."""
    asked = []
    monkeypatch.setattr(
        ahead, "cpu_contracts", lambda: bool(asked.append(jax.config.jax_disable_jit))
    )
    with GoCkptManager(tmp_path, window=WindowOptions(steps=3)) as manager:
        step, state, batch = manager.wrap(masked), fresh(), jnp.ones(SIZE)
        for n in range(6):  # the second call is traced, and planned for at the third
            with jax.disable_jit(n in (2, 3)):
                state = step(state, batch)
    assert asked == [False]


def test_nans_are_found_where_they_would_be(tmp_path):
    with manage(tmp_path, WindowOptions(steps=3), save_interval_steps=4) as manager:
        step, state = manager.wrap(returns_nan_at_zero), fresh()
        with jax.debug_nans(True):
            for n in range(11):
                if n in (6, 7, 8, 10):
                    with pytest.raises(FloatingPointError):
                        step(state, jnp.zeros(SIZE))
                state, _ = step(state, jnp.ones(SIZE))
                manager.save(n, args=GoCkptSave(state))


@pytest.mark.parametrize("setting", SETTINGS)
def test_any_number_is_saved(tmp_path, setting):
    """As a key of random numbers, and in a layout of packed ones, too."""
    tree = {
        "mask": jax.device_put(np.full(SIZE, -np.inf, np.float32)),
        "best": jax.device_put(np.float32(np.nan)),
        "rows": jax.device_put(np.full((600, 600), np.nan, np.float32)),
        "key": jax.random.key(0),
        "int4": jnp.ones(SIZE, jnp.int4),
    }
    with GoCkptManager(tmp_path) as manager, SETTINGS[setting]():
        assert manager.save(0, args=GoCkptSave(tree))
        manager.wait_until_finished()
        restored = manager.restore(0)
        for name in ("mask", "best", "rows", "int4"):
            np.testing.assert_array_equal(np.asarray(restored[name]), np.asarray(tree[name]))
