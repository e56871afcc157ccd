"""Loops that save a part of the state: windows carry what saves take, and nothing for nothing."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from alone import FIRST_ALONE
from window.training_loop import Loop, Options, assert_restores, to_host

from gockpt_jax import AuditError, GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.training.program import StepProgram
from gockpt_jax.window import ahead, open_window
from gockpt_jax.window.audit import PendingAudit
from gockpt_jax.window.device_budget import DeviceBudget
from gockpt_jax.window.facts import NO_BYTES
from gockpt_jax.window.known import Known, Saves
from gockpt_jax.window.planner import Planner
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.resources import Resources

LEAF = 64 * 64 * 4
NAMES = "abcd"
BUDGET = 10 * LEAF  # of 12 leaves


def fresh():
    def leaves(value):
        return {name: jnp.full((64, 64), value, jnp.float32) for name in NAMES}

    return {"m": leaves(0.0), "v": leaves(0.0), "w": leaves(0.5)}


@jax.jit
def update(state, x):
    """Adam's moments, which leave early, and what they do to the parameters, which are late."""
    grads = jax.tree.map(lambda w: jnp.sin(w + x), state["w"])
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * (g * g), state["v"], grads)
    w = jax.tree.map(lambda w, m, v: w - 0.01 * m / (jnp.sqrt(v) + 1e-8), state["w"], m, v)
    return {"m": m, "v": v, "w": w}


def run(tmp_path, parts, monkeypatch, **window):
    """Saves parts, every fourth step; the reports, the armed steps, and what is explained."""
    armed, call = [], StepProgram.call

    def counted(program, *args):
        armed.append(label)
        return call(program, *args)

    monkeypatch.setattr(StepProgram, "call", counted)
    rate = dict(step_secs=1.0, link_bytes_per_sec=12 * LEAF / 8)
    options = WindowOptions(**{"device_budget_bytes": BUDGET, **rate, **window})
    saved = {}
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=4), window=options) as manager:
        step, state = manager.wrap(update), fresh()
        for label in range(4 * len(parts) - 3):
            state = step(state, jnp.float32(label))
            if step.program is not None and step.program.is_armed:
                step.program.wait_until_ready()
            part = parts[label // 4](state)
            if manager.save(label, args=GoCkptSave(part)):
                saved[label] = to_host(part)
                manager.wait_until_finished()  # what a save holds is not free
        assert_restores(manager, saved)
        session = manager._gockpt_session
        session.resources.watcher.wait_until_idle()
        assert session.host.used_bytes == 0 == session.resources.device.used_bytes
        return manager.reports, armed, session.explain()


def whole(state):
    return state


def parameters(state):
    return state["w"]


def other_arrays(state):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)


NONE_EARLY = "no leaf that the last saves took may leave early"
NONE_OURS = "the last saves took no array that the wrapped step before them had returned"


@pytest.mark.parametrize(
    ("part", "why"), [(parameters, NONE_EARLY), (other_arrays, NONE_OURS), (to_host, NONE_OURS)]
)
def test_no_window_opens_where_nothing_that_leaves_early_is_saved(
    tmp_path, monkeypatch, caplog, part, why
):
    reports, armed, explained = run(tmp_path, [part] * 5, monkeypatch)
    assert [r.kind for r in reports] == ["snapshot"] * 5
    assert max(armed) <= 4, "but for the first, nothing was known yet"
    assert why in reports[-1].reason
    assert f"snapshots: {why}" in explained
    # Orbax warns of saves that take long, as on a machine that is busy.
    ours = [record for record in caplog.records if record.name == "gockpt_jax"]
    warned = [why in record.message for record in ours if record.levelno == logging.WARNING]
    assert warned == ([True] if why == NONE_OURS else [])


def test_a_part_that_fits_is_a_copy(tmp_path, monkeypatch):
    reports, armed, _ = run(tmp_path, [lambda state: [state["m"], state["v"]]] * 4, monkeypatch)
    assert [r.kind for r in reports] == ["snapshot", "window", "snapshot", "snapshot"]
    assert max(armed) <= 4
    assert reports[-1].reason.startswith("one device copy of the state fits: 131 kB")


