"""Numbers of 64 bits that the user asks for around the step alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from window.training_loop import Options

import gockpt_jax as gockpt

SIZE = 3000
enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64


@jax.jit
def update(state, x):
    g = jnp.cumsum(jnp.sin(state["w"] * x))
    m = 0.9 * state["m"] + 0.1 * g
    return {"w": state["w"] / 1.01 - 0.01 * m, "m": m, "seen": state["seen"] + 2**40}


def test_a_window_of_wide_numbers(tmp_path):
    """Copies, replay and audit are made on threads, and at saves, that have not asked for them."""
    with enable_x64(True):
        state = {"w": jnp.arange(float(SIZE)), "m": jnp.zeros(SIZE), "seen": jnp.zeros(9, int)}
    window = gockpt.WindowOptions(steps=3)
    options = Options(save_interval_steps=5)
    with gockpt.GoCkptManager(tmp_path, options=options, window=window) as manager:
        step, saved = manager.wrap(update), {}
        for n in range(11):
            with enable_x64(True):
                state = step(state, jnp.float64(n))
            if manager.save(n, args=gockpt.GoCkptSave(state)):
                saved[n] = jax.tree.map(np.array, state)
        manager.wait_until_finished()
        assert [r.kind for r in manager.reports] == ["snapshot", "window", "window"]
        assert manager.last_report.early_bytes > 0
        with enable_x64(True):
            for label, want in saved.items():
                found = manager.restore(label, args=gockpt.GoCkptRestore(want))
                for name, x in want.items():
                    assert (found[name].dtype, found[name].tobytes()) == (x.dtype, x.tobytes())


def moments(state, g):
    return {
        "m": (0.9 * state["m"] + g).astype(np.float32),
        "s": (0.8 * state["s"] + g).astype(np.float32),
        "v": (0.7 * state["v"] + g).astype(np.float32),
    }


def wide_gradient(state, x):
    return moments(state, jnp.cumsum(jnp.sin(state["m"].astype(np.float64) * x)))


def wide_scalar(state, x):
    rate = jnp.cumsum(jnp.sin(x * jnp.arange(8.0)))[-1]
    return moments(state, rate * jnp.cumsum(jnp.sin(state["m"])))


@pytest.mark.parametrize("update", [wide_gradient, wide_scalar])
def test_a_state_of_others_that_is_updated_by_wide_numbers(tmp_path, update):
    """The host repeats what was rounded once, behind a product and a sum of 64 bits."""
    state = {name: jnp.ones(SIZE, np.float32) for name in "msv"}
    with gockpt.GoCkptManager(tmp_path, window=gockpt.WindowOptions(steps=3)) as manager:
        step = manager.wrap(jax.jit(update))
        for n in range(8):
            if n == 4:
                step.program.wait_until_ready()
                manager.expect_save(in_steps=4)
            with enable_x64(True):
                state = step(state, jnp.float64(n))
        cut = step.program.cut
        manager.save(8, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        assert manager.last_report.kind == "window"
        assert manager.last_report.early_bytes >= 2 * SIZE * 4
        found = manager.restore(8, args=gockpt.GoCkptRestore(jax.tree.map(np.array, state)))
    jax.tree.map(np.testing.assert_array_equal, found, state)
    assert np.float64 in [spec.dtype for spec in cut.arrays]
