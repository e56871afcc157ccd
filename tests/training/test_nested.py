"""Steps whose `jax.jit` lies inside another object run as before, and their state is found."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from training.test_wrap import Observer, fresh, run, update

import gockpt_jax as gockpt
from gockpt_jax import _compat
from gockpt_jax.training import nested
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.nested import NestedStep
from gockpt_jax.training.wrap import wrap_step

WAIT_SECS = 60
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
TX = optax.adam(1e-2)


def wrap(step, observer=None, *, state=(0, 1), state_out=None, arm="window"):
    options = gockpt.WindowOptions(arm=arm)
    return wrap_step(step, observer or Observer(), options, state=state, state_out=state_out)


class Net(nnx.Module):
    """Layers with every kind of variable; the second layer is used under two names."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 4, rngs=rngs)
        self.again = self.last

    def __call__(self, x):
        x = self.again(self.dropout(nnx.relu(self.norm(self.first(x)))))
        return self.last(jnp.tile(x, 2))


def nnx_state():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def nnx_update(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def nnx_step(**options):
    return nnx.jit(nnx_update, **options)


def eqx_state():
    model = eqx.nn.MLP(4, 4, 8, 2, activation=jax.nn.tanh, key=jax.random.key(0))
    return model, TX.init(eqx.filter(model, eqx.is_inexact_array))


def eqx_update(model, opt_state, x):
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
    updates, opt_state = TX.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


def run_nnx(step, steps=6):
    state = nnx_state()
    losses = [step(*state, X * n) for n in range(steps)]
    return losses, nnx.to_pure_dict(nnx.state(state, nnx.Not(nnx.RngState)))


def run_eqx(step, steps=6):
    (model, opt_state), losses = eqx_state(), []
    for n in range(steps):
        model, opt_state, loss = step(model, opt_state, X * n)
        losses.append(loss)
    return losses, eqx.filter((model, opt_state), eqx.is_array)


KINDS = {
    "nnx": (nnx_step, run_nnx),
    "nnx donated": (functools.partial(nnx_step, donate_argnames=("model", "optimizer")), run_nnx),
    "eqx": (lambda: eqx.filter_jit(eqx_update), run_eqx),
    "eqx donated": (lambda: eqx.filter_jit(eqx_update, donate="all"), run_eqx),
    "jit": (lambda: gockpt.jit(eqx_update, donate_argnums=(0, 1)), run_eqx),
}


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_the_users(kind, arm):
    make, run = KINDS[kind]
    observer = Observer(armed_at={3, 4})
    wrapped = wrap(make(), observer, arm=arm)
    assert isinstance(wrapped, NestedStep)
    jax.tree.map(np.testing.assert_array_equal, run(wrapped), run(make()))
    assert observer.cuts == [False, False, False, True, True, False]
    assert observer.refusals == []


@pytest.mark.parametrize("kind", ["nnx", "eqx", "jit"])
def test_the_state_is_found(kind):
    make, run = KINDS[kind]
    wrapped = wrap(make())
    _, state = run(wrapped)
    program = wrapped._inner.program
    found = program.state_in(wrapped._inner.last)
    there = {id(x) for x in found}
    assert len(there) == len(found)
    assert all(id(x) in there for x in jax.tree.leaves(state))
    assert len(set(program.positions.paths)) == len(found)
    assert program.cut.groups


def test_the_users_object_is_as_it_was():
    step = nnx_step()
    inside, wrapped, state = step.jitted_fn, wrap(step), nnx_state()
    wrapped(*state, X)
    assert step.jitted_fn is inside
    with pytest.raises(TypeError):
        wrapped(*state, "no array")
    assert step.jitted_fn is inside
    assert wrapped.fun is nnx_update
    assert wrapped.__name__ == "nnx_update"


def test_other_threads_call_the_same_object():
    """As it is, or wrapped by another manager: each thread finds what it calls."""
    step, entered, left = nnx_step(), threading.Event(), threading.Event()
    inside = step.jitted_fn

    class Second(Observer):
        def before_update(self, *args):
            entered.set()
            assert left.wait(WAIT_SECS)

    class First(Observer):
        def before_update(self, *args):
            self.thread = threading.Thread(target=second, args=(*nnx_state(), X))
            self.thread.start()
            assert entered.wait(WAIT_SECS)

    observers = First(), Second()
    first, second = (wrap(step, observer) for observer in observers)
    first(*nnx_state(), X)
    step(*nnx_state(), X)  # the second is in the middle of its call
    wrap(step)(*nnx_state(), X)
    left.set()
    observers[0].thread.join(WAIT_SECS)
    assert [len(observer.cuts) for observer in observers] == [1, 1]
    assert step.jitted_fn is inside


def test_a_call_in_the_middle_of_a_call_ends_for_itself():
    """A signal handler's: what it has interrupted goes on to call what it was to call."""
    place = nested._ByThread(lambda: "as it is")
    with place.called_as(lambda: "outer"):
        with place.called_as(lambda: "inner"):
            assert place() == "inner"
        assert place() == "outer"
    assert place() == "as it is"


class Beside(Observer):
    """Has another thread make a call in the middle of each of this one's, or end it behind it.

    Args:
      place: Of this thread's calls at which the other one's begins.
      crosses: Whether that one goes on, before its own dispatch, only behind this thread's.
    """

    def __init__(self, place, *, crosses=False):
        super().__init__(armed_at=range(6, 12))
        self.place, self.crosses, self.here = place, crosses, threading.current_thread()
        self.may_begin, self.has_begun, self.may_end, self.has_ended = (
            threading.Semaphore(0) for _ in range(4)
        )

    def before_update(self, *args):
        if threading.current_thread() is not self.here and self.crosses:
            self.has_begun.release()
            self.wait_for(self.may_end)
        self.come_to("before")
        return super().before_update(*args)

    def after_update(self, *args):
        super().after_update(*args)
        self.come_to("behind")

    def come_to(self, place):
        if place == self.place and threading.current_thread() is self.here:
            self.may_begin.release()
            self.wait_for(self.has_begun if self.crosses else self.has_ended)

    def wait_for(self, semaphore):
        assert semaphore.acquire(timeout=WAIT_SECS)

    def here_by(self, step):
        """The step as this thread calls it."""

        def call(*args):
            result = step(*args)
            if self.crosses:
                self.may_end.release()
                self.wait_for(self.has_ended)
            return result

        return call

    def there_by(self, step):
        """The step as the other one does."""

        def call(*args):
            self.wait_for(self.may_begin)
            try:
                return step(*args)
            finally:
                self.has_ended.release()

        return call


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("kind", ["nnx", "eqx donated", "jit"])
def test_two_threads_call_it_from_the_start(kind, place, crosses):
    """Each on a state of its own, which was looked for in what the other's call had returned."""
    make, run = KINDS[kind]
    observer = Beside(place, crosses=crosses)
    wrapped = wrap(make(), observer)
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(run, observer.there_by(wrapped))
        states = run(observer.here_by(wrapped)), other.result(WAIT_SECS)
    for state in states:
        jax.tree.map(np.testing.assert_array_equal, state, run(make()))
    assert observer.cuts == [False] * 6 + [True] * 6
    assert observer.refusals == []


def test_the_users_python_is_traced_no_more_often():
    traced = []

    def update(model, optimizer, x):
        traced.append(x.shape)
        return nnx_update(model, optimizer, x)

    run_nnx(wrap(nnx.jit(update), Observer(armed_at={4})))
    assert len(traced) == 1


@pytest.mark.parametrize("kind", ["eqx", "jit"])
def test_traces_are_no_updates(kind):
    observer = Observer()
    wrapped, (model, opt_state) = wrap(KINDS[kind][0](), observer), eqx_state()
    arrays, static = eqx.partition((model, opt_state), eqx.is_array)
    shapes = jax.eval_shape(lambda a: wrapped(*eqx.combine(a, static), X)[2], arrays)
    assert shapes.shape == ()
    assert observer.cuts == []


@pytest.mark.parametrize("arm", ["window", "always"])
def test_a_changed_state_is_found_again(arm):
    """Layers are added in mid-run: the refused calls run the user's step, then windows go on."""
    observer = Observer({3, 4, 5, 9})
    wrapped, state = wrap(eqx.filter_jit(eqx_update), observer, arm=arm), eqx_state()
    for n in range(11):
        if n == 4:
            model = eqx.nn.MLP(4, 4, 8, 3, activation=jax.nn.tanh, key=jax.random.key(1))
            state = [model, TX.init(eqx.filter(model, eqx.is_inexact_array))]
        *state, _ = wrapped(*state, X)
    assert observer.cuts[3:] == [True, *(False,) * 5, True, False]
    program = wrapped._inner.program
    found = {id(x) for x in program.state_in(wrapped._inner.last)}
    assert found == {id(x) for x in jax.tree.leaves(state) if isinstance(x, jax.Array)}


def logging_nnx(model, optimizer, x, logs):
    return [nnx_update(model, optimizer, x)] * logs


def logging_eqx(model, opt_state, x, logs):
    model, opt_state, loss = eqx_update(model, opt_state, x)
    return [loss] * logs, model, opt_state


LOGGING = {
    "nnx": lambda: nnx.jit(logging_nnx, static_argnames="logs"),
    "eqx": lambda: eqx.filter_jit(logging_eqx),
    "jit": lambda: gockpt.jit(logging_eqx, static_argnames="logs"),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("logs", "arm"),
    [
        (lambda n: n % 3, "window"),
        (lambda n: n % 3, "always"),
        (lambda n: int(n % 5 == 2), "window"),
    ],
)
@pytest.mark.parametrize("kind", LOGGING)
def test_results_of_several_structures(kind, logs, arm):
    """The state is found in each by itself, and each kind of call has its program in the end."""
    observer = Observer(range(8, 30))
    wrapped = wrap(LOGGING[kind](), observer, arm=arm)
    state = nnx_state() if kind == "nnx" else eqx_state()
    for n in range(30):
        result = wrapped(*state, X, logs=logs(n))
        state = state if kind == "nnx" else result[1:]
    assert all(observer.cuts[20:])
    found = wrapped._inner.program.state_in(wrapped._inner.last)
    there = {id(x) for x in jax.tree.leaves(state)}
    assert len(found) > 8
    assert all(id(x) in there for x in found)


def test_a_leaf_that_does_not_come_out_of_the_program_is_no_part_of_it():
    """A number of the step's own: Equinox hands it out beside the program's results."""

    @eqx.filter_jit
    def update(state, x):
        m = 0.9 * state["m"] + jnp.tanh(x)
        return {"m": m, "rate": 0.5, "w": state["w"] - state["rate"] * m}

    observer = Observer({3})
    options = gockpt.WindowOptions(steps=2)
    step = wrap_step(update, observer, options, state=0, state_out=None)
    state = {"m": jnp.zeros(8), "rate": jnp.float32(0.5), "w": jnp.ones(8)}
    for n in range(5):
        state = step(state | {"rate": jnp.float32(0.5)}, jnp.arange(8.0) * n)
    assert observer.cuts[3]
    assert step._inner.program.positions.paths == ("['m']", "['w']")


def test_a_state_that_changes_in_place_but_for_a_number():
    @nnx.jit
    def update(model, rate, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - rate * g, nnx.state(model), grads))

    observer, model, rate = Observer({3}), nnx.Linear(4, 4, rngs=nnx.Rngs(0)), 0.5
    step = wrap(update, observer)
    for _ in range(4):
        step(model, rate, X)
    assert observer.cuts[3]
    assert len(step._inner.program.positions.paths) == 2


