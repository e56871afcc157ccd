"""Two wrapped steps in turn: one count of updates, one window at a time."""

from __future__ import annotations

import contextlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from alone import FIRST_ALONE, owned_shards
from window.training_loop import (
    BATCH,
    SIZE,
    TX,
    Options,
    assert_restores,
    assert_same,
    fresh,
    kinds,
    manage,
    to_host,
    update,
)

from gockpt_jax import GoCkptManager, GoCkptSave, SnapshotOnlyWarning, WindowOptions
from gockpt_jax.telemetry import events
from gockpt_jax.training import program as program_module
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.step_cut import cut_step


@pytest.mark.parametrize("host_budget_bytes", [None, 100_000])
def test_a_window_opens_after_another_step_has_donated_the_state(tmp_path, host_budget_bytes):
    """Also when the plan is made: the results that a step last returned are gone by then."""
    window = WindowOptions(steps=3, host_budget_bytes=host_budget_bytes)
    with manage(tmp_path, window, save_interval_steps=6) as manager:
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
        assert kinds(manager) == [(0, "snapshot", 1), *((n, "window", 3) for n in (6, 12, 18))]
        assert_restores(manager, saved)


def test_a_step_of_an_earlier_phase_holds_no_state(tmp_path):
    """It does not donate, and is not called between two saves; later it has windows again."""
    with manage(tmp_path, WindowOptions(steps=3), save_interval_steps=6) as manager:
        first, second = manager.wrap(jax.jit(update.__wrapped__)), manager.wrap(jax.jit(norm_too))
        state, of_first = fresh(), []
        for label in range(37):
            if label < 9 or label > 18:
                state = first(state, BATCH)
            else:
                state, _ = second(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
            if label == 8:
                of_first = [weakref.ref(a) for a in jax.tree.leaves(state)]
            if label == 18:
                manager.wait_until_finished()
                assert not [a.shape for ref in of_first if (a := ref()) is not None]
        manager.wait_until_finished()
        assert kinds(manager) == [(0, "snapshot", 1), *((n, "window", 3) for n in range(6, 37, 6))]


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
    with manage(tmp_path, WindowOptions(steps=4), save_interval_steps=6) as manager:
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
        assert kinds(manager) == [
            (0, "snapshot", 1), (6, "window", 3), (12, "window", steps), (18, "window", 4),
            (24, "window", 4),
        ]  # fmt: skip
        assert all(r.early_bytes > 0 for r in manager.reports if r.kind == "window")
        assert_restores(manager, saved)


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_steps_of_other_cuts_that_take_turns_have_windows_of_two(tmp_path, monkeypatch, steps):
    """Each gives up what the one before it has opened; the one before the save opens its own.

    No other does: it would be given up by the next.
    """
    told = []
    monkeypatch.setattr(jax.monitoring, "record_event", lambda name, **_: told.append(name))
    with manage(tmp_path, WindowOptions(steps=steps), save_interval_steps=6) as manager:
        turns = [manager.wrap(jax.jit(f, donate_argnums=0)) for f in (norm_too, slower_moments)]
        state, saved = jax.tree.map(jnp.array, fresh()), {}
        for label in range(25):
            state, _ = turns[label % 2](state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        assert kinds(manager) == [(0, "snapshot", 1), *((n, "window", 2) for n in (6, 12, 18, 24))]
        assert told.count(events.WINDOW_ABANDONED) <= 4 * ((steps - 1) // 2)
        assert_restores(manager, saved)


@jax.jit
def accumulate(state, batch):
    grads = jax.grad(lambda p: jnp.sum(jnp.cosh(p["w"] + batch)))(state["params"])
    return state | {"sum": jax.tree.map(jnp.add, state["sum"], grads)}


@jax.jit
def apply_sum(state):
    updates, opt = TX.update(state["sum"], state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"opt": opt, "params": params, "sum": jax.tree.map(jnp.zeros_like, params)}


def test_a_window_opens_in_the_call_that_ends_one(tmp_path):
    """Gradients are summed up by one step, and applied by another, right before the save."""
    with manage(tmp_path, WindowOptions(steps=3), save_interval_steps=2) as manager:
        add, apply = manager.wrap(accumulate), manager.wrap(apply_sum)
        state, saved = fresh() | {"sum": {"w": jnp.zeros(SIZE)}}, {}
        for label in range(9):
            for micro in range(3):
                state = add(state, BATCH + micro)
            state = apply(state)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        assert kinds(manager) == [(0, "snapshot", 1), *((n, "window", 2) for n in (2, 4, 6, 8))]
        assert all(r.early_bytes >= 2 * SIZE * 4 for r in manager.reports[1:])
        assert_restores(manager, saved)


def assert_cannot_go_on(manager, why, saved):
    """The window of the second save was abandoned for this reason, the third's was not."""
    manager.wait_until_finished()
    assert [(r.step, r.kind) for r in manager.reports] == [
        (0, "snapshot"), (6, "snapshot"), (12, "window"),
    ]  # fmt: skip
    assert f"abandoned: it cannot go on: {why}" in manager.reports[1].reason
    assert_restores(manager, saved)


@pytest.mark.parametrize("earlier", [(1, 2), ()], ids=["cannot be armed", "not traced yet"])
def test_a_window_ends_with_a_step_that_is_not_armed(tmp_path, monkeypatch, earlier):
    """The window meets it for the first time: nothing waits for its armed step."""
    options, arm = Options(save_interval_steps=6), StepProgram.arm
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=3)) as manager:
        plain = manager.wrap(jax.jit(update.__wrapped__, donate_argnums=0))
        extra = manager.wrap(jax.jit(norm_too, donate_argnums=0))

        def arm_plain(program, **how):
            if program is not plain.program:
                raise RuntimeError("injected")
            arm(program, **how)

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


def momentum(state, batch, log=False):
    """Of batches that may be shorter, and with logs or without: each is a program of its own."""
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(batch @ w)))(state["w"])
    m = 0.9 * state["m"] + grads
    logs = {"norm": jnp.linalg.norm(grads)} if log else {}
    return {"m": m, "w": state["w"] - 0.1 * m}, logs


