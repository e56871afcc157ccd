"""Invariant 1: a run with windows is the user's run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from programs import PROGRAMS
from programs.cases import CASES

import gockpt_jax as gockpt

from . import harness

# (program, devices) -> the cause of what differs. Nothing does, on the CPU backend without FMA.
EXCEPTIONS: dict[tuple[str, int], str] = {}
ALLOWED = 5e-7

OUTSIDE_WINDOWS = [
    n
    for n in range(max(harness.SAVES))
    if not any(version - steps < n < version for version, steps in harness.SAVES.items())
]

every_case = pytest.mark.parametrize(("name", "devices"), CASES)


def open_manager(directory: Path, **window: Any) -> gockpt.GoCkptManager:
    return gockpt.GoCkptManager(
        directory,
        options=ocp.CheckpointManagerOptions(max_to_keep=None),
        window=gockpt.WindowOptions(**window),
    )


@every_case
def test_state_is_that_of_a_plain_run(name: str, devices: int, shared: Path) -> None:
    found = harness.outcome(name, devices, shared).differing
    if (name, devices) not in EXCEPTIONS:
        assert found == {}
    else:
        assert found, "it does not differ any more: take it off the list"
        worst = max(found, key=lambda path: found[path][2])
        assert found[worst][2] <= ALLOWED, (worst, found[worst])


@every_case
def test_outside_windows_the_users_executable_gets_the_users_arguments(
    name: str, devices: int, shared: Path
) -> None:
    outcome = harness.outcome(name, devices, shared)
    assert outcome.own_calls == OUTSIDE_WINDOWS
    assert outcome.changed_arguments == []


@every_case
def test_tree_keeps_its_structure_and_nothing_is_traced_again(
    name: str, devices: int, shared: Path
) -> None:
    outcome = harness.outcome(name, devices, shared)
    assert outcome.structures == 1
    assert outcome.plain_traces > 0, "nothing would be found in the cache: it would prove nothing"
    assert outcome.traces == 0


# How often the user's Python runs: counted in the function itself.

TX = optax.adam(1e-2)


def count_runs(run: Callable[[Any], Any], **jit: Any) -> int:
    """How often the function under a fresh jit runs while `run` loops over it."""
    ran = []

    def step(state: Any, batch: Any, train: bool = True) -> Any:
        ran.append(train)
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.square(batch @ p["w"]).mean())(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jnp.float32(0)

    run(jax.jit(step, **jit))
    return len(ran)


def new_state() -> Any:
    params = {"w": jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)}
    return params, TX.init(params)


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("jit", [{}, {"donate_argnums": 0}, {"static_argnums": 2}], ids=str)
@pytest.mark.parametrize("rows", [(4,) * 12, (4,) * 6 + (5,) * 6], ids=["same", "two shapes"])
def test_users_python_runs_as_often_as_without_us(
    arm: str, jit: dict[str, Any], rows: tuple[int, ...], tmp_path: Path
) -> None:
    extra = (True,) if "static_argnums" in jit else ()

    def loop(step: Any, save: Callable[[int, Any], None]) -> None:
        state = new_state()
        for n, count in enumerate(rows):
            state, _ = step(state, jnp.full((count, 8), n + 1.0), *extra)
            save(n, state)

    def with_windows(step: Any) -> None:
        with open_manager(tmp_path, steps=3, arm=arm) as manager:
            manager.expect_save(in_steps=5)

            def save(n: int, state: Any) -> None:
                if n in (4, 10):
                    manager.save(n, args=gockpt.GoCkptSave(state))
                    manager.expect_save(in_steps=6)

            loop(manager.wrap(step), save)
            manager.wait_until_finished()
            assert manager.reports[0].kind == "window"
            is_new = arm == "window" and len(set(rows)) > 1  # the other shape is met inside it
            assert manager.reports[1].window_steps == (2 if is_new else 3)

    alone = count_runs(lambda step: loop(step, lambda n, state: None), **jit)
    assert count_runs(with_windows, **jit) == alone == len(set(rows))


# What passes through.


def jitted_step() -> Any:
    def step(state: Any, batch: Any) -> Any:
        """The user's words."""
        return jax.tree.map(lambda x: x * 0.5 + batch, state)

    return jax.jit(step)


