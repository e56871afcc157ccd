"""Two wrapped steps in turn: one count of updates, one window at a time."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import FIRST_ALONE
from window.training_loop import BATCH, Options, assert_same, fresh, to_host, update

from gockpt_jax import GoCkptManager, GoCkptSave, SnapshotOnlyWarning, WindowOptions
from gockpt_jax.training.program import StepProgram


@pytest.mark.parametrize("host_budget_bytes", [None, 100_000])
def test_a_window_opens_after_another_step_has_donated_the_state(tmp_path, host_budget_bytes):
    """Also when the plan is made: the results that a step last returned are gone by then."""
    window = WindowOptions(steps=3, host_budget_bytes=host_budget_bytes)
    options = Options(save_interval_steps=6)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        plain = manager.wrap(jax.jit(update.__wrapped__, donate_argnums=0))
        extra = manager.wrap(jax.jit(norm_too, donate_argnums=0))
        state, saved = jax.tree.map(jnp.array, fresh()), {}
        for label in range(19):
            if label % 6 in (3, 4):  # a window opens right after these
                state, _ = extra(state, BATCH)
            else:
                state = plain(state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        kinds = [(r.step, r.kind, r.window_steps) for r in manager.reports]
        assert kinds == [(0, "snapshot", 1), *((n, "window", 3) for n in (6, 12, 18))]
        for label, state in saved.items():
            assert_same(manager.restore(label), state)


def norm_too(state, batch):
    return update(state, batch), jnp.linalg.norm(batch)


def weight_decay_too(state, batch):
    new = update(state, batch)
    return new | {"params": {"w": 0.5 * new["params"]["w"]}}, None


def slower_moments(state, batch):
    """Not the recipe of `update`: the moments that have left could not be brought on."""
    new = update(state, batch)
    moments = jax.tree.map(lambda a, b: 0.5 * (a + b), new["opt"][0].mu, state["opt"][0].mu)
    return new | {"opt": (new["opt"][0]._replace(mu=moments), *new["opt"][1:])}, None


@pytest.mark.parametrize(
    ("other", "steps"), [(norm_too, 4), (weight_decay_too, 4), (slower_moments, 2)]
)
def test_a_window_goes_on_with_a_step_of_the_same_cut(tmp_path, other, steps):
    """With any other step it is given up, and what is left of the way is a shorter one."""
    options = Options(save_interval_steps=6)
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=4)) as manager:
        plain = manager.wrap(jax.jit(update.__wrapped__, donate_argnums=0))
        extra = manager.wrap(jax.jit(other, donate_argnums=0))
        state, saved = jax.tree.map(jnp.array, fresh()), {}
        for label in range(25):
            if label in (1, 2, 3, 11, 16, 17, 18):  # the middle, the end
                state, _ = extra(state, BATCH)
            else:
                state = plain(state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        kinds = [(r.step, r.kind, r.window_steps) for r in manager.reports]
        assert kinds == [
            (0, "snapshot", 1), (6, "window", 3), (12, "window", steps), (18, "window", 4),
            (24, "window", 4),
        ]  # fmt: skip
        assert all(r.early_bytes > 0 for r in manager.reports if r.kind == "window")
        for label, state in saved.items():
            assert_same(manager.restore(label), state)


def assert_cannot_go_on(manager, why, saved):
    """The window of the second save was abandoned for this reason, the third's was not."""
    manager.wait_until_finished()
    assert [(r.step, r.kind) for r in manager.reports] == [
        (0, "snapshot"), (6, "snapshot"), (12, "window"),
    ]  # fmt: skip
    assert f"abandoned: it cannot go on: {why}" in manager.reports[1].reason
    for label, state in saved.items():
        assert_same(manager.restore(label), state)