def test_cached_partial():
    observer = Observer(armed_at={3})
    state = nnx_state()
    step = nnx.cached_partial(wrap(nnx_step(), observer), *state)
    losses = [step(X * n) for n in range(6)]
    np.testing.assert_array_equal(losses, run_nnx(nnx_step())[0])
    assert observer.cuts == [n == 3 for n in range(6)]


@pytest.mark.parametrize(
    "make", [nnx_step, lambda: jax.jit(nnx_update)], ids=["nnx.jit", "jax.jit"]
)
def test_what_is_wrapped_around_it_has_the_attributes_of_the_step(make):
    """`functools.wraps` copies them, as `nnx.cached_partial` does: tunix reads `jitted_fn`."""
    step = make()
    step.remark, step.arm = "the user's", "the user's too, beside our own"
    wrapped = wrap(step, state=0)
    outer = functools.wraps(wrapped)(lambda *args: wrapped(*args))
    for name in ("jitted_fn", "remark"):
        assert getattr(outer, name, None) is getattr(step, name, None)
    assert isinstance(wrapped, NestedStep) or callable(wrapped.arm)


def test_a_state_that_does_not_come_back_is_told_before_an_update_is_lost():
    step = eqx.filter_jit(lambda *args: jax.tree.leaves(eqx_update(*args)), donate="all")
    observer = Observer()
    wrapped, state = wrap(step, observer), eqx_state()
    wrapped(*eqx_state(), X)
    with pytest.raises(gockpt.StepMismatchError, match="no tree like the state"):
        wrapped(*state, X)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
    assert observer.cuts == [False]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("jit", [eqx.filter_jit, gockpt.jit])
