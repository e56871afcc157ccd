"""The wrapped step: the user's own in all respects, unless a window is open."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import re
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gockpt_jax as gockpt
from gockpt_jax.training import program as program_module
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.unarmable import CannotArmError
from gockpt_jax.training.wrap import wrap_step
from gockpt_jax.training.wrapped import ArmedCall

WAIT_SECS = 60
X = jnp.arange(8.0)


def update(state, x):
    m = 0.9 * state["m"] + jnp.tanh(x)
    return {"m": m, "w": state["w"] - 0.1 * m}


def fresh(size=8):
    return {"m": jnp.zeros(size), "w": jnp.ones(size)}


class Observer:
    """Asks for the armed step at some updates, and keeps what it is told."""

    def __init__(self, armed_at=()):
        self.armed_at = armed_at
        self.cuts: list[bool] = []
        self.refusals: list[str] = []

    def before_update(self, step, args, kwargs):
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
        assert not any(x.is_deleted() for x in arrays)
        if len(self.cuts) not in self.armed_at:
            return None
        step.turn_to(args, kwargs)
        step.arm()
        if step.program is None:
            return None
        step.program.wait_until_ready()
        try:
            return ArmedCall(step.program, step.program.flat_call(args, kwargs))
        except TypeError:
            step.call_changed()
            return None

    def after_update(self, step, armed):
        assert armed is None or step.last.new_state is not None
        self.cuts.append(armed is not None)

    def no_update(self, reason):
        self.refusals.append(reason)

    def no_room(self, error):
        self.refusals.append(error)


def wrap(step, observer=None, *, state=0, state_out=None, arm="window"):
    options = gockpt.WindowOptions(arm=arm, steps=2)
    return wrap_step(step, observer or Observer(), options, state=state, state_out=state_out)


def run(step, state, steps, batches=lambda n: X * n):
    for n in range(steps):
        state = step(state, batches(n))
    return state


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# Unperturbed.


@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("armed_at", [(), (3, 4, 6)])
def test_results_are_the_users(arm, armed_at):
    observer = Observer(armed_at)
    jitted = jax.jit(update, donate_argnums=0)
    state = run(wrap(jitted, observer, arm=arm), fresh(), 8)
    assert_same(state, run(jitted, fresh(), 8))
    assert observer.cuts == [n in armed_at for n in range(8)]


class Unsteady(Observer):
    """Fails once, behind a step."""

    def after_update(self, step, armed):
        super().after_update(step, armed)
        if len(self.cuts) == 5:
            raise RuntimeError("injected")


@pytest.mark.parametrize("armed_at", [(), (3, 4, 5)])
def test_what_goes_wrong_behind_a_step_does_not_lose_what_that_has_returned(armed_at, caplog):
    """It was given the only other state there was."""
    jitted, observer = jax.jit(update, donate_argnums=0), Unsteady(armed_at)
    step = wrap(jitted, observer)
    with pytest.warns(gockpt.SnapshotOnlyWarning, match="follows a step failed with RuntimeError"):
        state = run(step, fresh(), 8)
    assert_same(state, run(jitted, fresh(), 8))
    assert step.program is None
    assert observer.cuts == [n in armed_at and n < 5 for n in range(8)]
    assert [str(r.exc_info[1]) for r in caplog.records] == ["injected"]


def test_beside_other_processes_it_ends_the_job(monkeypatch):
    """They run armed steps, and this one would not any more: they would wait for it."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="injected"):
        run(wrap(jax.jit(update, donate_argnums=0), Unsteady()), fresh(), 8)


@pytest.mark.parametrize("arm", ["window", "always"])
def test_the_users_python_is_traced_no_more_often(arm):
    traces = []

    def counted():  # a new function each time: jit caches by function
        traces.clear()

        def step(state, x):
            traces.append(x.shape)
            return update(state, x)

        return jax.jit(step, donate_argnums=0)

    run(counted(), fresh(), 6)
    alone = len(traces)
    run(wrap(counted(), Observer((3, 4)), arm=arm), fresh(), 6)
    assert len(traces) == alone == 1


def test_the_users_executable_is_compiled_once():
    jitted = jax.jit(update, donate_argnums=0)
    run(wrap(jitted, Observer((3,))), fresh(), 6)
    assert jitted._cache_size() == 1


@pytest.mark.parametrize(("moves", "known"), [(False, 1), (True, 2)])
def test_not_armed_before_placements_settle(moves, known):
    """The second call may still see other shardings than the third."""
    step = wrap(jax.jit(update, donate_argnums=0))
    state, armed = fresh(), []
    for n in range(4):
        state = step(state, jax.device_put(X * n, jax.devices()[0]) if moves and n else X * n)
        armed.append(step.program is not None)
    assert armed == [n >= known for n in range(4)]


@pytest.mark.parametrize("kinds", [2, 3])
def test_calls_of_several_kinds_from_the_first_on_settle_too(kinds):
    """Two in a row return results of different structures; their states lie alike."""

    @functools.partial(jax.jit, static_argnames="logs", donate_argnums=0)
    def logging(state, x, logs):
        return [jnp.sum(x)] * logs, update(state, x)

    step, state = wrap(logging, Observer({5, 6})), fresh()
    for n in range(7):
        _, state = step(state, X * n, logs=n % kinds)
    assert step.program is not None


@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize(
    "clear", [lambda step: jax.clear_caches(), lambda step: step.clear_cache()]
)
@pytest.mark.parametrize("at", [2, 5, 6])
def test_a_step_that_is_traced_anew_is_another(arm, clear, at):
    """As with a global that it reads, changed before JAX's caches are cleared."""

    def train(wrapped):
        rate = [0.1]
        jitted = jax.jit(lambda state, x: {"m": state["m"] * 0.5 + x * rate[0]}, donate_argnums=0)
        step, state = wrapped(jitted), {"m": jnp.ones(8)}
        for n in range(12):
            if n == at:
                rate[0] = 0.3
                clear(jitted)
            state = step(state, X * n)
        return state

    observer = Observer(range(3, 12))
    state = train(lambda step: wrap(step, observer, arm=arm))
    assert_same(state, train(lambda step: step))
    # What is traced and not yet armed is found to be forgotten when it is.
    traced_anew_at = 3 if (arm, at) == ("window", 2) else at
    assert observer.cuts == [n >= 3 and n != traced_anew_at for n in range(12)]


