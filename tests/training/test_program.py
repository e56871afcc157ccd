"""The armed executable: what it accepts, what it refuses before anything is donated."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gockpt_jax import StepMismatchError, _compat
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.last_result import LastResult
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.unarmable import CannotArmError

WAIT_SECS = 60


def update(state, x, scale=1.0):
    g = jnp.tanh(x)
    m = 0.9 * state["m"] + g
    return {"m": m, "w": state["w"] - 0.1 * m}, jnp.sum(g) * scale


def update_of_nothing(state, x):
    return state, jnp.sum(x)


def fresh(size=6):
    return {"m": jnp.zeros(size), "w": jnp.ones(size)}


def arm(jitted, *args, result=None, **kwargs):
    settings = _compat.jit_settings(jitted)
    form = CallForm(jitted, 0, settings)
    program = StepProgram(jitted.trace(*args, **kwargs), form, args, kwargs, even_for_nothing=False)
    if result is not None:
        program.returns_at(jax.tree.leaves(result))
    program.arm()
    program.wait_until_ready()
    assert program.why_not_ready() is None
    return program


def alive(tree):
    return not any(x.is_deleted() for x in jax.tree.leaves(tree))


X = jnp.arange(6.0)


def test_armed_call_is_the_step_and_the_cut():
    jitted = jax.jit(update, donate_argnums=0)
    program = arm(jitted, fresh(), X)
    (expected, loss), first = jitted(fresh(), X), fresh()
    (state, got_loss), _, cut = program.call((first, X), {})
    assert not alive(first)
    jax.tree.map(np.testing.assert_array_equal, (state, got_loss), (expected, loss))
    assert [(str(s), c.shape) for s, c in zip(program.cut.arrays, cut, strict=True)] == [
        ("float32[6]", (6,))
    ]
    np.testing.assert_allclose(cut[0], jnp.tanh(X), rtol=1e-6)
    found = program.returned.leaves(program.returned.found_in((state, got_loss)))
    assert [leaf is new for leaf, new in zip(found, (state["m"], state["w"]), strict=True)] == [
        True, True
    ]  # fmt: skip


CHANGED = {
    "structure": (lambda s: ({**s, "more": s["m"]}, X), {}),
    "one argument more": (lambda s: (s, X, jnp.float32(2)), {}),
    "keyword": (lambda s: (s,), {"x": X}),
    "shape of the state": (lambda s: ({k: x[:3] for k, x in s.items()}, X[:3]), {}),
    "shape of the batch": (lambda s: (s, X[:1]), {}),
    "dtype": (lambda s: (s, X.astype(jnp.int32)), {}),
}


@pytest.mark.parametrize("change", CHANGED)
def test_changed_call_is_refused_before_dispatch(change):
    jitted = jax.jit(update, donate_argnums=0)
    program = arm(jitted, fresh(), X)
    arguments, kwargs = CHANGED[change]
    args = arguments(fresh())
    with pytest.raises((TypeError, ValueError)):
        program.call(args, kwargs)
    assert alive((args, kwargs))
    jitted(*args, **kwargs)  # which the user's own step takes


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda s: {**s, "more": s["m"]}, "4 leaves, where there were 3$"),
        (lambda s: tuple(s.values()), "other containers, or other data in them that is no array"),
    ],
)
def test_another_structure_is_told(make, says):
    program = arm(jax.jit(update, donate_argnums=0), fresh(), X)
    with pytest.raises(TypeError, match=says):
        program.call((make(fresh()), X), {})


@pytest.mark.parametrize("w", [jnp.ones(3), jnp.ones(6, jnp.bfloat16), 1.0])
def test_a_state_of_another_shape_or_dtype_is_told(w):
    program, state = arm(jax.jit(update), fresh(), X), fresh()
    old = program.same_state(program.flat_call((state, X), {}))
    assert [x is y for x, y in zip(old, (state["m"], state["w"]), strict=True)] == [True] * 2
    with pytest.raises(TypeError, match=r"^\['w'\] of its state is .*, where it was float32\[6\]"):
        program.same_state(program.flat_call((state | {"w": w}, X), {}))


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "changed", "says"),
    [
        ({"static_argnums": 2}, (2.0,), {}, ((3.0,), {}), "a static .* changed from 2.0 to 3.0"),
        ({"static_argnums": -1}, (2.0,), {}, ((3.0,), {}), "a static .* changed from 2.0 to 3.0"),
        (
            {"static_argnames": "scale"}, (), {"scale": 2.0}, ((), {"scale": 3.0}),
            "`scale` changed from 2.0 to 3.0",
        ),
        (
            {"static_argnames": "scale"}, (), {"scale": 2.0}, ((), {}),
            "a static argument was given in another way",
        ),
        ({"static_argnums": 2}, (2.0,), {}, ((2,), {}), "a static .* changed from 2.0 to 2"),
        (
            {"static_argnames": "scale"}, (), {"scale": 1.0}, ((), {"scale": True}),
            "`scale` changed from 1.0 to True",
        ),
    ],
)  # fmt: skip
def test_changed_static_argument_is_refused(options, args, kwargs, changed, says):
    jitted = jax.jit(update, donate_argnums=0, **options)
    program = arm(jitted, fresh(), X, *args, **kwargs)
    result, _, _ = program.call((fresh(), X, *args), kwargs)
    jax.tree.map(np.testing.assert_array_equal, result, jitted(fresh(), X, *args, **kwargs))
    state = fresh()
    with pytest.raises(TypeError, match=f"^{says}$"):
        program.call((state, X, *changed[0]), changed[1])
    assert alive(state)


SETTINGS = {
    "matmul precision": lambda: jax.default_matmul_precision("float32"),
    "random numbers": lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_changed_setting_is_refused(setting):
    program, state = arm(jax.jit(update, donate_argnums=0), fresh(), X), fresh()
    told = " from None to 'float32': set it once" if setting == "matmul precision" else ""
    with SETTINGS[setting](), pytest.raises(TypeError, match=f"a setting of JAX changed{told}"):
        program.call((state, X), {})
    assert alive(state)
    program.call((state, X), {})


def test_changed_weak_type_is_refused():
    """A Python number takes the other operand's width, and an array has its own."""

    def scaled(state, rate):
        return state + (rate * state.astype(jnp.bfloat16)).astype(jnp.float32)

    jitted, number, array = jax.jit(scaled), 0.1, jnp.float32(0.1)
    state = jnp.arange(1.0, 33.0)
    assert not np.array_equal(jitted(state, number), jitted(state, array))
    for given, other in ((number, array), (array, number)):
        program = arm(jitted, state, given)
        with pytest.raises(TypeError, match=r"the weak type of `args\[1\]` changed"):
            program.call((state, other), {})
        result, _, _ = program.call((state, given), {})
        np.testing.assert_array_equal(result, jitted(state, given))


