"""Which saves are windows, which are snapshots, and what their reports tell."""

from __future__ import annotations

import itertools
import logging
import re
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from window.training_loop import (
    BATCH,
    SIZE,
    STATE_BYTES,
    Options,
    assert_restores,
    assert_same,
    fresh,
    kinds,
    manage,
    to_host,
    train,
    update,
)

from gockpt_jax import (
    GoCkptManager,
    GoCkptRestore,
    GoCkptSave,
    HostBudgetError,
    SnapshotOnlyWarning,
    WindowOptions,
)
from gockpt_jax.replay.programs import PIECE_SIZES
from gockpt_jax.telemetry import events
from gockpt_jax.training.program import StepProgram
from gockpt_jax.window import ahead, device_budget, planner, session


@pytest.mark.parametrize(("interval", "steps"), [(5, 3), (12, 10)])
def test_fixed_steps_make_every_predictable_save_a_window(tmp_path, interval, steps):
    """Of more steps, too, than the planner may choose."""
    with manage(tmp_path, WindowOptions(steps=steps), save_interval_steps=interval) as manager:
        saved = train(manager, range(2 * interval + 1))
        assert kinds(manager) == [
            (0, "snapshot", 1), (interval, "window", steps), (2 * interval, "window", steps),
        ]  # fmt: skip
        assert "not predicted" in manager.reports[0].reason
        assert "it is the first of this run" in manager.reports[0].reason
        assert all(f"`steps={steps}`" in r.reason for r in manager.reports[1:])
        assert_restores(manager, saved)


@pytest.mark.parametrize(
    ("window", "reason"),
    [({"steps": 1}, "`steps=1`"), ({"max_steps": 1}, "one device copy of the state fits")],
    ids=str,
)
def test_foreseen_saves_of_one_step_say_so(tmp_path, window, reason):
    """They were told not to have been predicted, whatever `explain` said."""
    with manage(tmp_path, WindowOptions(**window), save_interval_steps=5) as manager:
        train(manager, range(11))
        assert kinds(manager) == [(n, "snapshot", 1) for n in (0, 5, 10)]
        assert all(r.reason.startswith(reason) for r in manager.reports[1:])


def _loops(state, batch):
    """Five updates in one call."""
    return jax.lax.scan(lambda s, _: (update(s, batch), None), state, length=5)[0]


@pytest.mark.parametrize(
    ("make", "reason", "told"),
    [
        (lambda: update.lower(fresh(), BATCH).compile(), "a `Compiled` has no program", 0),
        (lambda: jax.jit(_loops), "no leaf may leave early .* comes out of a loop", 1),
    ],
    ids=["unarmable", "all late"],
)
@pytest.mark.filterwarnings("ignore:.*cannot be armed")
def test_where_no_save_can_be_a_window_none_is_asked_to_be_announced(tmp_path, make, reason, told):
    """The loop decides, so that the first two are not foreseen. A plan is made behind one call."""
    with GoCkptManager(tmp_path, window=WindowOptions(steps=3)) as manager:
        step, state = manager.wrap(make()), fresh()
        for n in range(13):
            state = step(state, BATCH)
            if n in (0, 4, 12):
                manager.save(n, args=GoCkptSave(state))
    reasons = [r.reason for r in manager.reports]
    assert len(reasons) == 3
    assert all("expect_save" in reason for reason in reasons[:told])
    assert all(re.match(reason, why) for why in reasons[told:]), reasons


def test_a_state_that_has_grown_inside_a_window_is_traced_anew(tmp_path, caplog):
    """Its leaf is named, and nothing is said of programs that are none of the user's."""
    window = WindowOptions(steps=3)
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=5), window=window) as manager:
        step, state, saved = manager.wrap(update), fresh(), {}
        with caplog.at_level(logging.DEBUG, "gockpt_jax"):
            for label in range(16):
                if label == 9:
                    state = jax.tree.map(lambda x: jnp.stack([x, x]) if x.ndim else x, state)
                state = step(state, BATCH)
                if manager.save(label, args=GoCkptSave(state)):
                    saved[label] = to_host(state)
        manager.wait_until_finished()
        assert kinds(manager)[1:] == [(5, "window", 3), (10, "window", 2), (15, "window", 3)]
        assert f"of its state is float32[2,{SIZE}], where it was float32[{SIZE}]" in caplog.text
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert_restores(manager, saved)