def test_half_of_what_is_updated_together_leaves_at_the_save(tmp_path, monkeypatch):
    """The other half would have to come along, for replay, and what follows both."""
    reports, armed, _ = run(tmp_path, [lambda state: state["m"]] * 4, monkeypatch)
    assert [r.kind for r in reports] == ["snapshot", "window", "snapshot", "snapshot"]
    assert max(armed) <= 4


def test_what_is_not_saved_is_not_reckoned_with(tmp_path, monkeypatch):
    def without_two(state):
        return [state["m"], state["v"], {name: state["w"][name] for name in "ab"}]

    reports, _, _ = run(tmp_path, [without_two] * 4, monkeypatch, device_budget_bytes=9 * LEAF)
    assert [r.kind for r in reports[1:]] == ["window"] * 3
    first, second = (float(r.reason.split("of a snapshot ")[1][:5]) for r in reports[1:3])
    assert first == 2.0  # of 12 leaves, 3 too many
    assert second == pytest.approx(1 * 8 / 12, abs=1e-3)
    assert {r.early_bytes for r in reports[2:]} <= {2 * LEAF * n for n in range(1, 5)}


def test_what_is_not_saved_takes_no_room_on_the_host(tmp_path, monkeypatch):
    """10 leaves, and 2 that follow two steps; there is none for 12, as until it is known."""

    def without_two(state):
        return [state["m"], state["v"], {name: state["w"][name] for name in "ab"}]

    budgets = {"device_budget_bytes": 9 * LEAF, "host_budget_bytes": 13 * LEAF}
    reports, _, _ = run(tmp_path, [without_two] * 4, monkeypatch, **budgets)
    assert [r.kind for r in reports] == ["snapshot"] * 2 + ["window"] * 2


@jax.jit
def mixed(average, parameters):
    return jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, parameters)


class Averaged:
    """The state, and as many averages of its parameters, which another program makes."""

    def __init__(self, count=1):
        self.averages = [fresh()["w"]] * count

    def __call__(self, state):
        self.averages = [mixed(a, state["w"]) for a in self.averages]
        return [state, self.averages]


def test_what_is_saved_beside_the_state_is_reckoned_with(tmp_path, monkeypatch):
    """One device copy of the 12 leaves fits, of 16 none does; known from the first save on."""
    reports, _, _ = run(tmp_path, [Averaged()] * 4, monkeypatch, device_budget_bytes=13 * LEAF)
    assert [r.state_bytes for r in reports] == [16 * LEAF] * 4
    assert [r.kind for r in reports] == ["snapshot"] + ["window"] * 3
    assert "of a snapshot 2.000 s" in reports[-1].reason  # 3 leaves too many
    assert max(r.peak_device_bytes for r in reports) <= 13 * LEAF + 64 * 16


def test_a_history_that_grows_beside_the_state_costs_no_plans(tmp_path, monkeypatch):
    """Its plan holds, until it is as large as to matter."""
    plans, plan = [], Planner._plan

    def counted(planner, *args):
        plans.append(args)
        return plan(planner, *args)

    monkeypatch.setattr(Planner, "_plan", counted)
    lengths = iter(range(1, 100))

    def with_history(state):
        return {"state": state, "history": jnp.ones(8 * next(lengths))}

    run(tmp_path, [with_history] * 6, monkeypatch)
    few = len(plans)
    plans.clear()
    run(tmp_path / "none", [lambda state: state] * 6, monkeypatch)
    assert few == len(plans)


def test_what_is_saved_beside_the_state_for_a_while(tmp_path, monkeypatch):
    """It is heard of, and forgotten, behind the next save."""
    parts = [whole] * 2 + [Averaged()] * 3 + [whole] * 4
    reports, _, _ = run(tmp_path, parts, monkeypatch, device_budget_bytes=13 * LEAF)
    kinds = ["snapshot"] * 3 + ["window"] * 4 + ["snapshot"] * 2
    assert [r.kind for r in reports] == kinds
    assert reports[-1].reason.startswith("one device copy of the state fits: 197 kB")


def test_what_the_second_save_has_told_is_not_forgotten_for_the_first(tmp_path):
    """That came before the step had a program; what both have told is looked at when it has one."""
    with GoCkptManager(tmp_path) as manager:
        step, state = manager.wrap(update), fresh()
        for label, part in enumerate((whole, parameters)):
            state = step(state, jnp.float32(label))
            assert manager.save(label, args=GoCkptSave(part(state)))
        step(state, jnp.float32(2))
        assert manager._gockpt_session.known.saves(step.program).unsaved == {*range(8)}