def test_the_new_state_is_the_part_that_the_loop_gives_back():
    """Of two that are alike: what a step returns first may be its gradients."""
    observer, state = Observer((3,)), fresh()
    step = wrap(jax.jit(lambda s, x: (jax.tree.map(jnp.sin, s), update(s, x))), observer)
    for n in range(5):
        _, state = step(state, X * n)
    found = step.program.state_in(step.last)
    assert all(a is b for a, b in zip(found, jax.tree.leaves(state), strict=True))
    assert observer.cuts[3]


def test_of_parts_alike_the_first_is_taken_where_none_ever_comes_back():
    """A loop that copies its state, say: it was to be waited for a few calls only."""
    step, state = wrap(jax.jit(lambda s, x: (update(s, x), jax.tree.map(jnp.sin, s)))), fresh()
    for n in range(8):
        state = jax.tree.map(jnp.copy, step(state, X * n)[0])
    assert step.program.positions.outputs == (0, 1)


def test_the_new_state_is_found_where_the_loop_takes_it_out_of_the_result():
    observer, state = Observer((3,)), fresh()
    step = wrap(jax.jit(lambda s, x: {"a": jax.tree.map(jnp.sin, s), "b": update(s, x)}), observer)
    for n in range(5):
        state = step(state, X * n).pop("b")
    found = step.program.state_in(step.last)
    assert all(a is b for a, b in zip(found, jax.tree.leaves(state), strict=True))
    assert observer.cuts[3]


@pytest.mark.parametrize("armed_at", [(), (3,)])
@pytest.mark.parametrize("arm", ["window", "always"])
def test_what_comes_beside_the_state_lives_as_long_as_the_loop_has_it(arm, armed_at):
    observer, state = Observer(armed_at), fresh()
    step = wrap(jax.jit(lambda s, x: (update(s, x), jnp.ones(8) * x[0])), observer, arm=arm)
    for n in range(6):
        state, beside = step(state, X * n)
        dropped = weakref.ref(beside)
        del beside
        assert (dropped() is None) == (step.program is not None)
    assert step.program is not None
    found = step.program.state_in(step.last)
    assert all(a is b for a, b in zip(found, jax.tree.leaves(state), strict=True))


@pytest.mark.parametrize("arm", ["window", "always"])
def test_what_comes_beside_the_state_may_turn_out_to_be_it(arm):
    """Of parts that are alike the loop's own calls tell, of whatever kind: it still has them."""

    def train(s, x):
        return {"average": jax.tree.map(lambda a: a * 0.5, s), "state": update(s, x)}

    step, state = wrap(jax.jit(train), arm=arm), fresh()
    for n in range(6):
        state = step(state, (X[:1] if n == 0 else X) * n)["state"]
    found = step.program.state_in(step.last)
    assert all(a is b for a, b in zip(found, jax.tree.leaves(state), strict=True))


def test_a_step_that_returns_nothing_trains():
    """What it changes, it changes in place; its saves are snapshots."""
    state, ref = fresh(), jax.new_ref(jnp.zeros(3))

    def train(state, ref):
        ref[...] += 1

    step = wrap(jax.jit(train))
    for _ in range(3):
        assert step(state, ref) is None
    assert ref[...].tolist() == [3, 3, 3]


def test_nothing_is_held_of_a_step_that_cannot_be_armed():
    step = wrap(jax.jit(lambda s, x: update(s, x)))
    with pytest.warns(gockpt.SnapshotOnlyWarning, match="for a test"):
        step.give_up("for a test")
    dropped = [weakref.ref(x) for x in jax.tree.leaves(step(fresh(), X))]
    assert [x() for x in dropped] == [None] * len(dropped)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_is_let_go_of_is_not_held(steps):
    step = wrap(jax.jit(update))
    state = run(step, fresh(), steps)
    held = [weakref.ref(x) for x in jax.tree.leaves(state)]
    del state
    assert None not in [x() for x in held]
    step.last.let_go()
    assert [x() for x in held] == [None] * 2


@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("trained", [0, 1])
def test_the_first_call_may_be_an_evaluation(arm, trained):
    """Or the first behind a restore: nobody knows of another result, so none is missed."""

    def either(state, x, train):
        return update(state, x) if train else jnp.sum(x)

    step, state = wrap(jax.jit(either, static_argnames="train"), arm=arm), fresh()
    for _ in range(trained):
        state = step(state, X, train=True)
    step.last.let_go()
    step(state, X, train=False)
    for _ in range(3):
        state = step(state, X, train=True)
    assert step.program is not None


def test_changed_call_falls_back_to_the_users_step():
    observer = Observer((3, 4, 5, 6, 7))
    jitted = jax.jit(update, donate_argnums=0)
    batches = {4: X[:1], 6: X[:1]}
    state = run(wrap(jitted, observer), fresh(), 8, lambda n: batches.get(n, X))
    assert_same(state, run(jitted, fresh(), 8, lambda n: batches.get(n, X)))
    (refusal,) = observer.refusals
    assert refusal.startswith("the call changed")
    # An odd batch is a program of its own, once one was met: the second is found to be of its kind.
    assert observer.cuts == [n in (3, 5, 6, 7) for n in range(8)]