def test_window_is_no_longer_than_the_saves_are_apart(tmp_path):
    with manage(tmp_path, WindowOptions(steps=8), save_interval_steps=3) as manager:
        saved = train(manager, range(10))
        assert kinds(manager)[2:] == [(6, "window", 3), (9, "window", 3)]
        assert_restores(manager, saved)


@pytest.mark.parametrize(
    ("budget", "kind", "reason"),
    [
        (None, "snapshot", "one device copy of the state fits"),
        (STATE_BYTES, "snapshot", "one device copy of the state fits"),
        (STATE_BYTES - 5, "snapshot", "no window of at most 8 steps fits"),
        (1, "snapshot", "no window of at most 8 steps fits"),
    ],
)
def test_planned_saves_tell_why(tmp_path, budget, kind, reason):
    """One leaf cannot be spread, and beside its moments its gradient must fit."""
    window = WindowOptions(device_budget_bytes=budget)
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=5), window=window) as manager:
        train(manager, range(16))
        assert [r.kind for r in manager.reports] == [kind] * 4
        assert reason in manager.last_report.reason


def test_peaks_are_those_of_the_save_itself(tmp_path):
    with GoCkptManager(tmp_path) as manager:
        for step, size in enumerate((4096, 16)):
            manager.save(step, args=GoCkptSave({"w": jnp.ones(size)}))
            manager.wait_until_finished()
        large, small = manager.reports
        assert large.peak_device_bytes >= 4096 * 4 > small.peak_device_bytes > 0
        assert large.peak_host_bytes >= 4096 * 4 > small.peak_host_bytes > 0


def test_peaks_of_a_window_are_measured_from_its_opening_on(tmp_path):
    with GoCkptManager(tmp_path, window=WindowOptions(steps=2)) as manager:
        resources = manager._gockpt_session.resources
        step, state = manager.wrap(update), fresh()
        for _ in range(3):
            state = step(state, BATCH)
        for budget in (resources.host, resources.device):
            budget.add(10**9)
            budget.release(10**9)
        manager.expect_save(in_steps=1)
        state = step(state, BATCH)
        manager.save(0, args=GoCkptSave(state))
        manager.wait_until_finished()
        report = manager.last_report
        assert report.kind == "window"
        assert STATE_BYTES <= report.peak_host_bytes < 10**9
        assert 0 < report.peak_device_bytes < 10**9


def test_what_a_window_takes_of_its_steps_is_told_with_its_stall(tmp_path, monkeypatch):
    """Before and behind each of two, by a clock that goes on by a second when it is looked at."""
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)
    with GoCkptManager(tmp_path, window=WindowOptions(steps=3)) as manager:
        step, state = manager.wrap(update), fresh()
        for _ in range(3):
            state = step(state, BATCH)
        manager.expect_save(in_steps=2)
        with monkeypatch.context() as patch:
            patch.setattr(session, "time", clock)
            for _ in range(2):
                state = step(state, BATCH)
        window = manager._gockpt_session._current.window
        assert window.record.stall_secs == 4
        manager.save(0, args=GoCkptSave(state))
        manager.wait_until_finished()
        assert manager.last_report.kind == "window"
        assert manager.last_report.stall_secs > 4


@jax.jit
def adapter_update(state, batch):
    """Adam on four leaves beside eight frozen ones, as in fine-tuning with adapters."""
    g = {k: jnp.sin(w + batch) for k, w in state["w"].items()}
    m = {k: 0.9 * x + 0.1 * g[k] for k, x in state["m"].items()}
    v = {k: 0.99 * x + 0.01 * (g[k] * g[k]) for k, x in state["v"].items()}
    w = {k: x - 0.01 * m[k] / (jnp.sqrt(v[k]) + 1e-8) for k, x in state["w"].items()}
    return state | {"m": m, "v": v, "w": w}


def adapters():
    sizes = {"frozen": 8, "m": 4, "v": 4, "w": 4}
    return {k: {str(i): jnp.full(SIZE, 0.5) for i in range(n)} for k, n in sizes.items()}


@pytest.mark.parametrize(("leaves", "steps"), [(20, 1), (19, 3), (12, 3), (11, 4), (10, 5), (8, 1)])
def test_planner_takes_the_fewest_steps_that_keep_the_budget(tmp_path, leaves, steps):
    """Of 20 leaves 16 may leave early, what is frozen first; an armed step retains 4."""
    budget = leaves * SIZE * 4
    window = WindowOptions(device_budget_bytes=budget)
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=5), window=window) as manager:
        step, state = manager.wrap(adapter_update), adapters()
        for label in range(16):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
            wait_for_compilation(step)
        manager.wait_until_finished()
        report = manager.last_report
        assert (report.kind, report.window_steps) == ("snapshot" if steps == 1 else "window", steps)
        assert report.peak_device_bytes <= budget
        assert_same(manager.restore(15), state)