def test_a_call_whose_state_is_made_whole_says_nothing_of_others(jit, odd):
    """As with `jax.jit`: moments are made by the first call, or behind a checkpoint without any."""

    def growing(state, x):
        m = 0.9 * state.get("m", 0.0) + jnp.tanh(x)
        return {"m": m, "w": state["w"] - 0.1 * m}

    observer, state = Observer({5}), fresh()
    step = wrap(jit(growing), observer, state=0)
    for n in range(6):
        state = step({"w": state["w"]} if n == odd else state, jnp.arange(8.0) * n)
    assert observer.cuts == [False] * 5 + [True]


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["window", "always"])
@pytest.mark.parametrize("kind", LOGGING)
def test_a_call_before_training_that_returns_no_state(kind, arm):
    """A trial of the evaluation, say: what a training step returns is looked at by itself."""

    def either(model, optimizer, x, train):
        update = nnx_update if kind == "nnx" else eqx_update
        return update(model, optimizer, x) if train else jnp.max(x)

    make = {"nnx": nnx.jit, "jit": gockpt.jit, "eqx": lambda fn, **_: eqx.filter_jit(fn)}[kind]
    observer, state = Observer({5}), nnx_state() if kind == "nnx" else eqx_state()
    wrapped = wrap(make(either, static_argnames="train"), observer, arm=arm)
    wrapped(*state, X, train=False)
    for _ in range(5):
        result = wrapped(*state, X, train=True)
        state = state if kind == "nnx" else result[:2]
    assert observer.cuts == [False] * 5 + [True]