def test_of_a_call_that_changed_is_told_what_has_changed():
    """JAX says at length that something has, and what on the lines behind that."""
    observer = Observer((3,))
    run(wrap(jax.jit(update), observer), fresh(), 4, lambda n: X[:1] if n == 3 else X)
    told = "Argument `args[1]` compiled with float32[8] and called with float32[1]"
    assert observer.refusals == [f"the call changed: TypeError: {told}"]


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_what_the_users_own_callback_raises_is_no_call_that_changed(kind):
    """Of any kind it comes as the runtime's error; its words stay, and the step runs once."""
    called = []

    def check(x):
        called.append(float(x[0]))
        if len(called) == 4:
            raise kind("flat[0] is no number")

    @jax.jit
    def step(state, x):
        jax.debug.callback(check, x)
        return update(state, x)

    observer = Observer((3,))
    wrapped = wrap(step, observer)
    state = run(wrapped, fresh(), 3)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"flat\[0\] is no number"):
        jax.block_until_ready(wrapped(state, X))
    assert len(called) == 4
    assert not any("changed" in reason for reason in observer.refusals)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_of_a_call_that_changed_is_told_where_what_lies():
    mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    halves, whole = (jax.device_put(X, NamedSharding(mesh, P(*axes))) for axes in (["data"], []))
    observer = Observer((3,))
    state = jax.device_put(fresh(), NamedSharding(mesh, P()))
    run(wrap(jax.jit(update), observer), state, 4, lambda n: halves if n == 3 else whole)
    (reason,) = observer.refusals
    assert reason.startswith("the call changed: ValueError: Argument `args[1]` with shape")
    assert "PartitionSpec('data',)" in reason or "P('data',)" in reason


def test_a_step_that_is_to_be_traced_anew_says_of_which_change():
    step = wrap(jax.jit(update), Observer())
    assert step.why_no_program == "the step had not been traced yet"
    assert step.explain().startswith("no plan yet of such calls: as a rule the second")
    state = run(step, fresh(), 3)
    step.call_changed("`x` is longer")
    run(step, state, 1)
    step.call_changed("`x` is longer")
    assert step.program is None
    assert step.why_no_program == (
        "the step had not been traced yet in the way it is called now"
        " (last difference: `x` is longer)"
    )


def test_a_call_of_a_known_kind_is_not_traced_again_behind_one_that_was_refused():
    step = wrap(jax.jit(update), Observer())
    state = run(step, fresh(), 3)
    program = step.program
    step.call_changed("for a test")
    assert step.program is None
    run(step, state, 1)
    assert step.program is program