def test_results_are_of_weak_types_where_the_users_are():
    """Else the next step would be another program, which promotes to wider numbers."""
    jitted, state = jax.jit(update), fresh() | {"m": jnp.full(6, 1.0)}
    results = jitted(state, 2.0), arm(jitted, state, 2.0).call((state, 2.0), {}).result
    weak, ours = ([x.weak_type for x in jax.tree.leaves(result)] for result in results)
    assert weak == ours == [True, False, False]


@pytest.mark.parametrize("first", ["committed", "uncommitted"])
def test_changed_commitment_is_refused(first):
    """What is not committed the compiler places as it likes: another order of sums."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    state = jax.device_put(fresh(16), NamedSharding(mesh, PartitionSpec()))
    x = np.arange(16, dtype=np.float32)
    batches = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("x"))), x]
    given, other = batches if first == "committed" else batches[::-1]
    program = arm(jax.jit(update, donate_argnums=0), state, given)
    was = "was" if first == "committed" else "was not"
    with pytest.raises(TypeError, match=rf"`args\[1\]` {was} committed .*device_put"):
        program.call((state, other), {})
    assert alive(state)
    program.call((state, given), {})


@pytest.mark.parametrize(
    ("text", "is_dead", "raised"),
    [
        ("it lies otherwise", False, CannotArmError),
        ("it lies otherwise", True, ValueError),
        ("RESOURCE_EXHAUSTED: for once", False, ValueError),
    ],
)
def test_what_is_refused_for_once_is_not_refused_for_good(monkeypatch, text, is_dead, raised):
    """An array that is gone, a device that is full; a program that can never run is given up."""
    program, state = arm(jax.jit(update), fresh(), X), fresh()

    def refuse(*_):
        raise ValueError(text)

    monkeypatch.setattr(program, "executable", lambda: refuse)
    if is_dead:
        state["m"].delete()
    with pytest.raises((ValueError, CannotArmError)) as error:
        program.call((state, X), {})
    assert error.type is raised


def test_changed_placement_is_refused_with_the_state_alive():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spread, whole = (NamedSharding(mesh, PartitionSpec(p)) for p in ("x", None))
    jitted = jax.jit(update, donate_argnums=0)
    state = jax.device_put(fresh(16), spread)
    x = jax.device_put(jnp.arange(16.0), whole)
    program = arm(jitted, state, x, result=jitted(jax.device_put(fresh(16), spread), x))
    other = jax.device_put(fresh(16), whole)
    with pytest.raises((TypeError, ValueError)):
        program.call((other, x), {})
    assert alive(other)
    (new, _), _, _ = program.call((state, x), {})
    assert all(leaf.sharding.is_equivalent_to(spread, 1) for leaf in jax.tree.leaves(new))


def test_shardings_given_to_jit_are_kept_without_a_result():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spread, whole = (NamedSharding(mesh, p) for p in (PartitionSpec("x"), PartitionSpec()))
    jitted = jax.jit(
        update, donate_argnums=0, in_shardings=(spread, whole), out_shardings=(spread, whole)
    )
    program = arm(jitted, fresh(16), jnp.arange(16.0))
    state = jax.device_put(fresh(16), spread)
    (new, loss), _, _ = program.call((state, jax.device_put(jnp.arange(16.0), whole)), {})
    assert not alive(state)
    assert all(leaf.sharding.is_equivalent_to(spread, 1) for leaf in jax.tree.leaves(new))
    assert loss.sharding.is_fully_replicated


def test_results_lie_where_those_of_the_users_step_lay():
    """Wherever that is: the compiler alone may place those of the armed step otherwise."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spread, whole = (NamedSharding(mesh, PartitionSpec(p)) for p in ("x", None))
    state, x = (jax.device_put(tree, whole) for tree in (fresh(16), jnp.arange(16.0)))
    jitted = jax.jit(update)
    new, loss = jitted(state, x)
    program = arm(jitted, state, x, result=(jax.device_put(new, spread), loss))
    (new, _), _, _ = program.call((state, x), {})
    assert all(leaf.sharding.is_equivalent_to(spread, 1) for leaf in jax.tree.leaves(new))


