"""A step whose result changes in mid-run: another state, or other metrics before the state."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from window.training_loop import Options, assert_restores, assert_same, to_host

from gockpt_jax import GoCkptManager, GoCkptRestore, GoCkptSave, WindowOptions

SIZE = 64


def fresh(names):
    return {name: (jnp.zeros(SIZE), jnp.ones(SIZE)) for name in names}


def make_step():
    @functools.partial(jax.jit, static_argnames="log", donate_argnums=0)
    def step(state, batch, log=False):
        """Momentum; metrics come before the state, as JAX sorts names."""
        new, norms = {}, {}
        for name, (m, w) in state.items():
            grad = jnp.sin(w + batch)
            norms[name] = jnp.sum(grad)
            m = 0.9 * m + grad
            new[name] = (m, w - 0.1 * m)
        return {"logs": norms if log else {}, "state": new}

    return step


def train(step, change, log, save=lambda n, state: None):
    """The structure changes at update 8; metrics are returned at some."""
    state = fresh("abc")
    for n in range(33):
        if n == 8 and change is not None:
            state = {k: state[k] if k in state else fresh(k)[k] for k in change}
        state = step(state, jnp.linspace(-1.0, 1.0, SIZE) * n, log=log(n))["state"]
        save(n, state)
    return state


def saving_by(manager, saved):
    """What a loop calls after each step; notes what was accepted."""

    def save(n, state):
        if manager.save(n, args=GoCkptSave(state)):
            saved[n] = to_host(state)

    return save


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize(
    ("change", "log"),
    [
        ("ab", lambda n: False),  # a head is dropped, an adapter merged: as many leaves less
        ("abcd", lambda n: False),
        (None, lambda n: n < 9),
        (None, lambda n: n >= 9),
        (None, lambda n: n % 8 != 5),
        (None, lambda n: n % 8 == 5),
    ],
)
def test_training_goes_on(tmp_path, arm, change, log):
    """The call before a window may have returned what the traced program does not."""
    saved = {}
    options, window = Options(save_interval_steps=8), WindowOptions(steps=4, arm=arm)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        state = train(manager.wrap(make_step()), change, log, saving_by(manager, saved))
        manager.wait_until_finished()
        assert_same(to_host(state), to_host(train(make_step(), change, log)))
        assert sorted(saved) == [0, 8, 16, 24, 32]
        assert_restores(manager, saved)
        assert manager.last_report.kind == "window"


def test_one_odd_call_inside_a_window_counts_once(tmp_path, capsys):
    """It is refused as a call, and what it has returned is met once more before the next one."""
    programs = []
    options, window = Options(save_interval_steps=8), WindowOptions(steps=4)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        step = manager.wrap(make_step())

        def save(n, state):
            manager.save(n, args=GoCkptSave(state))
            programs.append(step.program)

        train(step, None, lambda n: n == 14, save)
        assert programs[13] is programs[15] is programs[-1]
        assert len({id(program) for program in programs[2:]}) == 2  # it is a kind of its own
        manager.explain()
        assert "\n1 window was lost to calls" in capsys.readouterr().out
        assert [r.kind for r in manager.reports if r.step in (8, 16, 24)] == ["window"] * 3


@pytest.mark.parametrize("arm", ["window", "always"])
def test_a_state_may_come_out_in_another_container(tmp_path, arm):
    """As NNX modules do that go through plain `jax.jit`: the loop puts the arrays back itself."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        (m, w), count = state
        grad = jnp.sin(w + batch)
        m = 0.9 * m + grad
        return {"count": count + 1, "loss": jnp.sum(grad), "w": w - 0.1 * m, "z": m}

    def train(step, save=lambda n, state: None):
        state = ((jnp.zeros(SIZE), jnp.ones(SIZE)), jnp.int32(0))
        for n in range(25):
            new = step(state, jnp.linspace(-1.0, 1.0, SIZE) * n)
            state = ((new["z"], new["w"]), new["count"])
            save(n, state)
        return state

    saved = {}
    options, window = Options(save_interval_steps=8), WindowOptions(steps=4, arm=arm)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        state = train(manager.wrap(step), saving_by(manager, saved))
        manager.wait_until_finished()
        assert_same(to_host(state), to_host(train(step)))
        kinds = [(r.step, r.kind, r.early_bytes > 0) for r in manager.reports]
        assert kinds == [(0, "snapshot", False), *((n, "window", True) for n in (8, 16, 24))]
        for label, want in saved.items():
            assert_same(manager.restore(label, args=GoCkptRestore(state)), want)


