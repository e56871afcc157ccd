"""How saves are foreseen: which saves of a loop are windows, and which are snapshots."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import checkpoint_managers as managers
from window import training_loop
from window.training_loop import (
    BATCH,
    Options,
    assert_restores,
    assert_same,
    fresh,
    to_host,
    train,
    update,
)

from gockpt_jax import GoCkptManager, GoCkptRestore, GoCkptSave, WindowOptions
from gockpt_jax.storage.saving.policies import AskedAhead, StartsWindow
from gockpt_jax.window.open_window import OpenWindow

K = 3
Any, Every, Steps = (
    managers.AnySavePolicy, managers.FixedIntervalPolicy, managers.SpecificStepsPolicy,
)  # fmt: skip
NOT_LABELS = [managers.InitialSavePolicy(), managers.PreemptionCheckpointingPolicy()]


def kinds(manager):
    return {r.step: f"{r.kind} {r.window_steps}" for r in manager.reports}


def expected(snapshots, windows):
    return {s: "snapshot 1" for s in snapshots} | {s: f"window {K}" for s in windows}


def run(manager, labels=range(18), *, call=lambda n: True, force=lambda n: False, before=None):
    """A loop that calls `save` where `call` says so; returns what was saved, on the host."""
    step, state, saved = manager.wrap(update), fresh(), {}
    for n, label in enumerate(labels):
        if before is not None:
            before(n)
        state = step(state, BATCH)
        if call(n) and manager.save(label, args=GoCkptSave(state), force=force(n)):
            saved[label] = to_host(state)
            manager.wait_until_finished()
    return saved


def manage(directory, **options):
    """Windows have `K` steps."""
    return training_loop.manage(directory, WindowOptions(steps=K), **options)


def assert_foreseen(manager, snapshots, windows, labels=range(18), **how):
    """These are saved, each in its way, by a loop as `run` has it; and as they were."""
    saved = run(manager, labels, **how)
    assert kinds(manager) == expected(snapshots, windows)
    assert_restores(manager, saved)


@pytest.mark.parametrize(
    ("policy", "snapshots", "windows"),
    [
        (Every(5), [0], [5, 10, 15]),
        (Steps([7, 13]), [], [7, 13]),
        (Any([Every(7), Steps([4]), *NOT_LABELS]), [0], [4, 7, 14]),
        (Any([Every(20), managers.InitialSavePolicy()]), [0], []),
    ],
)
def test_policies_of_labels(tmp_path, policy, snapshots, windows):
    with manage(tmp_path, save_decision_policy=policy) as manager:
        assert_foreseen(manager, snapshots, windows)


@pytest.mark.parametrize(
    ("options", "snapshots", "windows"),
    [
        (dict(save_interval_steps=5), [0], [5, 10, 15]),
        (dict(save_interval_steps=9, save_on_steps=[6, 13]), [0], [6, 9, 13]),
        (dict(save_interval_steps=None, save_on_steps=[6, 13]), [0], [6, 13]),
        (dict(read_only=True), [], []),
    ],
)
def test_options_of_labels(tmp_path, options, snapshots, windows):
    with manage(tmp_path, **options) as manager:
        assert_foreseen(manager, snapshots, windows)


def test_a_yes_given_ahead_holds(tmp_path):
    """A function with a memory of its own: asked twice it would say no."""
    yes, since = collections.Counter(), -6

    def should_save(label, last_saved):
        nonlocal since
        if label - since < 6:
            return False
        since = label
        yes[label] += 1
        return True

    with manage(tmp_path, should_save_fn=should_save) as manager:
        saved = run(manager)
        assert yes == dict.fromkeys([0, 6, 12, 18], 1)  # the last one for a save to come
        assert kinds(manager) == expected([0], [6, 12])
        assert_restores(manager, saved)


@pytest.mark.parametrize("asks", [False, True])
def test_a_no_given_ahead_is_asked_again_when_the_label_comes(tmp_path, asks):
    """The loop's own flag, as a handler of SIGTERM sets it: the save that it asks for is made."""
    is_told_to_end = False
    with manage(
        tmp_path, should_save_fn=lambda label, last: label % 5 == 0 or is_told_to_end
    ) as manager:
        step, state = manager.wrap(update), fresh()
        for label in range(100):
            state = step(state, BATCH)
            is_told_to_end = label == 12
            if not asks or manager.should_save(label):
                manager.save(label, args=GoCkptSave(state))
            if is_told_to_end:
                break
        manager.wait_until_finished()
        assert kinds(manager) == expected([0, 12], [5, 10])
        assert_same(manager.restore(12), to_host(state))


