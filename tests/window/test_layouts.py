"""Arrays that are not as JAX makes them: laid out as the user asked, or changed in place."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from window.training_loop import Options, assert_restores, assert_same, to_host

from gockpt_jax import GoCkptManager, GoCkptSave, SnapshotOnlyWarning, WindowOptions
from gockpt_jax.training.program import StepProgram

SHAPE = (16, 24)
needs_refs = pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="jax has no `new_ref`")


def update(state: Any, batch: Any) -> Any:
    grad = jnp.tanh(state["w"] * batch)
    m = 0.9 * state["m"] + grad
    return {"m": m, "w": state["w"] - 0.1 * m}


def fresh() -> Any:
    return {"m": jnp.zeros(SHAPE), "w": jnp.arange(float(np.prod(SHAPE))).reshape(SHAPE) / 100}


def train(directory: Any, step: Any, state: Any, *more: Any, last: int = 12) -> tuple[Any, Any]:
    """Saves at every fourth label; returns the reports, and the state at the end."""
    saved = {}
    options = Options(save_interval_steps=4)
    with GoCkptManager(directory, options=options, window=WindowOptions(steps=3)) as manager:
        step = manager.wrap(step)
        for label in range(last + 1):
            state = step(state, jnp.float32(label), *more)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        assert_restores(manager, saved)
        return {r.step: r for r in manager.reports}, state


@pytest.mark.parametrize("told", ["in and out", "out"])
@pytest.mark.parametrize("spec", [P(), P("a")])
def test_a_state_that_lies_as_the_user_asked(tmp_path, spec, told):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    columns = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh, spec))
    placed = {"in_shardings": (columns, None)} if told == "in and out" else {}
    step = jax.jit(update, donate_argnums=0, out_shardings=columns, **placed)
    alone = jax.device_put(fresh(), columns)
    for label in range(13):
        alone = step(alone, jnp.float32(label))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SnapshotOnlyWarning)
        reports, state = train(tmp_path, step, jax.device_put(fresh(), columns))
    assert {reports[n].kind for n in (8, 12)} == {"window"}
    assert reports[12].early_bytes
    assert_same(to_host(state), to_host(alone))
    assert jax.tree.map(lambda x: x.format, state) == jax.tree.map(lambda x: x.format, alone)


def test_a_program_that_jax_refuses_to_call_is_compiled_once(tmp_path, monkeypatch):
    """As of int4 that was placed (jax 0.10): it was compiled eight times, for a changed call."""

    def refuse(*flat):
        raise ValueError("Argument flat[0] lies otherwise")

    armed, arm = [], StepProgram.arm
    monkeypatch.setattr(StepProgram, "arm", lambda program, **_: armed.append(arm(program)))
    monkeypatch.setattr(StepProgram, "executable", lambda program: refuse)
    alone = fresh()
    for label in range(25):
        alone = jax.jit(update)(alone, jnp.float32(label))
    with pytest.warns(SnapshotOnlyWarning, match="the very call it was compiled for") as told:
        reports, state = train(tmp_path, jax.jit(update), fresh(), last=24)
    (warned,) = told
    assert "Argument `args[0]['m']` lies otherwise" in str(warned.message)
    assert {r.kind for r in reports.values()} == {"snapshot"}
    assert len(armed) == 1
    assert_same(to_host(state), to_host(alone))


def test_a_device_that_is_full_for_once_says_nothing_of_the_program(tmp_path, monkeypatch):
    """JAX raises a `ValueError` then, too, where it has called the program before."""
    executable, calls = StepProgram.executable, []

    def full_at_the_fourth(program):
        def call(*flat):
            calls.append(flat)
            if len(calls) == 4:
                raise ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 400000000 bytes.")
            return executable(program)(*flat)

        return call

    monkeypatch.setattr(StepProgram, "executable", full_at_the_fourth)
    reports, _ = train(tmp_path, jax.jit(update), fresh(), last=24)
    kinds = [reports[n].kind for n in (8, 12, 16, 20, 24)]
    assert kinds.count("snapshot") == 1
    assert kinds[-1] == "window"


def test_placed_int4_has_windows_or_one_reason(tmp_path):
    @jax.jit
    def step(state, batch):
        return {**update(state, batch), "codes": state["codes"] + jnp.int4(1)}

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = {**fresh(), "codes": jax.device_put(jnp.zeros(8, jnp.int4), place)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", SnapshotOnlyWarning)
        reports, _ = train(tmp_path, step, state, last=24)
    if not told:  # a JAX that takes what it has compiled for
        assert reports[24].kind == "window"
        return
    (warned,) = told
    assert "JAX refuses the very call" in str(warned.message)
    assert "`args[0]['codes']`" in str(warned.message)


@needs_refs
def test_an_argument_is_changed_in_place_once_in_each_step(tmp_path):
    @jax.jit
    def step(state, batch, seen):
        seen[...] = 2 * seen[...] + batch
        return update(state, batch)

    seen, alone = jax.new_ref(jnp.float32(0)), 0.0
    reports, _ = train(tmp_path, step, fresh(), seen)
    for label in range(13):
        alone = 2 * alone + label
    assert {reports[n].kind for n in (8, 12)} == {"window"}
    assert float(seen[...]) == alone


@needs_refs
def test_a_state_that_is_changed_in_place_is_trained_without_windows(tmp_path):
    @jax.jit
    def step(state, batch):
        for name, new in update(jax.tree.map(lambda x: x[...], state), batch).items():
            state[name][...] = new
        return jnp.sum(state["m"][...])

    state = jax.tree.map(jax.new_ref, fresh())
    with GoCkptManager(tmp_path) as manager:
        wrapped = manager.wrap(step)
        wrapped(state, jnp.float32(0))
        with pytest.warns(SnapshotOnlyWarning, match="new_ref"):
            wrapped(state, jnp.float32(1))
        wrapped(state, jnp.float32(2))
        manager.save(3, args=GoCkptSave(jax.tree.map(lambda x: x[...], state)))
        manager.wait_until_finished()
        assert_same(manager.restore(3), to_host(jax.tree.map(lambda x: x[...], state)))