def equinox_jit(step):
    return pytest.importorskip("equinox").filter_jit(step)


def static_jit(step):
    return jax.jit(step, static_argnames="log", donate_argnums=0)


def rows(n):
    """Of the batch before each label's save: the last of an epoch is shorter."""
    return 3 if n % 6 == 0 else 4


def train_and_save(manager, call, labels):
    state, saved = {"m": jnp.zeros(64), "w": jnp.ones(64)}, {}
    for n in labels:
        state = call(state, n)
        if manager.save(n, args=GoCkptSave(state)):
            saved[n] = to_host(state)
    manager.wait_until_finished()
    assert_restores(manager, saved)
    return {r.step: r for r in manager.reports}


def assert_windows(reports, labels):
    told = {label: (reports[label].kind, reports[label].window_steps) for label in labels}
    assert told == dict.fromkeys(labels, ("window", 4))
    assert all(reports[label].early_bytes for label in labels)


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("jit", [static_jit, equinox_jit])
def test_the_last_batch_of_an_epoch_is_smaller(tmp_path, capsys, jit, arm):
    """And behind it the save: the first windows meet it, all others go on with it."""
    options, window = Options(save_interval_steps=6), WindowOptions(steps=4, arm=arm)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        step = manager.wrap(jit(momentum))

        def call(state, n):
            return step(state, jnp.full((rows(n), 64), 0.1 * n))[0]

        reports = train_and_save(manager, call, range(1, 31))
        manager.explain()
        text = capsys.readouterr().out
        assert_windows(reports, (18, 24, 30))
        assert "float32[4,64] and called with float32[3,64]" in text
        assert "Kinds of calls known by now: 2" in text


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("jit", [static_jit, equinox_jit])
def test_a_step_that_logs_more_now_and_then(tmp_path, jit, arm):
    """By a static argument, so it returns more: in the middle of windows, at their ends, before."""
    options, window = Options(save_interval_steps=6), WindowOptions(steps=4, arm=arm)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        step = manager.wrap(jit(momentum))

        def call(state, n):
            return step(state, jnp.full((4, 64), 0.1 * n), log=n % 4 == 0)[0]

        reports = train_and_save(manager, call, range(1, 43))
        assert_windows(reports, (24, 30, 36, 42))


def test_with_always_a_window_may_begin_with_a_kind_of_call_that_none_has_had(tmp_path, capsys):
    """It is planned for there: it was traced at once, and other calls came between."""
    options, window = Options(save_interval_steps=6), WindowOptions(steps=4, arm="always")
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        step = manager.wrap(static_jit(momentum))

        def call(state, n):
            rows = 3 if n in (2, 10, 16, 22) else 4  # the windows of 12, 18 and 24 begin with it
            return step(state, jnp.full((rows, 64), 0.1 * n))[0]

        assert_windows(train_and_save(manager, call, range(1, 31)), (12, 18, 24, 30))
        manager.explain()
        assert "lost" not in capsys.readouterr().out


