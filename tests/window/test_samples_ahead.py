"""What the audit copies at a seal has been compiled before: the trainer waits for no compiler."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.compiling import Programs
from gockpt_jax.transfer import sample
from gockpt_jax.window import ahead

ADAM = optax.adam(1e-3)
WAYS = {
    "one item": GoCkptSave,
    "two items": lambda state: ocp.args.Composite(
        some=GoCkptSave([state["params"], state["opt"][0].mu]), nu=GoCkptSave(state["opt"][0].nu)
    ),
    "a part": lambda state: GoCkptSave({"params": state["params"], "mu": state["opt"][0].mu}),
}


@jax.jit
def update(state, x):
    def loss(params):
        return sum(jnp.sum(jnp.cos(x * p)) for p in params.values())

    updates, opt = ADAM.update(jax.grad(loss)(state["params"]), state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


@pytest.fixture
def programs(monkeypatch):
    """Those of this test."""
    found = Programs("gockpt-compile-samples", sample._compile)
    monkeypatch.setattr(sample, "_programs", found)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("way", WAYS)
def test_no_save_by_a_window_waits_for_a_compiler(tmp_path, programs, way, devices):
    mesh = jax.make_mesh((devices,), ("a",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("a"))
    params = {f"w{i}": jax.device_put(jnp.ones((16 + 8 * i, 64)), rows) for i in range(10)}
    state, compared = {"params": params, "opt": ADAM.init(params)}, []
    options = ocp.CheckpointManagerOptions(save_interval_steps=6)
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=3)) as manager:
        step = manager.wrap(update)
        for label in range(31):
            state = step(state, jnp.float32(label))
            if step.program is not None and step.program.is_armed:
                step.program.wait_until_ready()
            for thread in threading.enumerate():
                if thread.name == "gockpt-compile-samples":
                    thread.join()
            before = set(programs._found)
            # The first one tells of what it takes that the step has been traced for.
            manager.save(label, args=WAYS[way](state), force=label == 2)
            manager.wait_until_finished()
            if label % 6 == 0 and (report := manager.last_report).kind == "window":
                compared.append(report.audit.chunks)
                assert set(programs._found) == before
    assert len(compared) >= 5
    assert min(compared) >= 10


def test_a_first_save_that_is_announced_does_not_either(tmp_path, programs, monkeypatch):
    """As if it took all in one item; and if it does, no other save has to look."""
    looked, compile_ahead = [], ahead.compile_samples_ahead
    monkeypatch.setattr(
        ahead, "compile_samples_ahead", lambda *args: (looked.append(args), compile_ahead(*args))
    )
    params = {f"w{i}": jnp.ones((16 + 8 * i, 64)) for i in range(10)}
    state = {"params": params, "opt": ADAM.init(params)}
    with GoCkptManager(tmp_path, window=WindowOptions(steps=3)) as manager:
        step = manager.wrap(update)
        for n in range(4):
            state = step(state, jnp.float32(n))
        step.program.wait_until_ready()
        for thread in threading.enumerate():
            if thread.name == "gockpt-compile-samples":
                thread.join()
        before = set(programs._found)
        for label in range(3):
            manager.expect_save(in_steps=4)
            for n in range(4):
                state = step(state, jnp.float32(n))
            manager.save(label, args=GoCkptSave(state))
            manager.wait_until_finished()
            assert manager.last_report.kind == "window"
            assert manager.last_report.audit.chunks > 0
            assert set(programs._found) == before
    assert len(looked) == 1