def test_a_function_of_the_last_save_is_asked_again_where_that_was_not_foreseen(tmp_path):
    """As stock asks it: of a save that was forced in between, it had not been told."""
    with manage(
        tmp_path, should_save_fn=lambda label, last: last is None or label - last >= 5
    ) as manager:
        step, state = manager.wrap(update), fresh()
        for label in range(14):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state), force=label == 8)
        assert manager.all_steps() == [0, 5, 8, 13]


def test_what_is_asked_ahead_is_told_of_the_last_save():
    """Of one that was forced, too. A no is asked again when the label comes, and a yes is not."""
    told = []

    def should_save(label, last):
        told.append((label, last))
        return label % 5 == 0

    asked = AskedAhead(should_save, lambda: None)
    assert [asked.will_save(label) for label in (4, 5, 6)] == [False, True, False]
    assert told == [(4, None), (5, None), (6, 5)]
    assert asked(5, None)
    assert len(told) == 3
    assert not asked(6, 5)
    assert not asked(9, 8)
    assert told[3:] == [(6, 5), (9, 8)]
    assert [asked.will_save(label) for label in (10, 11, 10)] == [True, False, True]
    assert told[5:] == [(10, 8), (11, 10)]
    assert asked.will_save(20)
    assert asked.will_save(15)  # of a label that comes before
    assert told[7:] == [(20, 10), (15, 10)]


def test_a_function_that_does_not_know_labels_to_come(tmp_path):
    """It looks up what the loop finds out until then: asked ahead, it has no answer."""
    due = {}

    def find_out(n):
        due[n] = n % 5 == 0
        return True

    with manage(tmp_path, should_save_fn=lambda label, last: due[label]) as manager:
        assert_foreseen(manager, [0, 5, 10, 15], [], call=find_out)
        with pytest.raises(KeyError):
            manager.save(100, args=GoCkptSave(fresh()))


def test_a_function_that_knows_labels_up_to_the_last_one(tmp_path):
    due = [label % 5 == 0 for label in range(18)]
    with manage(tmp_path, should_save_fn=lambda label, last: due[label]) as manager:
        assert_foreseen(manager, [0], [5, 10, 15])


class EveryFifth:
    """A policy of a user's own, of whose labels nobody knows before."""

    def should_save(self, step, previous_steps, *, context):
        return step.step % 5 == 0


def test_a_policy_of_a_users_own_among_others_goes_by_its_period(tmp_path):
    with manage(tmp_path, save_decision_policy=Any([Every(1000), EveryFifth()])) as manager:
        assert_foreseen(manager, [0, 5], [10, 15, 20], range(21))


def test_forced_saves_go_by_their_period_where_the_policy_foresees_none(tmp_path):
    """Of labels it says nothing, not that there will be no save."""
    with manage(tmp_path, save_decision_policy=Any(NOT_LABELS)) as manager:
        assert_foreseen(manager, [0, 4, 9], [14, 19], range(20), force=lambda n: n % 5 == 4)


# By time or load: the policy's yes starts the window.


@pytest.mark.parametrize("others", [[], [Every(1000)]], ids=len)
def test_a_start_driven_policy(tmp_path, others):
    """Saves are waited for, so that the policy says yes whenever it is asked."""
    policy = managers.ContinuousCheckpointingPolicy()
    policy = Any([policy, *others]) if others else policy
    with manage(tmp_path, save_decision_policy=policy) as manager:
        assert_foreseen(manager, [0, 1], [4, 7, 10, 13], range(14))


def test_a_start_driven_policy_saves_at_once_where_there_are_no_windows(tmp_path):
    options = Options(save_decision_policy=managers.ContinuousCheckpointingPolicy())
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(max_steps=1)) as manager:
        assert_foreseen(manager, range(4), [], range(4))


def test_a_start_driven_policy_saves_what_no_wrapped_step_has_made(tmp_path):
    with manage(tmp_path, save_decision_policy=managers.ContinuousCheckpointingPolicy()) as manager:
        for label in range(2):
            assert manager.save(label, args=GoCkptSave({"x": jnp.full(3, label)}))
            manager.wait_until_finished()
        assert kinds(manager) == expected(range(2), [])