def test_one_save_of_copies_of_the_state_is_no_larger_than_the_state(tmp_path, monkeypatch):
    """None of its arrays is known, and all leaves of the state are missing in it."""

    def copies(state):
        return jax.tree.map(jnp.copy, state)

    parts = [whole, whole, copies, whole, whole]
    reports, _, _ = run(tmp_path, parts, monkeypatch, device_budget_bytes=13 * LEAF)
    assert {r.reason[:35] for r in reports[1:]} == {"one device copy of the state fits: "}
    assert {r.kind for r in reports} == {"snapshot"}


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize(("steps", "following"), [(None, 1), (3, 4)])
def test_what_is_saved_beside_the_state_takes_room_on_the_host(
    tmp_path, monkeypatch, steps, following, missing
):
    """A window opens only where there is room for it, and twice for what follows a step.

    Of a window that is chosen one leaf at the least, of one of a fixed K all four.
    """
    leaves = 12 + 2 * 4 + 2 * following - missing
    budgets = {"host_budget_bytes": leaves * LEAF, "write_limit_bytes": 1}
    parts = [Averaged(2)] * 5
    reports, _, _ = run(tmp_path, parts, monkeypatch, steps=steps, exact=True, **budgets)
    assert [r.kind for r in reports[1:]] == ["snapshot" if missing else "window"] * 4
    assert ("host budget" in reports[-1].reason) == bool(missing)


def test_of_a_fixed_k_too_it_is_heard_behind_each_save(tmp_path, monkeypatch):
    """No plan is made anew for it. 8 leaves beside the 12, and 4 that follow two steps."""
    parts = [whole] * 2 + [Averaged(2)] * 3 + [whole] * 3
    budgets = {"host_budget_bytes": 27 * LEAF, "write_limit_bytes": 1}
    reports, _, _ = run(tmp_path, parts, monkeypatch, steps=3, exact=True, **budgets)
    kinds = ["snapshot"] + ["window"] * 2 + ["snapshot"] * 4 + ["window"]
    assert [r.kind for r in reports] == kinds


def test_what_is_saved_beside_is_known_where_rounding_is_accepted(tmp_path, monkeypatch):
    """No exact window fits the host; where divisions are replayed, nothing follows what leaves."""
    budgets = {"host_budget_bytes": 21 * LEAF, "write_limit_bytes": 1}
    reports, _, _ = run(tmp_path, [Averaged(2)] * 2, monkeypatch, audit=None, **budgets)
    assert reports[1].kind == "window"
    assert "replayed up to rounding" in reports[1].reason
    assert "of a snapshot 6.667 s" in reports[1].reason  # 20 leaves, 10 too many


@pytest.mark.parametrize("then", [parameters, whole])
def test_copies_are_compiled_before_the_next_save_that_takes_others(tmp_path, monkeypatch, then):
    """Where they are of other leaves, or have less room; the plan may be the same, as here."""
    compiled, compile_ahead, room = [], ahead.compile_late_ahead, [13 * LEAF]

    def noting(arrays, resources, *args):
        compiled.append((len(arrays), resources.device.limit_bytes))
        compile_ahead(arrays, resources, *args)

    def shrinks(state):
        room[0] = (12 if then is whole else 13) * LEAF
        return then(state)

    def measure(device, **_):
        device.limit_bytes = room[0]

    monkeypatch.setattr(ahead, "compile_late_ahead", noting)
    monkeypatch.setattr(DeviceBudget, "measure", measure)
    run(tmp_path, [whole, whole, shrinks, then, then], monkeypatch)
    last = (4, 13 * LEAF) if then is parameters else (12, 12 * LEAF)
    assert compiled == [(12, 13 * LEAF), last]


def test_windows_come_back_with_the_whole(tmp_path, monkeypatch):
    """The first whole save finds no window, and is right all the same."""
    reports, _, _ = run(tmp_path, [parameters] * 3 + [whole] * 3, monkeypatch)
    assert [r.kind for r in reports] == ["snapshot"] * 4 + ["window"] * 2
    assert [r.early_bytes > 0 for r in reports[4:]] == [True] * 2