@pytest.mark.parametrize("earlier", [(1, 2), ()], ids=["cannot be armed", "not traced yet"])
def test_a_window_ends_with_a_step_that_is_not_armed(tmp_path, monkeypatch, earlier):
    """The window meets it for the first time: nothing waits for its armed step."""
    options, arm = Options(save_interval_steps=6), StepProgram.arm
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=3)) as manager:
        plain = manager.wrap(jax.jit(update.__wrapped__, donate_argnums=0))
        extra = manager.wrap(jax.jit(norm_too, donate_argnums=0))

        def arm_plain(program):
            if program is not plain.program:
                raise RuntimeError("injected")
            arm(program)

        monkeypatch.setattr(StepProgram, "arm", arm_plain)
        state, saved = jax.tree.map(jnp.array, fresh()), {}
        for label in range(13):
            if label == 6:
                assert manager.window_status == "window 2/3"
                warns = pytest.warns(SnapshotOnlyWarning, match="injected")
                with warns if earlier else contextlib.nullcontext():
                    state, _ = extra(state, BATCH)
            elif label in earlier:
                state, _ = extra(state, BATCH)
            else:
                state = plain(state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        why = "the step had not been traced yet" if not earlier else "the step has not been armed"
        assert_cannot_go_on(manager, why, saved)


def test_a_window_ends_with_a_step_whose_armed_one_is_not_ready(tmp_path, monkeypatch):
    """Nothing waits for its compilation, nor calls it if that has failed."""
    options, why_not = Options(save_interval_steps=6), "the armed step did not compile"
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=3)) as manager:
        plain = manager.wrap(jax.jit(update.__wrapped__, donate_argnums=0))
        extra = manager.wrap(jax.jit(norm_too, donate_argnums=0))
        state, saved = jax.tree.map(jnp.array, fresh()), {}
        monkeypatch.setattr(
            StepProgram, "why_not_ready", lambda p: why_not if p is extra.program else None
        )
        for label in range(13):
            if label in (1, 2, 6):
                state, _ = extra(state, BATCH)
            else:
                state = plain(state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        assert_cannot_go_on(manager, why_not, saved)


def momentum(state, batch):
    """Of batches that may be shorter: each length is a program of its own."""
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(batch @ w)))(state["w"])
    m = 0.9 * state["m"] + grads
    return {"m": m, "w": state["w"] - 0.1 * m}


def equinox_jit(step):
    return pytest.importorskip("equinox").filter_jit(step)


@pytest.mark.parametrize("jit", [jax.jit, equinox_jit])
@pytest.mark.parametrize("wraps", [1, 2])
def test_the_last_batch_of_an_epoch_is_smaller(tmp_path, capsys, jit, wraps):
    """And behind it the save. One step loses its windows there, and says so; two have them."""
    options = Options(save_interval_steps=6)
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=4)) as manager:
        step = jit(momentum)
        full = last = manager.wrap(step)
        if wraps == 2:
            last = manager.wrap(step)
        state, saved = {"m": jnp.zeros(64), "w": jnp.ones(64)}, {}
        for n in range(1, 31):
            ends = n % 6 == 0
            state = (last if ends else full)(state, jnp.full((3 if ends else 4, 64), 0.1 * n))
            if manager.save(n, args=GoCkptSave(state)):
                saved[n] = to_host(state)
        manager.wait_until_finished()
        manager.explain()
        text, reports = capsys.readouterr().out, {r.step: r for r in manager.reports}
        for label, want in saved.items():
            assert_same(manager.restore(label), want)
        kinds = [reports[label].kind for label in (18, 24, 30)]
        if wraps == 2:
            assert kinds == ["window"] * 3
            assert "lost" not in text
        else:
            assert kinds == ["snapshot"] * 3
            assert "float32[4,64] and called with float32[3,64]" in reports[30].reason
            assert "5 windows were lost to calls that the program was not made for (of" in text
            assert text.endswith("wrap the step once for each kind.\n")


@pytest.mark.parametrize("spec", [(), ("a",), ("a", "b"), (("a", "b"),), (None, "b")])
def test_bytes_of_a_donated_array(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    placed = jax.NamedSharding(mesh, jax.P(*spec))
    for array in (np.ones((8, 4), np.float32), jax.random.split(jax.random.key(0), (8, 2))):
        placed_array = jax.device_put(array, placed)
        want = FIRST_ALONE.owned_bytes(placed_array)
        placed_array.delete()
        assert FIRST_ALONE.owned_bytes_at_most(placed_array) == want