def test_the_jitted_functions_own_attributes_are_forwarded(tmp_path: Path) -> None:
    step, state, batch = jitted_step(), {"w": jnp.ones((4, 3))}, jnp.float32(1)
    with open_manager(tmp_path) as manager:
        wrapped = manager.wrap(step)
        assert wrapped.__wrapped__ is step.__wrapped__
        assert (wrapped.__name__, wrapped.__doc__) == (step.__name__, step.__doc__)
        assert wrapped.lower(state, batch).as_text() == step.lower(state, batch).as_text()
        assert str(wrapped.trace(state, batch).jaxpr) == str(step.trace(state, batch).jaxpr)
        assert wrapped.eval_shape(state, batch) == step.eval_shape(state, batch)
        wrapped.clear_cache()
        assert wrapped._cache_size() == 0
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = wrapped.no_such_thing


@harness.on_both("dict_state")
def test_abstract_calls_are_not_updates(name: str, devices: int, tmp_path: Path) -> None:
    """Were one counted, the save would come at another version than the expected one."""
    job = PROGRAMS[name].build(devices)
    state = job.state
    with open_manager(tmp_path, steps=3) as manager:
        wrapped = manager.wrap(job.step, **job.wrap_kwargs)
        manager.expect_save(in_steps=6)
        for n in range(6):
            shapes = jax.eval_shape(lambda s, n=n: job.advance(wrapped, s, n), state)
            assert shapes["step"].shape == ()
            job.advance(wrapped.eval_shape, state, n)
            if n == 4:  # the window is open
                inside = jax.jit(lambda s: job.advance(wrapped, s, 4))(state)
                assert int(inside["step"]) == n + 1
            state = job.advance(wrapped, state, n)
            assert int(state["step"]) == n + 1
        manager.save(6, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        (report,) = manager.reports
    assert (report.kind, report.window_steps) == ("window", 3)
    assert not harness.differing(
        harness.restore_with_stock(tmp_path, 6, state), harness.to_host(state)
    )


@harness.on_both("clip_adamw")
def test_always_armed_run_is_the_plain_run_too(name: str, devices: int, tmp_path: Path) -> None:
    spied = harness.Spied(PROGRAMS[name].build(devices).step)
    job = PROGRAMS[name].build(devices)
    state = job.state
    with open_manager(tmp_path, steps=4, arm="always") as manager:
        wrapped = manager.wrap(spied)
        manager.expect_save(in_steps=6)
        for n in range(10):
            state = job.advance(wrapped, state, n)
            if n == 5:
                saved = harness.to_host(state)
                manager.save(n, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        (report,) = manager.reports
    assert spied.calls == []
    assert (report.kind, report.window_steps) == ("window", 4)
    assert not harness.differing(harness.restore_with_stock(tmp_path, 5, state), saved)
    plain = PROGRAMS[name].build(devices).state
    for n in range(10):
        plain = job.advance(job.step, plain, n)
    assert not harness.differing(harness.to_host(state), harness.to_host(plain))


def test_a_step_that_changes_would_be_noticed() -> None:
    """The comparison itself: one bit of one element."""
    want = {"w": np.ones((3, 2), np.float32), "n": np.int32(3)}
    got = {k: v.copy() for k, v in want.items()}
    assert harness.differing(got, want) == []
    got["w"].view(np.uint32)[1, 1] ^= 1
    assert harness.differing(got, want) == ["w"]
    count, size, worst = harness.measure_difference(got["w"], want["w"])
    assert (count, size) == (1, 6)
    assert 0 < worst <= ALLOWED