def test_of_results_that_are_alike_the_last_one_tells_where_the_state_is():
    """As of the structures themselves, of which a few are known."""
    jitted, x = jax.jit(lambda x: x), jnp.ones(3)
    form = nested.InnerForm(jitted, CallForm(jitted, 0, _compat.jit_settings(jitted)))
    form.found(nested.Missing("it returned none", None), [x])
    form.found([x], [x])
    assert [at for _, at in form._results] == [[0]]
    for n in range(2, 11):
        form.found([x], [*range(n - 1), x])
    assert [at for _, at in form._results] == [[n - 1] for n in range(3, 11)]


@pytest.mark.parametrize("kind", ["nnx donated", "eqx donated", "jit"])
def test_what_goes_wrong_as_it_is_looked_at_does_not_lose_it(kind, monkeypatch):
    """The step was given the only other state there was."""
    make, run = KINDS[kind]
    want = run(make())
    monkeypatch.setattr(nested, "identical", lambda *_: {}["injected"])
    with pytest.warns(gockpt.SnapshotOnlyWarning, match="what follows a step failed with KeyError"):
        found = run(wrap(make()))
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.usefixtures("its_own_garbage")
@pytest.mark.parametrize("kind", ["nnx", "eqx", "jit"])
def test_the_state_is_looked_at_until_it_is_found_and_not_held(kind, monkeypatch):
    """Which takes time at every call, and would keep a second state on the devices."""
    make, _ = KINDS[kind]
    wrapped, state, first = wrap(make()), nnx_state() if kind == "nnx" else eqx_state(), []

    def call(state):
        first.extend(weakref.ref(x) for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
        *new, _ = [*state, wrapped(*state, X)] if kind == "nnx" else wrapped(*state, X)
        return new

    for _ in range(2):
        state = call(state)
    for looks in ("leaf_paths", "identical"):
        monkeypatch.setattr(nested, looks, lambda *_: pytest.fail("it was looked at"))
    state = call(state)
    gc.collect()
    there = {id(x) for x in jax.tree.leaves(state)}
    assert all(x() is None or id(x()) in there for x in first)


def test_nothing_is_looked_at_where_there_are_no_windows(monkeypatch):
    make, run = KINDS["eqx"]
    wrapped = wrap(make())
    with pytest.warns(gockpt.SnapshotOnlyWarning, match="for a test"):
        wrapped._inner.give_up("for a test")
    monkeypatch.setattr(nested, "identical", lambda *_: pytest.fail("it was looked at"))
    run(wrapped)


@pytest.mark.usefixtures("its_own_garbage")
def test_the_state_of_a_call_that_returns_none_is_not_held():
    step = eqx.filter_jit(lambda m, o, x, train: eqx_update(m, o, x) if train else jnp.max(x))
    wrapped, state, other = wrap(step), eqx_state(), eqx_state()
    alive = [weakref.ref(x) for x in jax.tree.leaves(other) if isinstance(x, jax.Array)]
    wrapped(*other, X, train=False)
    del other
    *state, _ = wrapped(*state, X, train=True)
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_a_state_that_is_not_in_the_program():
    wrapped, state = wrap(nnx_step(), state=3), nnx_state()
    step = wrap(eqx.filter_jit(lambda name, x: (name, x)), state=0)
    step("name", X)
    with pytest.raises(gockpt.StepMismatchError, match="no array of the state goes through"):
        step("name", X)
    with pytest.raises(gockpt.StepMismatchError, match="`state=3` names no argument"):
        wrapped(*state, X)


@pytest.mark.parametrize("jit", [eqx.filter_jit, gockpt.jit])
def test_a_batch_taken_for_the_state_is_named_as_the_user_does(jit):
    step = wrap(jit(lambda state, batch: (jnp.sum(batch), state)), state="batch")
    step(jnp.ones(4), X)
    with pytest.raises(gockpt.StepMismatchError, match="does not update argument `batch`"):
        step(jnp.ones(4), X)


# `jit`.


def test_jit_is_jax_jit_for_arrays():
    step = gockpt.jit(lambda s, x, n: s * x + n, static_argnames="n", donate_argnums=0)
    state = jnp.ones(3)
    np.testing.assert_array_equal(step(state, 2.0, n=1), [3.0, 3.0, 3.0])
    assert state.is_deleted()
    assert step.lower(jnp.ones(3), 2.0, n=1).compile() is not None
    assert step.eval_shape(jnp.ones(3), 2.0, n=1).shape == (3,)
    assert step.trace(jnp.ones(3), 2.0, n=1).jaxpr is not None


def test_shapes_stand_for_arrays_beside_static_leaves():
    step = gockpt.jit(lambda tree: tree | {"w": tree["f"](tree["w"])})
    tree = {"w": jax.ShapeDtypeStruct((3,), jnp.float32), "f": jnp.tanh}
    assert step.eval_shape(tree) == tree
    assert step.lower(tree).compile() is not None


class Updater:
    """Its step is a method, and it is static."""

    rate = 2.0

    @gockpt.jit
    def update(self, state, x):
        return update(state, self.rate * x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Agent:
    """Its step is a method too, and it is the state."""

    w: jax.Array

    @gockpt.jit
    def update(self, x):
        return Agent(self.w + x)


def test_jit_makes_methods_as_jax_jit_does():
    observer, updater = Observer((3, 4)), Updater()
    step = wrap(updater.update, observer, state=0)
    state, want = (run(each, fresh(), 6) for each in (step, updater.update))
    jax.tree.map(np.testing.assert_array_equal, state, want)
    assert observer.cuts == [n in (3, 4) for n in range(6)]
    alone = run(lambda s, x: Updater.update(updater, s, x), fresh(), 6)
    jax.tree.map(np.testing.assert_array_equal, state, alone)


def test_a_method_bound_to_the_state_itself_is_refused():
    """As one of `jax.jit`: each call would start from that state."""
    with pytest.raises(gockpt.WrapError, match="bound to one `Agent`, which holds arrays"):
        wrap(Agent(jnp.ones(3)).update)


@pytest.mark.parametrize("make", [gockpt.jit, nnx.jit])
def test_jit_calls_what_is_jitted_already(make):
    """By settings of its own, whatever that holds."""
    step = gockpt.jit(make(lambda tree: {"w": tree["w"] * 2}), donate_argnums=0)
    tree = {"w": jnp.ones(2)}
    np.testing.assert_array_equal(step(tree)["w"], [2.0, 2.0])
    assert tree["w"].is_deleted()


def test_equal_static_leaves_share_a_program():
    traced = []

    def scaled(tree):
        traced.append(tree["name"])
        return tree | {"w": tree["w"] * 2}

    step = gockpt.jit(scaled)
    tree = {"w": jnp.ones(2), "name": "a", "f": jnp.tanh}
    for _ in range(2):
        tree = step(tree)
    assert traced == ["a"]
    assert tree["f"] is jnp.tanh
    step(tree | {"name": "b"})
    assert traced == ["a", "b"]


def test_what_can_be_made_an_array_is_not_static():
    """Its number may change, and the program would not see it."""

    class Holder:
        number = 1.0

        def __jax_array__(self):
            return jnp.float32(self.number)

    step, holder, found = gockpt.jit(lambda tree: tree["w"] + 1), Holder(), []
    # Newer versions of JAX refuse it, and those before them warn.
    with contextlib.suppress(ValueError, DeprecationWarning):
        for holder.number in (1.0, 5.0):
            found.append(step({"w": holder}).item())
    assert found in ([], [2.0, 6.0])


def test_unhashable_leaves_are_named():
    with pytest.raises(TypeError, match=r"leaf of type `bytearray`.*nor hashable"):
        gockpt.jit(lambda t: t)({"w": 1.0, "b": bytearray(b"x")})