def test_where_jax_does_not_tell_what_it_was_given_the_arguments_do(monkeypatch):
    monkeypatch.setattr(_compat, "specified_shardings", lambda traced, which: None)
    jitted = jax.jit(update)
    (state, _), _, _ = arm(jitted, fresh(), X).call((fresh(), X), {})
    jax.tree.map(np.testing.assert_array_equal, state, jitted(fresh(), X)[0])


@pytest.mark.parametrize(
    "other",
    [
        lambda state, loss: (loss, state),
        lambda state, loss: (state, {"loss": loss}),
        lambda state, loss: (state,),
        lambda state, loss: ({"m": state["m"], "v": state["w"]}, loss),
        lambda state, loss: ({k: v[:3] for k, v in state.items()}, loss),
        lambda state, loss: ({k: v.astype(jnp.bfloat16) for k, v in state.items()}, loss),
    ],
)
def test_the_state_is_not_looked_for_in_another_programs_result(other):
    program = arm(jax.jit(update), fresh(), X)
    other = other(fresh(), jnp.float32(0))
    assert program.returned.leaves(program.returned.found_in(other)) is None
    assert program.returned.leaves(program.returned.found_in((fresh(), jnp.float32(0)))) is not None
    assert program.returned.leaves(program.returned.found_in(other)) is None


@pytest.mark.parametrize("x", [0.0, np.zeros(6, np.float32), jnp.zeros(3)])
def test_a_state_in_which_the_loop_has_put_something_else_is_not_known(x):
    result = fresh(), jnp.float32(0)
    program = arm(jax.jit(update), fresh(), X)
    found = program.returned.found_in(result)
    assert program.returned.leaves(found) is not None
    result[0]["m"] = x
    assert program.returned.leaves(found) is None


def test_whether_a_state_lies_like_the_one_before_is_asked_of_it_alone():
    one, other = jax.devices()[:2]
    program, last = arm(jax.jit(update), fresh(), X), LastResult()
    result = jax.device_put((fresh(), jnp.float32(0)), one)
    last.keep(result, program.returned.found_in(result), is_to_be_traced=False)
    state, loss = jax.device_put((fresh(), jnp.float32(0)), other)
    assert last.lies_like((result[0], loss), program.returned)
    for moved in (state, fresh(), result[0] | {"w": state["w"]}):
        assert not last.lies_like((moved, loss), program.returned)