def test_batches_of_several_lengths(tmp_path):
    """In any order, as sentences are sorted into: all windows follow, when each was met."""
    lengths = np.random.default_rng(5).integers(2, 6, 200)
    with manage(tmp_path, WindowOptions(steps=4), save_interval_steps=6) as manager:
        step = manager.wrap(static_jit(momentum))

        def call(state, n):
            return step(state, jnp.full((lengths[n], 64), 0.1 * n))[0]

        reports = train_and_save(manager, call, range(1, 121))
        assert_windows(reports, range(78, 121, 6))


@pytest.mark.parametrize("is_other", [lambda n: n % 2 == 0, lambda n: n % 3 == 2])
def test_settings_of_jax_that_change_from_call_to_call(tmp_path, is_other):
    """Each program is armed under its own, if the other's call comes behind every one of its."""
    with manage(tmp_path, WindowOptions(steps=4), save_interval_steps=6) as manager:
        step = manager.wrap(static_jit(momentum))

        def call(state, n):
            with jax.default_matmul_precision("highest" if is_other(n) else "default"):
                return step(state, jnp.full((4, 64), 0.1 * n))[0]

        assert_windows(train_and_save(manager, call, range(1, 31)), (18, 24, 30))


def of_a_number(state, rate):
    m = 0.9 * state["m"] + jnp.tanh(state["w"] * rate)
    return {"m": m, "w": state["w"] - 0.1 * m}


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("at", [7, 8, 9, 10, 11, 12])
def test_windows_come_back_to_a_state_of_other_sizes(tmp_path, arm, at):
    """Whether a window is open then or not: nothing beside the state tells its calls apart."""
    options, window = Options(save_interval_steps=6), WindowOptions(steps=4, arm=arm)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        step = manager.wrap(jax.jit(of_a_number, donate_argnums=0))

        def call(state, n):
            if n == at:
                state = jax.tree.map(lambda x: jnp.concatenate([x, x]), state)
            return step(state, jnp.float32(0.1 * n))

        assert_windows(train_and_save(manager, call, range(1, 25)), (18, 24))


@pytest.mark.parametrize("at", [8, 9, 11])
def test_an_evaluation_between_two_steps_of_a_window_ends_it_and_no_more(tmp_path, monkeypatch, at):
    """It goes through the wrapped step, and returns no state: that is no kind to be armed."""
    options, analysed = Options(save_interval_steps=6), []
    monkeypatch.setattr(
        program_module, "cut_step", lambda *a, **k: analysed.append(a) or cut_step(*a, **k)
    )

    def either(state, batch, train):
        return momentum(state, batch)[0] if train else jnp.sum(batch @ state["w"])

    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=4)) as manager:
        step = manager.wrap(jax.jit(either, static_argnames="train"))

        def call(state, n):
            if n % 12 == at:
                step(state, jnp.full((3, 64), 0.1 * n), train=False)
            return step(state, jnp.full((4, 64), 0.1 * n), train=True)

        reports = train_and_save(manager, call, range(1, 43))
        assert_windows(reports, (18, 30, 42))
        assert len(analysed) == 1


@pytest.mark.parametrize("spec", [(), ("a",), ("a", "b"), (("a", "b"),), (None, "b")])
def test_bytes_of_a_donated_array(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    placed = jax.NamedSharding(mesh, jax.P(*spec))
    for array in (np.ones((8, 4), np.float32), jax.random.split(jax.random.key(0), (8, 2))):
        placed_array = jax.device_put(array, placed)
        source = FIRST_ALONE.source(placed_array)
        want = source.shard_bytes * len(owned_shards(placed_array))
        placed_array.delete()
        assert FIRST_ALONE.source(placed_array).owned_bytes == want


@jax.jit
def update_several(states, batch):
    return {name: update(state, batch) for name, state in states.items()}


def test_members_of_a_population_that_one_function_steps_in_turn(tmp_path):
    """What had left of one is not what the next call goes on from; only the last block's is."""
    with GoCkptManager(tmp_path, window=WindowOptions(steps=3)) as manager:
        step = manager.wrap(update_several)
        members = [{"a": fresh(), "b": fresh()} for _ in range(2)]
        for n in range(8):
            members = [step(member, BATCH) for member in members]
            if n % 2:
                manager.save(n, args=GoCkptSave(members), force=True)
        manager.wait_until_finished()
        report = manager.last_report
        assert (report.kind, report.window_steps) == ("window", 3)
        assert 0 < report.early_bytes < report.state_bytes / 4
        assert "not what the step before returned" in report.late_leaves[0]
        assert_same(manager.restore(7), to_host(members))