def test_where_the_whole_and_a_part_take_turns_windows_carry_the_whole(tmp_path, monkeypatch):
    reports, _, _ = run(tmp_path, [parameters, whole] * 4, monkeypatch)
    assert [r.kind for r in reports[1::2]] == ["window"] * 4


def test_a_fixed_k_is_a_window_whatever_is_saved(tmp_path, monkeypatch):
    moments = [lambda state: state["m"]] * 4
    reports, _, _ = run(tmp_path, moments, monkeypatch, steps=3)
    assert [(r.kind, r.window_steps) for r in reports[1:]] == [("window", 3)] * 3


@pytest.mark.parametrize("copies", [to_host, other_arrays])
def test_nor_does_a_window_of_a_fixed_k_open_for_copies(tmp_path, monkeypatch, caplog, copies):
    """Two of them have to come, for K is fixed; and it opens again behind what is none."""
    parts = [copies] * 4 + [whole] * 2
    reports, armed, explained = run(tmp_path, parts, monkeypatch, steps=3)
    assert [r.kind for r in reports] == ["snapshot"] * 5 + ["window"]
    assert not {*range(9, 17)} & {*armed}, "nothing would be taken from a window"
    assert {7, 8, 19, 20} <= {*armed}
    assert "nothing given to `save` had left early" in reports[2].reason
    assert NONE_OURS in reports[3].reason
    assert explained.startswith("foreseen saves are windows of 3 steps")
    ours = [r for r in caplog.records if r.name == "gockpt_jax" and r.levelno == logging.WARNING]
    assert [NONE_OURS in record.message for record in ours] == [True]


def test_one_save_of_copies_ends_no_windows_of_a_fixed_k(tmp_path, monkeypatch):
    parts = [whole, to_host, whole, to_host, whole]
    reports, armed, _ = run(tmp_path, parts, monkeypatch, steps=3)
    assert [r.kind for r in reports] == ["snapshot", "snapshot", "window", "snapshot", "window"]
    assert {3, 7, 11, 15} <= {*armed}


@pytest.mark.parametrize("several", [False, True])
def test_beside_others_a_fixed_k_is_a_window_also_behind_copies(several):
    """A plan that is first made behind two saves of them is looked at no more."""

    class Program:
        cut = SimpleNamespace(paths=("a", "b"))

    options, program, all_leaves = WindowOptions(steps=3), Program(), frozenset({0, 1})
    resources = Resources.of(options, Processes(), FIRST_ALONE)
    others = SimpleNamespace(several=several, gather=lambda _, said: {0: said})
    known = Known(options, others, resources, lambda: None)
    saves = known._saves[program] = Saves()
    saves.last.extend([(all_leaves, NO_BYTES)] * 2)
    assert known.facts(program, 8, 1).unsaved == (frozenset() if several else all_leaves)
    resources.close()


def test_what_fails_one_item_of_a_window_is_what_fails_the_others(tmp_path, monkeypatch):
    """They are made of the same chunks, and of an update that may have come too late, or never."""
    told, fail, failing = [], open_window.fail, []

    def noting(slots, error):
        told.append(error)
        fail(slots, error)

    def check(audit, final):
        failing.append(AuditError("injected"))
        if len(failing) == 1:
            raise failing[0]

    def moments(state):
        adam = state["opt"][0]
        return {"args": ocp.args.Composite(mu=GoCkptSave(adam.mu), nu=GoCkptSave(adam.nu))}

    loop = Loop(tmp_path, window={"steps": 3})
    with loop.manager:
        while loop.label <= 12:
            loop.update()
            if loop.label == 12:
                loop.manager.wait_until_finished()
                loop.settle()
                monkeypatch.setattr(open_window, "fail", noting)
                monkeypatch.setattr(PendingAudit, "check", check)
            loop.manager.save(loop.label, **moments(loop.state))
            loop.label += 1
        with pytest.raises(AuditError, match="injected"):
            loop.manager.wait_until_finished()
        assert loop.kinds == {0: "snapshot", 4: "window", 8: "window", 12: "window"}
        assert {*map(id, told)} == {id(failing[0])}
        assert len(told) == 2