@pytest.mark.parametrize("wraps", [False, True])
def test_a_policy_by_time_saves_once_in_its_time(tmp_path, wraps):
    """Whatever the version does: none is made, or several labels come with each."""
    policy = managers.ContinuousCheckpointingPolicy(minimum_interval_secs=3600)
    stock = ocp.CheckpointManager(tmp_path / "stock", options=Options(save_decision_policy=policy))
    ours = GoCkptManager(tmp_path / "ours", options=Options(save_decision_policy=policy))
    with stock, ours:
        step, state, said = ours.wrap(update) if wraps else update, fresh(), []
        for label in range(6):
            state = step(state, BATCH) if label % 2 == 0 else state
            said.append([m.save(label, args=ocp.args.StandardSave(state)) for m in (stock, ours)])
        assert said == [[True, True], *[[False, False]] * 5]


def test_a_start_driven_policy_beside_labels(tmp_path):
    policy = Any([Every(6), managers.ContinuousCheckpointingPolicy(minimum_interval_secs=3600)])
    with manage(tmp_path, save_decision_policy=policy) as manager:
        assert_foreseen(manager, [0], [6, 12], range(14))


def test_should_save_may_be_asked_too(tmp_path):
    with manage(tmp_path, save_decision_policy=managers.ContinuousCheckpointingPolicy()) as manager:
        said = []

        def ask(label):
            said.append(manager.should_save(label) == manager.should_save(label))
            return True

        saved = run(manager, range(12), call=ask)
        assert all(said)
        assert kinds(manager) == expected([0, 1], [4, 7, 10])
        assert_restores(manager, saved)


class Due:
    """A policy by time, whose time has come; it counts how often it is asked."""

    asked = 0

    def should_save(self, step, previous_steps, *, context):
        self.asked += 1
        return True


def session_at(version, steps=4, between=1, agree=True):
    """As much of a session as such a policy looks at; its windows may have 8 steps at most."""
    predictor = SimpleNamespace(
        is_started=False, expected=[], saved_at=0, updates_between_calls=between,
        has_saved_since=lambda since: predictor.saved_at >= since,
        expect=lambda until: predictor.expected.append(until),
    )  # fmt: skip
    return SimpleNamespace(
        version=version, predictor=predictor, window_steps=steps,
        options=WindowOptions(max_steps=8),
        processes=SimpleNamespace(all_say=lambda subject, mine: agree),
    )  # fmt: skip


def test_the_yes_of_a_policy_by_time_holds_from_the_windows_end_until_a_save():
    session, due = session_at(10), Due()
    policy, said = StartsWindow(due, session), []
    for session.version in range(10, 17):
        said.append(policy.should_save(None, (), context=None))
    assert said == [False] * 3 + [True] * 4
    assert (due.asked, session.predictor.expected) == (1, [13])
    session.predictor.saved_at = session.version = 17
    assert not policy.should_save(None, (), context=None)
    assert (due.asked, session.predictor.expected) == (2, [13, 20])


@pytest.mark.parametrize(
    ("session", "until"),
    [
        (session_at(10, between=2), 14),  # at a call
        (session_at(10, between=8), 18),
        (session_at(10, between=9), None),  # longer than a window
        (session_at(10, between=None), None),
        (session_at(10, steps=1), None),
        (session_at(10, agree=False), None),  # the others are at other versions
    ],
)
def test_where_a_policy_by_time_ends_its_window(session, until):
    policy = StartsWindow(Due(), session)
    assert policy.should_save(None, (), context=None) == (until is None)
    assert session.predictor.expected == ([] if until is None else [until])
    assert session.predictor.is_started == (until is not None)


def test_a_policy_by_time_that_starts_no_window_any_more_leaves_the_next_to_the_period():
    session = session_at(10)
    policy = StartsWindow(Due(), session)
    assert not policy.should_save(None, (), context=None)
    assert session.predictor.is_started
    session.predictor.saved_at = session.version = 13
    session.predictor.updates_between_calls = None
    assert policy.should_save(None, (), context=None)
    assert not session.predictor.is_started


# Loops that ask first, and call `save` where the answer is yes.