@pytest.mark.parametrize("arm", ["window", "always"])
def test_windows_come_back_after_a_batch_of_another_structure(tmp_path, arm):
    """The state is as ever, so a window opens; only the call in it tells that it is another."""
    options, window = Options(save_interval_steps=4), WindowOptions(steps=3, arm=arm)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        step = manager.wrap(plain_steps())
        state = {"m": jnp.zeros(SIZE), "w": jnp.ones(SIZE)}
        for n in range(25):
            batch = jnp.full(SIZE, 0.5)
            state = step(state, {"x": batch} if n < 6 else {"x": batch, "y": batch})
            manager.save(n, args=GoCkptSave(state))
        manager.wait_until_finished()
        assert_same(manager.restore(24), to_host(state))
        assert [r.kind for r in manager.reports[-2:]] == ["window"] * 2


def plain_steps():
    @functools.partial(jax.jit, static_argnames="train")
    def step(state, batch, train=True):
        batch = sum(jax.tree.leaves(batch))
        if not train:
            return jnp.sum(jnp.sin(state["w"] + batch))
        m = 0.9 * state["m"] + jnp.sin(state["w"] + batch)
        return {"m": m, "w": state["w"] - 0.1 * m}

    return step


def nested_steps():
    """The same, where the jitted function lies inside an object."""
    eqx = pytest.importorskip("equinox")
    return eqx.filter_jit(plain_steps().__wrapped__)


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("make", [plain_steps, nested_steps])
@pytest.mark.parametrize("batches", [1, 2, 5])
def test_an_evaluation_through_the_wrapped_step(tmp_path, make, batches, arm):
    """It returns no state: an error at the second call of a run, and never in its middle."""
    saved, step, same_step = {}, make(), make()
    options, window = Options(save_interval_steps=4), WindowOptions(steps=4, arm=arm)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        wrapped = manager.wrap(step)
        state = alone = {"m": jnp.zeros(SIZE), "w": jnp.ones(SIZE)}
        for n in range(33):
            batch = jnp.linspace(-1.0, 1.0, SIZE) * n
            state, alone = wrapped(state, batch), same_step(alone, batch)
            if manager.save(n, args=GoCkptSave(state)):
                saved[n] = to_host(state)
            if n % 8 == 6:
                for _ in range(batches):
                    assert wrapped(state, batch, train=False) == same_step(
                        alone, batch, train=False
                    )
        manager.wait_until_finished()
        assert_same(to_host(state), to_host(alone))
        assert_restores(manager, saved)
        assert [r.kind for r in manager.reports].count("window") >= 4


def test_an_evaluation_before_the_step_is_planned_for(tmp_path):
    """It was traced, and then JAX looked for NaNs; what is planned for is a training step's."""
    options, window = Options(save_interval_steps=4), WindowOptions(steps=3)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        step = manager.wrap(plain_steps())
        state = {"m": jnp.zeros(SIZE), "w": jnp.ones(SIZE)}
        for n in range(13):
            state = step(state, 1.0 * n)
            if n == 1:
                assert step.program is not None
                with jax.debug_nans(True):
                    step(state, 1.0, train=False)
                manager.expect_save(in_steps=2)  # so a window were to open now
            manager.save(n, args=GoCkptSave(state))
        manager.wait_until_finished()
        assert_same(manager.restore(12), to_host(state))
        assert manager.last_report.kind == "window"


def reporting(*, inside):
    """Metrics in a dict of a dict, behind the state or around it."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        grad = jnp.sin(state["w"] + batch)
        m = 0.9 * state["m"] + grad
        new, metrics = {"m": m, "w": state["w"] - 0.1 * m}, {"scalar": {"norm": jnp.sum(grad)}}
        return {"metrics": metrics, "state": new} if inside else (new, metrics)

    return step


def adds_to_metrics(result, n):
    """As MaxText does."""
    state, metrics = result
    metrics["scalar"] |= {"perf/step": n, "perf/step_time_seconds": 0.1}
    return state


def takes_the_state_out(result, n):
    state = result.pop("state")
    result["perf"] = {"step": n}
    return state


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("is_saved_first", [True, False])
@pytest.mark.parametrize("change", [adds_to_metrics, takes_the_state_out])
def test_the_loop_may_change_what_it_was_given(tmp_path, change, is_saved_first, arm):
    """A result whose dicts have changed is not the one of another program."""
    step = reporting(inside=change is takes_the_state_out)
    state = {"m": jnp.zeros(SIZE), "w": jnp.ones(SIZE)}
    options, window = Options(save_interval_steps=4), WindowOptions(steps=3, arm=arm)
    saved = {}
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        wrapped = manager.wrap(step)
        for n in range(17):
            result = wrapped(state, jnp.linspace(-1.0, 1.0, SIZE) * n)
            state = change(result, n) if not is_saved_first else _state_of(result)
            if manager.save(n, args=GoCkptSave(state)):
                saved[n] = to_host(state)
            if is_saved_first:
                change(result, n)
        manager.wait_until_finished()
        assert [(r.step, r.kind) for r in manager.reports] == [
            (0, "snapshot"), *((n, "window") for n in (4, 8, 12, 16))
        ]  # fmt: skip
        assert_restores(manager, saved)


def _state_of(result):
    return result["state"] if isinstance(result, dict) else result[0]