@pytest.mark.parametrize(
    ("leaves", "is_late", "told"),
    [(1.5, True, True), (3.5, True, False), (1.5, False, False), (0.5, False, False)],
    ids=["all late", "a copy fits", "early", "early, and no room for a window"],
)
def test_saves_that_no_window_could_help_are_told_of_once(tmp_path, caplog, leaves, is_late, told):
    """Of three leaves, of which two are moments; late are those that a division has made."""

    @jax.jit
    def step(state, batch):
        last = {k: v / 1.01 for k, v in state.items()}
        m, g = state["m"], jnp.cosh(state["w"] + batch)
        moments = {"m": 0.75 * m + 0.25 * g, "v": 0.75 * state["v"] + 0.25 * (g * g)}
        return last if is_late else last | moments

    window = WindowOptions(device_budget_bytes=int(leaves * SIZE * 4))
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=4), window=window) as manager:
        step, state = manager.wrap(step), {k: jnp.full(SIZE, 0.5) for k in "mvw"}
        for label in range(13):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
        manager.wait_until_finished()
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(found) == told
    assert all("a copy of the state's 768 B does not fit, and only 0% may" in f for f in found)


def test_windows_that_help_little_are_told_of_once(tmp_path, caplog):
    """The larger part is late, as under Muon or SOAP: the window is right, and gains little."""

    @jax.jit
    def step(state, batch):
        g = jnp.cosh(state["w"][:SIZE] + batch)
        moments = {"m": 0.75 * state["m"] + 0.25 * g, "v": 0.75 * state["v"] + 0.25 * (g * g)}
        return {"w": state["w"] / 1.01} | moments

    window = WindowOptions(device_budget_bytes=41 * SIZE * 4)
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=4), window=window) as manager:
        step, state = manager.wrap(step), {"w": jnp.full(40 * SIZE, 0.5)}
        state |= {k: jnp.full(SIZE, 0.5) for k in "mv"}
        for label in range(13):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
            wait_for_compilation(step)
        manager.wait_until_finished()
        assert manager.last_report.kind == "window"
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "does not fit, and only 5% may leave early" in told


def test_two_saves_of_one_version_take_nothing_from_the_next_window(tmp_path):
    """It opens in the very next call, with what the step has returned last."""
    with GoCkptManager(tmp_path, window=WindowOptions(steps=3)) as manager:
        step, state = manager.wrap(update), fresh()
        for n in range(1, 14):
            state = step(state, BATCH)
            if n % 3 == 1:
                manager.save(10 * n, args=GoCkptSave(state), force=True)
                manager.save(10 * n + 1, args=GoCkptSave(state), force=True)
                manager.expect_save(in_steps=3)
        manager.wait_until_finished()
        firsts = [kind for kind in kinds(manager) if kind[0] % 10 == 0]
        assert firsts[1:] == [(10 * n, "window", 3) for n in (4, 7, 10, 13)]


def test_a_save_that_comes_before_its_window_opens_was_not_predicted(tmp_path):
    """Nor was that window put off: it has three steps, and the next save is four away."""
    window = WindowOptions(device_budget_bytes=12 * SIZE * 4)
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=8), window=window) as manager:
        step, state = manager.wrap(adapter_update), adapters()
        for label in range(5):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state), force=label == 4)
        manager.wait_until_finished()
        report = manager.last_report
        assert manager._gockpt_session.window_steps == 3
        assert (report.kind, report.deferred_steps) == ("snapshot", 0)
        assert "not predicted, so no window was open: the next one was foresee" in report.reason
        assert "for 4 steps after it; `manager.expect_save(in_steps=n)` announces" in report.reason


def test_a_save_that_nothing_foresaw_says_which_it_is(tmp_path):
    with GoCkptManager(tmp_path, window=WindowOptions(steps=2)) as manager:
        step, state = manager.wrap(update), fresh()
        for n in range(1, 12):
            state = step(state, BATCH)
            if n == 7:
                manager.restore(6)
            if n in (3, 6, 8, 11):
                manager.save(n, args=GoCkptSave(state), force=True)
        manager.wait_until_finished()
        told = "first of this run", "the second", "restored since", "open; `manager.expect_save("
        for report, why in zip(manager.reports, told, strict=True):
            assert "not predicted" in report.reason
            assert why in report.reason