@pytest.mark.parametrize(
    ("policy", "snapshots", "windows"),
    [
        (Every(5), [0], [5, 10, 15]),
        (managers.ContinuousCheckpointingPolicy(), [0, 1], [4, 7, 10, 13, 16]),
    ],
)
def test_a_loop_that_asks_first(tmp_path, policy, snapshots, windows):
    with manage(tmp_path, save_decision_policy=policy) as manager:
        assert_foreseen(manager, snapshots, windows, call=manager.should_save)


def test_a_loop_that_asks_first_and_then_itself(tmp_path):
    """The yes of a policy by time holds until the loop saves, or it never would."""
    with manage(tmp_path, save_decision_policy=managers.ContinuousCheckpointingPolicy()) as manager:
        saved = run(manager, call=lambda n: manager.should_save(n) and n % K == 0)
        assert len(saved) >= 4
        assert list(saved) == [r.step for r in manager.reports]
        assert_restores(manager, saved)


@pytest.mark.parametrize("several", [False, True])
def test_of_several_processes_one_may_ask_alone(tmp_path, monkeypatch, several):
    """What it foresaw would be another window than the others', so questions tell no label."""
    with GoCkptManager(tmp_path, options=Options(save_decision_policy=Every(3))) as manager:
        predictor = manager._gockpt_session.predictor
        monkeypatch.setattr(predictor, "is_alone", not several)
        run(manager, range(2), call=manager.should_save)
        assert predictor.next_save(2, K) == (None if several else 4)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(
    ("policy", "snapshots", "windows"),
    [
        (Every(3), [], [3, 6, 9]),
        (managers.ContinuousCheckpointingPolicy(), [1, 2], [4, 6, 8, 10]),
    ],
)
def test_labels_that_stand_for_two_updates(tmp_path, policy, snapshots, windows, asks):
    """Gradients are accumulated: the labels count what the optimizer has done."""
    with manage(tmp_path, save_decision_policy=policy) as manager:

        def call(n):
            return n % 2 == 1 and (not asks or manager.should_save((n + 1) // 2))

        assert_foreseen(manager, snapshots, windows, [(n + 1) // 2 for n in range(21)], call=call)


def test_a_policy_by_time_is_not_made_to_wait_for_longer_than_a_window(tmp_path):
    """A loop that calls `save` once in an epoch saves at its end, not at that of the next."""
    with manage(tmp_path, save_decision_policy=managers.ContinuousCheckpointingPolicy()) as manager:
        saved = run(manager, [n // 5 for n in range(21)], call=lambda n: n % 5 == 4)
        assert list(saved) == [0, 1, 2, 3]
        assert_restores(manager, saved)


def test_a_start_driven_policy_in_a_loop_that_rarely_calls_save(tmp_path):
    """It would not be called where the window ends: the save is at once, and then has a period."""
    with manage(tmp_path, save_decision_policy=managers.ContinuousCheckpointingPolicy()) as manager:
        assert_foreseen(manager, [3, 7], [11, 15], range(16), call=lambda n: n % 4 == 3)


# By the period of saves, or told.

UPDATES = range(1, 22)


@pytest.mark.parametrize(
    ("labels", "snapshots", "windows"),
    [
        pytest.param(range(21), [4, 9], [14, 19], id="loop indices"),
        pytest.param(range(1001, 1022), [1005, 1010], [1015, 1020], id="update counts"),
        pytest.param([n // 5 for n in range(21)], [0, 1], [2, 3], id="epochs"),
        pytest.param([512 * n for n in UPDATES], [2560, 5120], [7680, 10240], id="examples"),
    ],
)
def test_saves_gated_by_the_loop(tmp_path, labels, snapshots, windows):
    """`save` is called every fifth update, with whatever the loop counts."""
    with GoCkptManager(tmp_path, window=WindowOptions(steps=K)) as manager:
        assert_foreseen(manager, snapshots, windows, labels, call=lambda n: n % 5 == 4)


@pytest.mark.parametrize("offset", [0, 1, 1000])
def test_two_consecutive_labels_tie_labels_to_updates(tmp_path, offset):
    """A run that goes on at any label: two calls of `save`, then the policy is counted on."""
    with manage(tmp_path, save_decision_policy=Every(5)) as manager:
        labels = range(offset, offset + 16)
        saved = run(manager, labels)
        due = [x for x in labels if x % 5 == 0]
        late = [x for x in due if x < offset + 4]
        assert kinds(manager) == expected(late, [x for x in due if x not in late])
        assert_restores(manager, saved)


def test_a_save_that_is_expected_and_forced(tmp_path):
    """A forced save at the version that the window ends at is that window's."""
    with manage(tmp_path, save_interval_steps=1000) as manager:

        def expect(n):
            if n in (5, 10):
                manager.expect_save(in_steps=4)

        saved = run(manager, range(16), force=lambda n: n in (8, 12, 13), before=expect)
        # Expected after the 9th and 14th update; the 13th label is forced, the 12th came early.
        assert kinds(manager) == expected([0, 12], [8]) | {13: "snapshot 1"}
        assert_restores(manager, saved)


def test_two_windows_in_vain(tmp_path, caplog):
    with manage(tmp_path, save_interval_steps=5) as manager:
        saved = run(manager, range(32), call=lambda n: n < 6 or n > 23)
        # At 10 and 15 nobody called; from then on nothing is predicted until a save is accepted.
        assert kinds(manager) == expected([0, 25], [5, 30])
        assert_restores(manager, saved)
    assert [r.levelname for r in caplog.records if r.name == "gockpt_jax"].count("WARNING") == 1


# Continuity.


@jax.jit
def sgd(state, x):
    grads = jax.grad(lambda w: jnp.sum(jnp.cosh(w["a"] * x) + jnp.cosh(w["b"] + x)))(state["w"])
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + g * g, state["v"], grads)
    w = jax.tree.map(lambda w, m: w - state["rate"] * m, state["w"], m)
    return {"m": m, "v": v, "w": w, "rate": state["rate"]}


def start():
    w = {"a": jnp.ones(64), "b": jnp.ones(64)}
    zeros = jax.tree.map(jnp.zeros_like, w)
    return {"m": zeros, "v": jax.tree.map(jnp.copy, zeros), "w": w, "rate": jnp.float32(0.01)}


def inject_rate(state):
    return state | {"rate": jnp.float32(0.001)}


def prune(state):
    return state | {"w": state["w"] | {"b": jnp.where(state["w"]["b"] > 0.9, state["w"]["b"], 0)}}


def prune_in_place(state):
    state["w"]["b"] = prune(state)["w"]["b"]  # in the very containers that the step returned
    return state


def restore_moments(state):
    return state | {"m": start()["m"]}


@pytest.mark.parametrize("at", [9, 10])
@pytest.mark.parametrize(
    ("edit", "path"),
    [
        (inject_rate, None), (prune, "['w']['b']"), (prune_in_place, "['w']['b']"),
        (restore_moments, "['m']['b']"),
    ],
)  # fmt: skip
def test_edited_leaves_become_late(tmp_path, edit, path, at):
    """Before the first or second step of the window of save 10, when `b` or nothing had left."""
    with manage(tmp_path, save_interval_steps=5) as manager:
        step, state, saved = manager.wrap(sgd), start(), {}
        for label in range(16):
            if label == at:
                state = edit(state)
            state = step(state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        assert_restores(manager, saved)
        report = next(r for r in manager.reports if r.step == 10)
        assert report.kind == "window"
        late = (f"{path}: not what the step before returned: replaced, or of another state",)
        assert report.late_leaves == (late if path and at == 10 else ())
        assert manager.last_report.late_leaves == ()


@pytest.mark.parametrize("edit", [prune, prune_in_place])
def test_what_is_edited_before_the_save_is_saved_as_it_is(tmp_path, edit):
    with manage(tmp_path, save_interval_steps=5) as manager:
        step, state = manager.wrap(sgd), start()
        for label in range(11):
            state = step(state, BATCH)
            state = edit(state) if label == 10 else state
            manager.save(label, args=GoCkptSave(state))
        manager.wait_until_finished()
        assert_restores(manager, {10: to_host(state)})
        assert manager.last_report.kind == "window"


@pytest.mark.sampled
@pytest.mark.parametrize("new", [0.001, 1, np.float32(0.001)], ids=lambda new: type(new).__name__)
@pytest.mark.parametrize("at", [14, 12, 15, 16, 17])
def test_a_number_that_is_written_into_the_state(tmp_path, new, at):
    """In place, outside a window, before its step or its save: one edit, and windows go on."""
    with manage(tmp_path, save_interval_steps=5) as manager:
        step, state, plain, saved = manager.wrap(sgd), start(), start(), {}
        for label in range(41):
            state, plain = step(state, BATCH), sgd(plain, BATCH)
            if label == at:
                state["rate"] = plain["rate"] = new
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        assert_restores(manager, saved)
        assert_same(state, plain)
        assert sorted(saved) == list(range(0, 41, 5))
        assert [kinds(manager)[n] for n in (5, 10, 35, 40)] == [f"window {K}"] * 4


def test_what_is_on_the_host_leaves_no_device(tmp_path):
    """Taken there before the first step of the window of save 10: it is late, and no more."""
    with manage(tmp_path, save_interval_steps=5) as manager:
        step, state, saved = manager.wrap(sgd), start(), {}
        for label in range(11):
            if label == 9:
                state = state | {"m": jax.tree.map(np.array, state["m"])}
            state = step(state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        assert_restores(manager, saved)
        assert manager.last_report.kind == "window"
        (late,) = manager.last_report.late_leaves
        assert late == "['m']['b']: a `ndarray`, on no device, when it was to leave"


def test_stock_arguments_are_foreseen_alike(tmp_path):
    with manage(tmp_path, save_interval_steps=5) as manager:
        train(manager, range(11), save_args=lambda s, _: {"args": ocp.args.StandardSave(s)})
        assert kinds(manager) == expected([0], [5, 10])


# Labels that stock refuses without asking the policy.


@pytest.fixture
def opened(monkeypatch):
    """Versions of the saves that windows were opened for."""
    targets = []
    begin = OpenWindow.__init__

    def noted(self, program, planned, target, *rest, **by_name):
        targets.append(target)
        begin(self, program, planned, target, *rest, **by_name)

    monkeypatch.setattr(OpenWindow, "__init__", noted)
    return targets


@pytest.mark.parametrize("is_new", [False, True])
def test_no_window_opens_for_labels_that_were_saved_before_the_run_went_back(
    tmp_path, is_new, opened, caplog
):
    """Checkpoints up to 15, on from 5: stock refuses 10 and 15, and so no window is for them."""
    options, window = Options(save_interval_steps=5), WindowOptions(steps=K)
    manager = GoCkptManager(tmp_path, options=options, window=window)
    run(manager, range(17))
    if is_new:
        manager.close()
        manager = GoCkptManager(tmp_path, options=options, window=window)
    with manager:
        step, state = manager.wrap(update), manager.restore(5, args=GoCkptRestore(fresh()))
        before, version = len(opened), manager._gockpt_session.version
        saved = {}
        for label in range(6, 27):
            state = step(state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        assert list(saved) == [20, 25]
        assert [version + label - 5 for label in saved] == opened[before:]
        assert [r.kind for r in manager.reports[-2:]] == ["window", "window"]
        assert not [r for r in caplog.records if r.name == "gockpt_jax" and r.levelname != "INFO"]
        assert_restores(manager, saved)


def test_of_deleted_labels_they_open_again(tmp_path, opened):
    with manage(tmp_path, save_interval_steps=5) as manager:
        run(manager, range(12))
        manager.delete(10)
        step, state = manager.wrap(update), manager.restore(5, args=GoCkptRestore(fresh()))
        del opened[:]
        for label in range(6, 12):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
        assert opened == [12 + 5]


def test_no_window_opens_behind_a_save_that_waits(tmp_path):
    """Its label is the newest, though Orbax does not know of it."""
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=5)) as manager:
        saves, will_save = manager._gockpt_saves, manager._gockpt_session.predictor.is_save_label
        assert [label for label in range(16) if will_save(label)] == [0, 5, 10, 15]
        saves._room._waiting = SimpleNamespace(step=10)
        assert [label for label in range(16) if will_save(label)] == [15]
        saves._room._waiting = None


def test_a_window_whose_save_did_not_come_is_no_reason_for_a_later_one(tmp_path, opened):
    with manage(tmp_path, save_interval_steps=5) as manager:
        run(manager, range(14), call=lambda n: n != 10, force=lambda n: n == 13)
        assert opened == [6, 11]
        assert manager.last_report.step == 13
        assert "so no window was open; `manager.expect_save(" in manager.last_report.reason