def test_another_program_has_the_state_elsewhere_in_its_result():
    state, loss = fresh(), jnp.float32(0)
    program = arm(jax.jit(update), state, X)
    last = arm(jax.jit(lambda s, x: update(s, x)[::-1]), state, X)
    assert last.returned.found_in((state,)) is None
    found = program.returned.leaves(last.returned.found_in((loss, state)))
    assert all(a is b for a, b in zip(found, jax.tree.leaves(state), strict=True))
    small = jax.tree.map(lambda x: x[:3], state)
    other = arm(jax.jit(update), small, X[:3])
    assert program.returned.leaves(other.returned.found_in((small, loss))) is None
    more = arm(jax.jit(lambda s, x: (s | {"more": s["m"]}, x)), state | {"more": X}, X)
    assert program.returned.leaves(more.returned.found_in((state | {"more": X}, X))) is None


def test_explain_tells_every_leaf_its_shape_and_its_fate():
    def step(state, x):
        new, loss = update({"m": state["m"], "w": state["w"]}, x)
        return {"count": state["count"] + 1, **new}, loss

    text = arm(jax.jit(step), fresh() | {"count": jnp.int32(0)}, X).cut.explain()
    assert "2 leaves leave early, in 1 group: " in text
    assert "; 1 leaf is late." in text
    assert "retaining float32[6]" in text
    assert "['m'] float32[6]" in text
    assert "late (it is as small as what would be retained for it):\n  ['count'] int32[]" in text


def test_what_is_retained_has_a_dtype_of_its_own():
    def step(state, x):
        g = jnp.tanh(x)
        m = state["m"].astype(jnp.float32) * 0.5 + g
        return {"m": m.astype(jnp.bfloat16), "u": state["u"] - g}

    state = {"m": jnp.zeros(6, jnp.bfloat16), "u": jnp.zeros(6)}
    cut = arm(jax.jit(step), state, X).cut
    assert [str(array) for array in cut.arrays] == ["float32[6]"]
    assert [group.leaves for group in cut.groups] == [(0, 1)]


def test_result_without_the_state_is_an_error():
    jitted = jax.jit(lambda s, x: jnp.sum(x))
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    with pytest.raises(StepMismatchError, match="holds no tree like the state"):
        StepProgram(jitted.trace(fresh(), X), form, (fresh(), X), {}, even_for_nothing=False)


def test_a_state_of_nothing_is_no_error():
    program = arm(jax.jit(update_of_nothing), {}, X)
    np.testing.assert_array_equal(program.call(({}, X), {}).result[1], jnp.sum(X))
    assert program.cut.groups == ()


def test_a_batch_taken_for_the_state_is_an_error():
    jitted = jax.jit(lambda batch, state: (jnp.sum(batch), state))
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    told = (
        r"does not update argument `batch`, taken for its state.*the state goes in as "
        r"float32\[3,2\] and comes out as float32\[\].*`wrap\(step, state="
    )
    with pytest.raises(StepMismatchError, match=told):
        StepProgram(
            jitted.trace(jnp.ones((3, 2)), fresh()),
            form,
            (jnp.ones((3, 2)), fresh()),
            {},
            even_for_nothing=False,
        )


def test_the_trainer_does_not_wait_for_the_compiler(monkeypatch):
    go_on, compile_it = threading.Event(), jax.stages.Lowered.compile

    def held_up(lowered, **options):
        assert go_on.wait(WAIT_SECS)
        return compile_it(lowered, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", held_up)
    jitted = jax.jit(update)
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    program = StepProgram(jitted.trace(fresh(), X), form, (fresh(), X), {}, even_for_nothing=False)
    program.arm()
    assert program.is_armed
    assert program.why_not_ready() == "the armed step was still compiling"
    go_on.set()
    program.wait_until_ready()
    assert program.why_not_ready() is None


def test_failure_to_compile_is_kept_for_who_asks():
    jitted = jax.jit(update, compiler_options={"xla_no_such_option": "1"})
    settings = _compat.jit_settings(jitted)
    program = StepProgram(
        jitted.trace(fresh(), X), CallForm(jitted, 0, settings), (fresh(), X), {},
        even_for_nothing=False,
    )  # fmt: skip
    program.arm()
    program.wait_until_ready()
    told = program.why_not_ready()
    assert told.startswith("the armed step did not compile: ")
    assert "xla_no_such_option" in told