def test_a_save_announced_for_another_step_says_how_far_off_it_was(tmp_path):
    """Not that it was not announced: counting from the step before is a likely mistake."""
    with GoCkptManager(tmp_path, window=WindowOptions(steps=2)) as manager:
        step, state = manager.wrap(update), fresh()
        for n in range(1, 21):
            state = step(state, BATCH)
            if n in (2, 12):
                manager.expect_save(in_steps=5)
            if n in (1, 8, 14):
                manager.save(n, args=GoCkptSave(state), force=True)
        manager.wait_until_finished()
        reasons = [report.reason for report in manager.reports]
        assert "was announced for 1 step before it; `expect_save(in_steps=n)`" in reasons[1]
        assert "was announced for 3 steps after it; `expect_save(in_steps=n)`" in reasons[2]


def wait_for_compilation(step):
    """Without a fixed K a window opens only if the armed step is compiled by then."""
    if step.program is not None and step.program.is_armed:
        step.program.wait_until_ready()


@pytest.mark.parametrize("reason", ["it is still compiling", "it did not compile"])
def test_nobody_waits_for_an_armed_step_nor_calls_one_that_is_none(tmp_path, monkeypatch, reason):
    window = WindowOptions(device_budget_bytes=12 * SIZE * 4)
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=5), window=window) as manager:
        step, state = manager.wrap(adapter_update), adapters()
        with monkeypatch.context() as patch:
            patch.setattr(StepProgram, "why_not_ready", lambda program: reason)
            for label in range(16):
                if label == 11:
                    patch.undo()
                state = step(state, BATCH)
                wait_for_compilation(step)
                manager.save(label, args=GoCkptSave(state))
        manager.wait_until_finished()
        assert [r.kind for r in manager.reports] == ["snapshot"] * 3 + ["window"]
        assert manager.reports[2].reason == reason
        assert_same(manager.restore(15), state)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (session, "compile_late_ahead"), (planner, "measure_bytes"), (planner, "plan_window"),
        (ahead, "replay_specs"),
    ],
)  # fmt: skip
def test_what_planning_stumbles_over_does_not_stop_training(tmp_path, monkeypatch, module, name):
    """Before the first step, or before the one behind which there is something to plan for."""

    def stumble(*_):
        raise NotImplementedError("a placement")

    monkeypatch.setattr(module, name, stumble)
    options, window = Options(save_interval_steps=5), WindowOptions(steps=3)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        with pytest.warns(SnapshotOnlyWarning, match="failed with NotImplementedError") as told:
            saved = train(manager, range(11))
        (warning,) = told
        assert warning.filename.endswith("training_loop.py")  # the line of the user's
        assert [r.kind for r in manager.reports] == ["snapshot"] * 3
        assert "failed with NotImplementedError: a placement" in manager.last_report.reason
        assert_same(manager.restore(10), saved[10])


def test_what_steps_leave_free_is_measured_once_and_behind_one(tmp_path, monkeypatch):
    """A save before the first step cannot know; what is measured later counts our own copies."""
    free = [10_000]
    monkeypatch.setattr(device_budget, "device_headroom_bytes", lambda: free[-1])
    with GoCkptManager(tmp_path) as manager:
        device = manager._gockpt_session.resources.device
        step, state = manager.wrap(update), fresh()
        manager.save(0, args=GoCkptSave(state))
        assert device.limit_bytes == 10_000
        for label, now in ((1, 5_000), (2, 2_000), (3, 1_000)):
            free.append(now)
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
            assert device.limit_bytes == 5_000
        manager.wait_until_finished()
        assert_same(manager.restore(3), to_host(state))
    with GoCkptManager(tmp_path / "no save") as manager:  # before there is a plan
        step = manager.wrap(update)
        step(step(fresh(), BATCH), BATCH)
        assert manager._gockpt_session.resources.device.limit_bytes == 1_000


def test_the_first_state_may_come_from_the_host_in_part(tmp_path):
    """Nothing is known then of how what the step returns will lie: nothing is compiled for it."""
    with GoCkptManager(tmp_path, window=WindowOptions(steps=3)) as manager:
        step = manager.wrap(update)
        state = step(fresh() | {"params": {"w": np.ones(SIZE, np.float32)}}, BATCH)
        manager.save(0, args=GoCkptSave(state))
        manager.wait_until_finished()
        assert_same(manager.restore(0), to_host(state))