@pytest.mark.parametrize("arm", ["window", "always"])
def test_a_step_that_changes_for_good_now_and_then_keeps_its_windows(arm):
    """However often, if it has run armed in between."""
    observer = Observer(range(100))
    step = wrap(jax.jit(lambda state, x: update(state, jnp.sum(x))), observer, arm=arm)
    run(step, fresh(), 36, lambda n: jnp.ones(n // 6 + 1))
    assert step.why_not is None
    assert observer.cuts[-1]


@pytest.mark.parametrize("arm", ["window", "always"])
def test_an_odd_batch_at_each_epochs_end_is_a_program_of_its_own(arm):
    """With no save in the first two epochs, too, and traced once."""
    odd, saves = range(4, 60, 5), [n for n in range(12, 60) if n % 10 in (2, 3, 4)]
    observer = Observer(saves)
    step = wrap(jax.jit(lambda state, x: update(state, jnp.sum(x))), observer, arm=arm)
    run(step, fresh(), 60, lambda n: jnp.ones(3 if n in odd else 8))
    met_at = 14 if arm == "window" else None
    assert [n for n in range(60) if observer.cuts[n]] == [n for n in saves if n != met_at]
    assert len(observer.refusals) == (arm == "window")


def two_kinds():
    """A step with a program for each, and what it needs to be called again."""
    step = wrap(jax.jit(lambda state, x: update(state, jnp.sum(x))), Observer(range(2, 9)))
    state = run(step, fresh(), 8, lambda n: jnp.ones(8 if n % 2 else 3))
    programs = [step._kinds.of((state, jnp.ones(n)), {}) for n in (8, 3)]
    assert None not in programs
    return step, state, [weakref.ref(program) for program in programs]


@pytest.mark.usefixtures("its_own_garbage")
def test_programs_of_which_no_more_is_known_are_not_kept():
    step, state, programs = two_kinds()
    jax.clear_caches()
    run(step, state, 1, lambda _: jnp.ones(8))
    gc.collect()
    assert [program() for program in programs] == [None, None]


@pytest.mark.usefixtures("its_own_garbage")
def test_a_step_that_is_given_up_keeps_no_programs():
    step, _, programs = two_kinds()
    with pytest.warns(gockpt.SnapshotOnlyWarning, match="for a test"):
        step.give_up("for a test")
    gc.collect()
    assert [program() for program in programs] == [None, None]


@pytest.mark.parametrize("error", [CannotArmError("injected"), KeyError("injected")])
def test_a_kind_of_call_that_cannot_be_armed_leaves_the_others_their_windows(monkeypatch, error):
    """Nor is it looked at for ever."""
    tried, init = [], StepProgram.__init__

    def only_long_batches(program, step, form, args, kwargs, **rest):
        if args[1].size < 8:
            tried.append(args[1])
            raise error
        init(program, step, form, args, kwargs, **rest)

    monkeypatch.setattr(StepProgram, "__init__", only_long_batches)
    observer = Observer(range(2, 40))
    step = wrap(jax.jit(lambda state, x: update(state, jnp.sum(x))), observer)
    run(step, fresh(), 40, lambda n: jnp.ones(8 if n % 2 else 3))
    assert step.why_not is None
    assert observer.cuts == [n > 2 and n % 2 == 1 for n in range(40)]
    assert len(tried) < 10


@pytest.mark.parametrize("all_kinds", [False, True])
@pytest.mark.parametrize("arm", ["window", "always"])
def test_a_kind_of_call_that_jax_refuses_leaves_the_others_their_windows(
    monkeypatch, arm, all_kinds
):
    """Nor is it compiled again and again."""
    executable, armed, arming = StepProgram.executable, [], StepProgram.arm

    def refuse(*flat):
        raise ValueError("it lies otherwise")

    def of_long_batches(program):
        found = executable(program)
        return lambda *flat: (refuse if all_kinds or flat[-1].size < 8 else found)(*flat)

    monkeypatch.setattr(StepProgram, "executable", of_long_batches)
    monkeypatch.setattr(StepProgram, "arm", lambda program: armed.append(arming(program)))
    observer = Observer(range(2, 40))
    step = wrap(jax.jit(lambda state, x: update(state, jnp.sum(x))), observer, arm=arm)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(step, fresh(), 40, lambda n: jnp.ones(3 if n % 2 else 8))
    assert len(armed) <= 2
    assert len(told) == all_kinds
    assert (step.why_not is not None) == all_kinds
    if not all_kinds:
        assert observer.cuts[6:] == [n % 2 == 0 for n in range(6, 40)]
        step.turn_to((fresh(), jnp.ones(3)), {})
        assert "the very call" in step.program.why_not_ready()


def test_an_evaluation_through_the_step_is_no_new_program():
    """It returns no state; with "always" each call that is another way is traced."""

    def either(state, x, train):
        return update(state, x) if train else jnp.sum(x)

    step = wrap(jax.jit(either, static_argnames="train"), arm="always")
    state = step(step(fresh(), X, train=True), X, train=True)
    program = step.program
    for train in (False, False, True):
        step(state, X, train=train)
        assert step.program is program
    assert program.is_armed


def test_a_step_that_cannot_be_traced_again_warns_once(monkeypatch):
    """It runs, so it is no mistake of the call's."""
    jitted, observer = jax.jit(update), Observer(range(8))
    untraceable = Failing(jitted)
    untraceable.trace = Failing(None, times=8)
    step = wrap(jitted, observer)
    monkeypatch.setattr(step, "step", untraceable)
    with pytest.warns(gockpt.SnapshotOnlyWarning, match="tracing it failed with Runt") as told:
        state = run(step, fresh(), 5)
    assert len(told) == 1
    assert_same(state, run(jitted, fresh(), 5))


def test_a_warning_that_is_an_error_says_what_it_warned_of(monkeypatch):
    untraceable = Failing(jax.jit(update))
    untraceable.trace = Failing(None, times=8)
    step = wrap(jax.jit(update))
    monkeypatch.setattr(step, "step", untraceable)
    with pytest.raises(gockpt.SnapshotOnlyWarning, match=r"^[^:]*: tracing it failed with"):
        run(step, fresh(), 5)


def test_another_program_of_the_same_shapes_is_the_users():
    """What `jax.jit` traces anew for, and a compiled program would take."""
    jitted = jax.jit(lambda s, x, p, q: update(s, x.astype(jnp.bfloat16) * p * q), static_argnums=3)
    calls = [(0.1, 2), (0.1, 2.0), (jnp.float32(0.1), 2), (0.1, 2)]

    def train(step):
        state = fresh()
        for n in range(10):
            state = step(state, X / 7, *calls[max(0, n - 6)])
        return state

    observer = Observer(range(3, 10))
    assert_same(train(wrap(jitted, observer)), train(jitted))
    assert observer.cuts == [n in (3, 4, 5, 6, 9) for n in range(10)]
    assert len(observer.refusals) == 2  # the last call is of the first kind again


def test_armed_under_other_settings_than_it_was_traced_for():
    """It would be lowered for these: it is traced anew."""
    observer = Observer((4, 5, 7))
    jitted = jax.jit(lambda s, x: update(s, x + jax.random.normal(jax.random.key(0), x.shape)))

    def train(step):
        state = fresh()
        for n in range(8):
            with jax.threefry_partitionable(n in (4, 5)):
                state = step(state, X)
        return state

    assert_same(train(wrap(jitted, observer)), train(jitted))
    assert observer.cuts[4:6] == [False, True]
    assert observer.refusals == []  # nor is one compiled for these that takes calls under others


@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("moved_at", range(1, 9))
def test_a_state_moved_between_calls_stays_where_it_was_put(arm, moved_at):
    """The armed step returns placements of a call like its own, whenever it was traced."""
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    spread, folded = (NamedSharding(mesh, P(*axes)) for axes in (("a", "b"), (None, "a")))

    def train(step):
        state, places = jax.device_put(fresh((8, 8)), spread), []
        for n in range(16):
            state = jax.device_put(state, folded) if n == moved_at else state
            state = step(state, jnp.ones((8, 8)) * n)
            places.append([x.sharding for x in jax.tree.leaves(state)])
        return places, state

    observer, jitted = Observer((3, 4, 5, 6, 12, 13, 14, 15)), jax.jit(update, donate_argnums=0)
    places, state = train(wrap(jitted, observer, arm=arm))
    alone_places, alone = train(jitted)
    assert places == alone_places
    assert_same(state, alone)
    assert observer.cuts[15]


def test_with_always_a_changed_call_is_a_new_program_at_once():
    """So that few steps run by another executable than the others."""
    observer, step = Observer(range(8)), jax.jit(update, donate_argnums=0)
    run(wrap(step, observer, arm="always"), fresh(), 8, lambda n: X[:1] if n < 4 else X)
    assert observer.cuts == [n != 4 for n in range(8)]


def test_with_always_each_kind_of_call_runs_armed_outside_windows_too(monkeypatch):
    """Or which executable a step runs by would rest on when saves are due."""
    ran, call = [], StepProgram.call

    def seen(program, *args):
        found = call(program, *args)
        ran.append(program)
        return found

    monkeypatch.setattr(StepProgram, "call", seen)
    step = wrap(jax.jit(lambda state, x: update(state, jnp.sum(x))), arm="always")
    run(step, fresh(), 9, lambda n: jnp.ones(8 if n % 2 else 3))
    assert [ran.count(program) for program in dict.fromkeys(ran)] == [5, 3]  # of 5 and 4


@pytest.mark.parametrize("arm", ["window", "always"])
def test_parameters_that_have_the_structure_of_moments_are_found_behind_these(arm):
    """Where the results are of several structures: nobody knows yet what comes back."""

    def train(params, opt, x, logs):
        m = {"w": 0.9 * opt[0]["w"] + jnp.tanh(x)}
        params = {"w": params["w"] - 0.1 * m["w"]}
        return [jnp.sum(x)] * logs, {"opt": (m, opt[1] + 1), "trained": {"net": {"of": params}}}

    observer = Observer(range(8, 30))
    jitted = jax.jit(train, donate_argnums=(0, 1), static_argnames="logs")
    step = wrap(jitted, observer, state=("params", "opt"), arm=arm)
    params, opt = {"w": jnp.ones(8)}, ({"w": jnp.zeros(8)}, 0)
    for n in range(30):
        _, new = step(params, opt, X * n, logs=n % 3)
        params, opt = new["trained"]["net"]["of"], new["opt"]
    assert all(observer.cuts[20:])
    found = step.program.state_in(step.last)
    assert [x is y for x, y in zip(found, jax.tree.leaves((params, opt)), strict=True)] == [
        True
    ] * 3


class TellingLock:
    """A lock that says when another thread than this one comes for it."""

    def __init__(self, lock, has_come):
        self.lock, self.has_come, self.here = lock, has_come, threading.current_thread()

    def __enter__(self):
        if threading.current_thread() is not self.here:
            self.has_come.set()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_with_always_two_threads_arm_a_program_once(monkeypatch):
    """The first call's is lowered; another thread's call, which begins meanwhile, waits for it."""
    step, arm, other = wrap(jax.jit(update), arm="always"), StepProgram.arm, []
    has_come, armed = threading.Event(), []
    monkeypatch.setattr(step, "_arming", TellingLock(step._arming, has_come))

    def with_another(program):
        armed.append(program)
        if len(armed) == 1:
            other.append(thread.submit(run, step, fresh(), 4))
            assert has_come.wait(WAIT_SECS)
        else:
            has_come.set()
        arm(program)

    monkeypatch.setattr(StepProgram, "arm", with_another)
    with ThreadPoolExecutor(1) as thread:
        states = run(step, fresh(), 4), other[0].result(WAIT_SECS)
    for state in states:
        assert_same(state, run(jax.jit(update), fresh(), 4))
    assert armed == [step.program]
    assert step.why_not is None


def test_with_always_a_signal_handler_may_step_while_a_program_is_armed(monkeypatch):
    """It runs on the thread that it interrupts, which holds the lock for that."""
    step, states = wrap(jax.jit(update), arm="always"), []
    take = step._adopt

    def interrupted(program):
        monkeypatch.setattr(step, "_adopt", take)
        states.append(run(step, fresh(), 2))
        take(program)

    monkeypatch.setattr(step, "_adopt", interrupted)
    # A daemon: if it fails here, it waits for ever.
    thread = threading.Thread(target=lambda: states.append(run(step, fresh(), 4)), daemon=True)
    thread.start()
    thread.join(WAIT_SECS)
    for state, steps in zip(states, (2, 4), strict=True):
        assert_same(state, run(jax.jit(update), fresh(), steps))
    assert step.program.is_armed


def test_with_always_a_program_that_another_thread_brings_is_armed_by_the_next_call():
    """Its calls are of another kind: one comes between this call's beginning and its dispatch."""

    class Meanwhile(Observer):
        def before_update(self, step, args, kwargs):
            if len(self.cuts) == 3 and not brought:
                brought.append(None)
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(step, fresh(), X[:1]).result(WAIT_SECS)
                step.arm()  # the session does, under its own lock alone
                assert not step.program.is_armed
            return super().before_update(step, args, kwargs)

    brought, observer = [], Meanwhile(range(5, 12))
    jitted = jax.jit(lambda state, x: update(state, jnp.sum(x)), donate_argnums=0)
    step = wrap(jitted, observer, arm="always")
    assert_same(run(step, fresh(), 8), run(jitted, fresh(), 8))
    run(step, fresh(), 2, lambda n: X[:1])
    assert brought
    assert observer.cuts == [n > 4 for n in range(11)]
    assert observer.refusals == []
    assert step.why_not is None


def test_shapes_that_never_settle_are_armed_a_few_times(monkeypatch):
    """Each is compiled once more than by the user's step, even if it runs armed."""
    armed, arm = [], StepProgram.arm

    def seen(program):
        armed.append(1)
        arm(program)

    monkeypatch.setattr(StepProgram, "arm", seen)
    observer, jitted = Observer(), jax.jit(lambda state, x: update(state, jnp.sum(x)))
    state = run(wrap(jitted, observer, arm="always"), fresh(), 8, lambda n: jnp.ones(n + 1))
    assert_same(state, run(jitted, fresh(), 8, lambda n: jnp.ones(n + 1)))
    assert armed == [1] * 3
    assert observer.refusals == []  # who has not asked is not told


@pytest.mark.parametrize("arm", ["window", "always"])
def test_shapes_that_never_settle_end_in_one_warning(arm):
    """Batches that are never padded: whenever the armed step is wanted, the shape is another."""
    observer = Observer({n for n in range(3, 30) if n % 3 != 2})
    step = wrap(jax.jit(lambda state, x: update(state, jnp.sum(x))), observer, arm=arm)
    with pytest.warns(
        gockpt.SnapshotOnlyWarning,
        match="changed shape.*keep them the same.*last difference: TypeError",
    ) as all_:
        run(step, fresh(), 30, lambda n: jnp.ones(n + 1))
    assert len(all_) == 1
    assert step.why_not is not None
    assert step.why_no_program == step.why_not


@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("restores", [False, True])
def test_a_call_that_the_step_refuses_says_nothing_of_others(arm, at, restores):
    """Before the step is traced, when it is to be traced, and later: windows are not given up.

    Also where the loop restores a checkpoint after it, so that nothing is known of the last result.
    """
    observer, state = Observer((4, 6, 7)), fresh()
    step = wrap(jax.jit(update, donate_argnums=0), observer, arm=arm)
    for n in range(8):
        if n == at:
            with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
                step(state, X, y=X)
            if restores:
                step.last.let_go()
        state = step(state, X * n)
    assert step.why_not is None
    assert observer.cuts[6:] == [True, True]


@pytest.mark.parametrize("arm", ["window", "always"])
def test_calls_that_the_step_refuses_cost_no_program(arm):
    """However many there are: the one that it had is for the others."""
    observer, state = Observer(range(5, 30)), fresh()
    step = wrap(jax.jit(update, donate_argnums=0), observer, arm=arm)
    state = run(step, state, 6)
    program = step.program
    for _ in range(8):
        with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
            step(state, X, y=X)
        assert step.program is program
    state = run(step, state, 2)
    assert observer.cuts[-2:] == [True, True]


class Failing:
    """A jitted step whose next calls fail as they run: out of memory, say."""

    def __init__(self, jitted, times=0):
        self.jitted, self.times = jitted, times

    def __getattr__(self, name):
        return getattr(self.jitted, name)

    def __call__(self, *args):
        if self.times:
            self.times -= 1
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return self.jitted(*args)


@pytest.mark.parametrize("arm", ["window", "always"])
def test_a_step_that_fails_as_it_runs_says_nothing_of_its_arguments(monkeypatch, arm):
    """However often it does, where it would have been traced."""
    observer, state, jitted = Observer((6, 7)), fresh(), jax.jit(update, donate_argnums=0)
    step = wrap(jitted, observer, arm=arm)
    batches = (X[:1], X) if arm == "always" else (X, X)
    state = step(state, batches[0])
    monkeypatch.setattr(step, "step", Failing(jitted, times=5))
    for _ in range(5):
        with pytest.raises(RuntimeError, match="EXHAUSTED"):
            step(state, batches[1])
    for _ in range(7):
        state = step(state, X)
    assert observer.cuts[6:] == [True, True]


def test_a_first_call_that_fails_is_tried_again_by_the_same_executable(monkeypatch):
    calls, call = [], StepProgram.call

    def fails_once(program, *args):
        calls.append(program)
        if len(calls) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return call(program, *args)

    monkeypatch.setattr(StepProgram, "call", fails_once)
    step, state = wrap(jax.jit(update, donate_argnums=0), arm="always"), fresh()
    with pytest.raises(RuntimeError, match="EXHAUSTED"):
        step(state, X)
    run(step, state, 2)
    assert calls == [step.program] * 3


@pytest.mark.parametrize("how", ["in_a_window", "always", "beside_others", "it_has_run", "another"])
def test_an_armed_step_without_room_gives_way_to_the_users(monkeypatch, how):
    """If the arguments are alive, and nobody waits for the armed one or wants no other."""
    observer, jitted = Observer((3,)), jax.jit(update, donate_argnums=0)
    step, state = wrap(jitted, observer, arm="always" if how == "always" else "window"), fresh()
    state = run(step, state, 3)
    text = "RESOURCE_EXHAUSTED: Out of memory."
    if how == "another":  # that of a service, say, which the step asks
        text = f"INTERNAL: CpuCallback error: {text}"
    full = jax.errors.JaxRuntimeError(text)
    call = StepProgram.call

    def fails(program, *args):
        if how == "it_has_run":
            call(program, *args)
        raise full

    monkeypatch.setattr(StepProgram, "call", fails)
    monkeypatch.setattr(jax, "process_count", lambda: 2 if how == "beside_others" else 1)
    if how != "in_a_window":
        with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
            step(state, X * 3)
        assert observer.cuts == [False] * 3
        assert observer.refusals == [f"the step raised {type(full).__name__}: {full}"]
        return
    state = step(state, X * 3)
    monkeypatch.setattr(StepProgram, "call", call)
    observer.armed_at = (5,)
    for n in (4, 5):
        state = step(state, X * n)
    assert_same(state, run(jitted, fresh(), 6))
    assert observer.refusals == [full]
    assert observer.cuts == [False] * 5 + [True]


def test_an_interrupt_while_it_is_armed_loses_no_state(monkeypatch):
    """At the first call, and where a batch of another shape makes another program."""
    step = wrap(jax.jit(update, donate_argnums=0), arm="always")
    lowered, with_outputs = [], program_module.with_outputs

    def interrupted_once_each(jaxpr, sites):
        lowered.append(id(jaxpr))
        if lowered.count(id(jaxpr)) == 1:
            raise KeyboardInterrupt
        return with_outputs(jaxpr, sites)

    def tried_again(state, x):
        try:
            return step(state, x)
        except KeyboardInterrupt:
            return step(state, x)

    def batches(n):
        return X[:1] * n if n else X

    monkeypatch.setattr(program_module, "with_outputs", interrupted_once_each)
    state = run(tried_again, fresh(), 5, batches)
    assert_same(state, run(jax.jit(update), fresh(), 5, batches))
    assert len(lowered) == 4
    assert step.program.is_armed


def test_what_jax_says_of_donation_it_says_of_the_users_step_alone():
    jitted = jax.jit(update, donate_argnums=(0, 1))  # the batch's buffer fits no result
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        run(jitted, fresh(), 1, lambda n: X[:1] * n)
    observer = Observer((3,))
    run(wrap(jitted, observer), fresh(), 5, lambda n: X[:1] * n)
    assert observer.cuts[3]


def test_an_error_of_the_user_passes_through():
    step = wrap(jax.jit(update))
    with pytest.raises(TypeError, match="incompatible shapes"):
        step(fresh(), jnp.ones(3))
    assert_same(run(step, fresh(), 4), run(jax.jit(update), fresh(), 4))


def test_a_state_without_leaves():
    observer = Observer((3,))
    step = wrap(jax.jit(lambda state, x: (state, jnp.sum(x))), observer)
    assert [step({}, X)[0] for _ in range(5)] == [{}] * 5
    assert observer.cuts == [n == 3 for n in range(5)]


# Methods.


class Updater:
    """Its step is a method, and it is static."""

    def __init__(self, rate):
        self.rate = rate

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def update(self, state, x):
        return update(state, self.rate * x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Agent:
    """Its step is a method too, and it is the state."""

    m: jax.Array
    w: jax.Array

    @jax.jit
    def update(self, x):
        return Agent(**update(vars(self), x))


@pytest.mark.parametrize("places", [{}, {"state": "state"}, {"state": -2}])
def test_a_bound_method(places):
    observer, updater = Observer((3, 4)), Updater(2.0)
    step = wrap(updater.update, observer, **places)
    state = run(step, fresh(), 6)
    assert_same(state, run(updater.update, fresh(), 6))
    assert step.__func__.program.positions.paths == ("['m']", "['w']")
    assert observer.cuts == [n in (3, 4) for n in range(6)]


@pytest.mark.parametrize(("owner", "places"), [(Updater, {"state": 1}), (Agent, {})])
def test_a_method_of_a_class(monkeypatch, owner, places):
    def train():
        updater, state = Updater(2.0), Agent(**fresh()) if owner is Agent else fresh()
        for n in range(6):
            state = state.update(X * n) if owner is Agent else updater.update(state, X * n)
        return state

    observer, alone = Observer((3, 4)), train()
    wrapped = wrap(owner.update, observer, **places)
    monkeypatch.setattr(owner, "update", wrapped)
    assert owner.update is wrapped
    assert_same(train(), alone)
    assert observer.cuts == [n in (3, 4) for n in range(6)]


@jax.tree_util.register_static
class Config:
    """It goes into its step, and holds no array."""

    @jax.jit
    def update(self, state, x):
        return update(state, x)


def test_a_method_bound_to_what_holds_no_array():
    observer = Observer((3,))
    state = run(wrap(Config().update, observer), fresh(), 5)
    assert_same(state, run(jax.jit(update), fresh(), 5))
    assert observer.cuts[3]


@pytest.mark.parametrize("w", [jnp.ones(8), 1.0])
def test_a_method_bound_to_the_state_itself(w):
    """It would start from that one again and again."""
    remedy = r"bound to one `Agent`, which holds arrays.*`Agent.update = manager.wrap\(Agent.up"
    with pytest.raises(gockpt.WrapError, match=remedy):
        wrap(Agent(m=jnp.zeros(8), w=w).update)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Scaler:
    """It holds an array, and is no state."""

    rate: jax.Array

    @functools.partial(jax.jit, static_argnums=0)
    def update(self, state, x):
        return update(state, self.rate * x)

    def update_unseen(self, state, x):
        return self.update(state, x)


def test_a_method_bound_to_what_is_static_or_not_known_to_be_the_state():
    observer, scaler = Observer((3,)), Scaler(jnp.float32(2.0))
    assert_same(run(wrap(scaler.update, observer), fresh(), 5), run(scaler.update, fresh(), 5))
    assert observer.cuts[3]
    with pytest.warns(gockpt.SnapshotOnlyWarning, match="`function` has no program to trace"):
        step = wrap(scaler.update_unseen)
    assert_same(run(step, fresh(), 2), run(scaler.update, fresh(), 2))


# What it looks like from outside.


def test_attributes_are_the_jitted_functions():
    jitted = jax.jit(update, donate_argnums=0)
    step = wrap(jitted)
    assert (step.__name__, step.__doc__) == ("update", jitted.__doc__)
    assert step.lower(fresh(), X).compile()(fresh(), X).keys() == {"m", "w"}
    assert step.eval_shape(fresh(), X)["m"].shape == (8,)
    assert step.trace(fresh(), X).jaxpr is not None
    with pytest.raises(AttributeError, match="no_such"):
        _ = step.no_such
    with pytest.raises(AttributeError, match="step"):  # nor has one that was not made yet
        _ = type(step).__new__(type(step)).no_such
    assert copy.copy(step) is copy.deepcopy(step) is step  # as of a function


@pytest.mark.parametrize(
    "abstract",
    [
        lambda step: jax.eval_shape(lambda x: step(fresh(), x), X),  # the state is no tracer
        lambda step: jax.grad(lambda x: step(fresh(), x)["w"].sum())(X),
        lambda step: jax.jit(lambda: step(fresh(), X))(),  # nor is anything else
        lambda step: jax.eval_shape(step, fresh(), X),
        lambda step: jax.jit(step)(fresh(), X),
        lambda step: jax.make_jaxpr(step)(fresh(), X),
        lambda step: jax.vmap(step)({k: x[None] for k, x in fresh().items()}, X[None]),
    ],
)
def test_traces_are_no_updates(abstract):
    observer = Observer()
    abstract(wrap(jax.jit(update), observer))
    assert observer.cuts == []


class Callable:
    """A step that has no name of its own."""

    def __call__(self, state, x):
        return update(state, x)


@pytest.mark.parametrize("step", [functools.partial(update), Callable()])
def test_steps_without_a_name(step):
    observer = Observer((3,))
    state = run(wrap(jax.jit(step), observer), fresh(), 5)
    assert observer.cuts[3]
    assert_same(state, run(jax.jit(update), fresh(), 5))


# What cannot be wrapped, or not armed.


@pytest.mark.parametrize("step", [None, 3, "step"])
def test_not_callable(step):
    with pytest.raises(gockpt.WrapError, match=f"needs a jitted train step.*{type(step).__name__}"):
        wrap(step)


def test_wrapped_twice():
    with pytest.raises(gockpt.WrapError, match="wrapped already; wrap it once"):
        wrap(wrap(jax.jit(update)))


@pytest.mark.parametrize(("name", "places"), [("state", 0.5), ("state_out", ())])
def test_places_are_checked_at_once(name, places):
    with pytest.raises(gockpt.WrapError, match=f"`{name}` must be a position"):
        wrap(jax.jit(update), **{name: places})


def compiled():
    return jax.jit(update).lower(fresh(), X).compile()


def pmapped():
    return jax.pmap(update)


@pytest.mark.parametrize(
    ("make", "first", "batch", "reason", "remedy"),
    [
        pytest.param(compiled, fresh, X, "`Compiled`", r"before `.lower\(\)", id="compiled"),
        pytest.param(lambda: update, fresh, X, "`function`", "one that it calls", id="python"),
        pytest.param(pmapped, lambda: {k: x[:, None] for k, x in fresh().items()}, X[:, None],
                     "pmap", "jax.jit.*mesh", id="pmap"),
    ],
)  # fmt: skip
def test_what_cannot_be_armed_warns_once_and_saves_snapshots(
    tmp_path, make, first, batch, reason, remedy
):
    with (
        warnings.catch_warnings(record=True) as caught,
        gockpt.GoCkptManager(tmp_path, window=gockpt.WindowOptions(steps=2)) as manager,
    ):
        warnings.simplefilter("always", gockpt.SnapshotOnlyWarning)
        step, state = manager.wrap(make()), first()
        for n in range(9):
            state = step(state, batch)
            if n % 3 == 2:
                manager.save(n, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        assert_same(manager.restore(8), jax.tree.map(np.asarray, state))
        assert [r.kind for r in manager.reports] == ["snapshot"] * 3
    (told,) = [w for w in caught if w.category is gockpt.SnapshotOnlyWarning]
    assert told.filename == __file__  # the line of the user's
    message = str(told.message)
    assert re.search(f"cannot be armed, so its saves are snapshots: .*{reason}", message)
    assert re.search(remedy, message)
    assert re.search(reason, manager.last_report.reason)


def test_what_the_analysis_stumbles_over_is_told_in_a_line(monkeypatch):
    """JAX puts whole states into some of its messages."""

    def stumble(*_):
        raise ValueError("of an array: " + "[0.1 0.2]\n" * 1000)

    monkeypatch.setattr("gockpt_jax.training.step_cut.flatten", stumble)
    step = wrap(jax.jit(update))
    with pytest.warns(gockpt.SnapshotOnlyWarning, match="its analysis failed with ValueError"):
        run(step, fresh(), 4)
    assert "\n" not in step.why_not
    assert len(step.why_not) < 400


def test_what_lowering_stumbles_over_is_no_window_and_one_warning(monkeypatch):
    """Nobody is to wait for a program that nobody compiles."""

    def stumble(*_):
        raise NotImplementedError("of the compiler's")

    monkeypatch.setattr(program_module, "with_outputs", stumble)
    observer, jitted = Observer(range(3, 6)), jax.jit(update, donate_argnums=0)
    step = wrap(jitted, observer)
    with pytest.warns(gockpt.SnapshotOnlyWarning, match="failed with NotImplemented") as told:
        state = run(step, fresh(), 6)
    assert len(told) == 1
    assert step.program is None
    assert_same(state, run(jitted, fresh(), 6))
    assert observer.cuts == [False] * 6


@pytest.mark.parametrize("arm", ["window", "always"])
def test_rounding_is_accepted_where_it_is_worth_it_and_nothing_is_armed(arm):
    step, state = wrap(jax.jit(update), arm=arm), fresh()
    step.accept_rounding(lambda rounded: True)
    assert step.program is None
    state = run(step, state, 3)
    exact = step.program
    step.accept_rounding(lambda rounded: False)
    assert step.program is exact
    step.accept_rounding(lambda rounded: not rounded.cut.is_exact)
    assert step.program.cut.is_exact == (arm == "always")
    assert step._kinds.of((state, X), {}) is step.program
    assert step.why_not is None


@jax.tree_util.register_pytree_node_class
class Scale:
    """A class that looks at what it is given, as loss scales of `jmp` do."""

    def __init__(self, number):
        assert isinstance(number, jax.Array), f"a scale is an array, not a {type(number)}"
        self.number = number

    def tree_flatten(self):
        return (self.number,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_a_state_of_a_class_that_checks_what_it_holds():
    def scaled(state, scale, x):
        return update(state, x * scale.number), Scale(scale.number * 0.5)

    def train(step):
        state, scale = fresh(), Scale(jnp.float32(8.0))
        for n in range(7):
            state, scale = step(state, scale, 2.0 if n == 5 else X)
        return state, scale.number

    observer = Observer((3, 4, 5))
    step = wrap(jax.jit(scaled, donate_argnums=(0, 1)), observer, state=("state", "scale"))
    assert_same(train(step), train(jax.jit(scaled)))
    assert observer.cuts == [n in (3, 4) for n in range(7)]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("arm", "armed_at"), [("window", (5,)), ("always", (5,)), ("always", ())])
def test_an_error_of_the_armed_step_itself_is_the_users(monkeypatch, arm, armed_at, by_name):
    """XLA reports some as ValueError, as it does calls that it refuses before it runs them."""
    observer = Observer(armed_at)
    jitted = jax.jit(update, donate_argnums=0, donate_argnames="state")
    wrapped = wrap(jitted, observer, arm=arm)

    def step(state, x):
        return wrapped(state=state, x=x) if by_name else wrapped(state, x)

    state = run(step, fresh(), 5)

    def fails(program, args, kwargs, flat=None):
        jax.tree.map(lambda x: x.delete(), kwargs["state"] if by_name else args[0])
        raise ValueError("INVALID_ARGUMENT: of the step's own")

    monkeypatch.setattr(StepProgram, "call", fails)
    with pytest.raises(ValueError, match="of the step's own"):
        step(state, X)
    assert len(observer.refusals) == len(armed_at)  # who did not ask is not told