def test_a_save_whose_end_nobody_has_told_is_over_with_the_next_step(tmp_path):
    """A manager of stock's does not say when it has handed over the last item."""
    with GoCkptManager(tmp_path) as manager:
        state = manager.wrap(update)(fresh(), BATCH)
        begun = manager._gockpt_session
        begun.begin_save()
        assert begun._seal is not None
        manager.wrap(update)(state, BATCH)
        assert begun._seal is None


def test_a_forced_save_is_a_snapshot_and_does_not_disturb(tmp_path):
    with manage(tmp_path, WindowOptions(steps=3), save_interval_steps=5) as manager:
        step, state, saved = manager.wrap(update), fresh(), {}
        for label in range(16):
            state = step(state, BATCH)
            if manager.save(label, force=label == 9, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        assert list(saved) == [0, 5, 9, 10, 15]
        assert [r.kind for r in manager.reports] == [
            "snapshot", "window", "snapshot", "snapshot", "window",
        ]  # fmt: skip
        assert "early" in manager.reports[2].reason
        assert_restores(manager, saved)


def test_expected_save_is_a_window_though_nothing_foretold_it(tmp_path):
    with GoCkptManager(tmp_path, window=WindowOptions(steps=3)) as manager:
        step, state = manager.wrap(update), fresh()
        for n in range(9):
            if n == 5:
                manager.expect_save(in_steps=4)
            state = step(state, BATCH)
        manager.save(77, args=GoCkptSave(state))
        manager.wait_until_finished()
        assert kinds(manager) == [(77, "window", 3)]
        assert_same(manager.restore(77), state)


@pytest.mark.parametrize("in_steps", [0, -1, 1.5, "3", True])
def test_expect_save_wants_a_positive_number(tmp_path, in_steps):
    with GoCkptManager(tmp_path) as manager, pytest.raises(ValueError, match="`in_steps` must be"):
        manager.expect_save(in_steps=in_steps)


def test_window_status_and_explain(tmp_path, capsys):
    with manage(tmp_path, WindowOptions(steps=3), save_interval_steps=5) as manager:
        manager.explain()
        assert "no wrapped step has run" in capsys.readouterr().out
        step, state, seen = manager.wrap(update), fresh(), []
        for label in range(11):
            state = step(state, BATCH)
            seen.append(manager.window_status)
            manager.save(label, args=GoCkptSave(state))
            manager.wait_until_finished()
        assert seen[:3] == ["idle"] * 3
        assert seen[3:6] == ["idle", "window 2/3", "window 3/3"]
        assert manager.window_status == "idle"
        manager.explain()
        text = capsys.readouterr().out
        assert text.startswith("foreseen saves are windows of 3 steps: `steps=3`\n")
        assert "2 leaves leave early, in 1 group: " in text
        assert "; 2 leaves are late." in text
        for path in ("mu['w']", "nu['w']", "['params']['w']", "count"):
            assert path in text
        assert "beside" not in text


@pytest.mark.parametrize("beside", [0, 1, 2])
def test_explain_counts_what_is_saved_beside_the_state(tmp_path, capsys, beside):
    """Of two steps that take turns each has returned its part of it."""
    with GoCkptManager(tmp_path, window=WindowOptions(steps=2)) as manager:
        split = manager.wrap(jax.jit(lambda key: jax.random.split(key)[0]))
        step, state, key = manager.wrap(update), fresh(), jax.random.key(0)
        for label in range(3):
            key, state = split(key), step(state, BATCH)
            more = [jnp.full(SIZE, n) for n in range(beside)]
            manager.save(label, args=GoCkptSave([state, key, more]))
        manager.explain()
        text = capsys.readouterr().out
        assert text.startswith("foreseen saves are windows of 2 steps")
        told = [None, "given 1 array that", "given 2 arrays that"][beside]
        assert (told in text) if told else ("beside" not in text)


# Reports.


@pytest.mark.parametrize("in_a_window", [False, True])
def test_what_the_loop_has_released_is_held_by_nobody(tmp_path, in_a_window):
    """As where it leaves the device between phases of training, and comes back."""
    with manage(tmp_path, WindowOptions(steps=4), save_interval_steps=10) as manager:
        step, state = manager.wrap(update), fresh()
        for label in range(19 if in_a_window else 14):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
            manager.wait_until_finished()
        assert (manager.window_status == "idle") is not in_a_window
        offloaded, held = to_host(state), [weakref.ref(x) for x in jax.tree.leaves(state)]
        manager.release()
        del state
        manager._gockpt_session.resources.worker.wait_until_idle()
        assert [ref() for ref in held] == [None] * len(held)
        state = jax.tree.map(jnp.asarray, offloaded)
        for label in range(20, 31):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
        manager.wait_until_finished()
        assert_same(manager.restore(30, args=GoCkptRestore(fresh())), state)
    assert kinds(manager)[-1] == (30, "window", 4)


def test_reports_are_plausible_and_told_to_monitoring(tmp_path, caplog):
    told: list[tuple[str, float]] = []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda name, secs, **_: told.append((name, secs))
    )
    jax.monitoring.register_event_listener(counter := lambda name, **_: told.append((name, 1)))
    try:
        options = Options(save_interval_steps=5)
        # How much piles up on the device is a matter of time, were it not for the budget.
        limited = WindowOptions(steps=3, device_budget_bytes=2 * STATE_BYTES)
        with (
            caplog.at_level(logging.INFO, logger="gockpt_jax"),
            GoCkptManager(tmp_path, options=options, window=limited) as manager,
        ):
            train(manager, range(11))
            reports = manager.reports
    finally:
        if hasattr(jax.monitoring, "unregister_event_listener"):
            jax.monitoring.unregister_event_duration_listener(listener)
            jax.monitoring.unregister_event_listener(counter)
        else:  # jax 0.7
            jax.monitoring.clear_event_listeners()
    assert manager.last_report is reports[-1]
    window, leaf = reports[-1], SIZE * 4
    assert (window.step, window.kind, window.window_steps) == (10, "window", 3)
    assert window.state_bytes == STATE_BYTES
    assert window.early_bytes == 2 * leaf
    assert window.gradient_bytes == 2 * leaf  # one gradient, two armed steps
    assert window.late_leaves == ()
    assert window.error is None
    assert window.written_bytes >= STATE_BYTES
    scratch = 2 * 4 * PIECE_SIZES[-1]  # replay's, for two moments
    # The state, what two updates retained, the audit's sample, what is being written: all at once
    # where replay is slow.
    assert STATE_BYTES <= window.peak_host_bytes <= 4 * STATE_BYTES + scratch
    assert 2 * leaf <= window.peak_device_bytes <= 2 * STATE_BYTES
    assert 0 <= window.barrier_secs <= window.stall_secs < 60
    for report in reports:
        for seconds in (report.drain_secs, report.write_secs, report.commit_secs):
            assert 0 < seconds < 60
    assert reports[0].early_bytes == reports[0].gradient_bytes == 0
    names = [name for name, _ in told if name.startswith(events.PREFIX)]
    assert names.count(events.SAVE_WINDOW) == 2
    assert names.count(events.SAVE_SNAPSHOT) == 1
    for name in (events.SAVE_STALL_SECS, events.SAVE_DRAIN_SECS, events.SAVE_COMMIT_SECS):
        assert [secs for n, secs in told if n == name] != []
        assert names.count(name) == 3
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO
             and r.name == "gockpt_jax"]  # fmt: skip
    assert len(lines) == 3
    assert "step 10 saved: window, K=3" in lines[2]


def test_an_oversized_state_is_refused_and_training_goes_on(tmp_path):
    window = WindowOptions(host_budget_bytes=STATE_BYTES - 1)
    with GoCkptManager(tmp_path, window=window) as manager:
        state = manager.wrap(update)(fresh(), BATCH)
        with pytest.raises(HostBudgetError, match=rf"{STATE_BYTES} bytes\. Give that at least"):
            manager.save(0, args=GoCkptSave(state))
        assert manager.all_steps() == []
        small = {"w": state["params"]["w"]}
        assert manager.save(1, args=GoCkptSave(small))
        manager.wait_until_finished()
        assert_same(manager.restore(1), small)


def test_what_the_host_holds_is_saved_without_device_memory(tmp_path):
    """And may be deleted, or donated, once `save` has returned."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    values = np.arange(1024, dtype=np.float32)
    state = {"table": jax.device_put(values, place), "w": jnp.ones(SIZE)}
    window = WindowOptions(device_budget_bytes=SIZE * 4)
    with GoCkptManager(tmp_path, window=window) as manager:
        manager.save(0, args=GoCkptSave(state))
        state["table"].delete()
        manager.wait_until_finished()
        assert manager.last_report.peak_device_bytes == SIZE * 4
        assert manager.last_report.state_bytes == 1024 * 4 + SIZE * 4
        np.testing.assert_array_equal(manager.restore(0)["table"], values)
