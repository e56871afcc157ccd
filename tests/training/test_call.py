"""Where the state is in a call and in its result."""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from gockpt_jax import StepMismatchError, WrapError, _compat
from gockpt_jax.training.call import CallForm, NotLookedAtError
from gockpt_jax.training.places import as_places, identical, states_at, states_within

STATE = {"w": 1, "m": 2}


class Out(NamedTuple):
    loss: int
    state: dict


def form(f, state, **options):
    jitted = jax.jit(f, **options)
    return CallForm(jitted, state, _compat.jit_settings(jitted))


def step(params, opt_state, batch, *, train=True):
    return params, opt_state


@pytest.mark.parametrize(
    ("state", "args", "kwargs", "expected"),
    [
        (0, ("p", "o", "b"), {}, ("p",)),
        (-1, ("b", "p"), {}, ("p",)),
        ((0, 1), ("p", "o", "b"), {}, ("p", "o")),
        ([1, 0], ("p", "o", "b"), {}, ("o", "p")),
        ("opt_state", ("p", "o", "b"), {}, ("o",)),
        ("opt_state", ("p",), {"opt_state": "o", "batch": "b"}, ("o",)),
        (0, (), {"params": "p", "opt_state": "o", "batch": "b"}, ("p",)),
        (("params", 1), ("p",), {"opt_state": "o", "batch": "b"}, ("p", "o")),
        ("train", ("p", "o", "b"), {"train": "t"}, ("t",)),
    ],
)
def test_state_by_position_and_name(state, args, kwargs, expected):
    assert form(step, state).state_of(args, kwargs) == expected


@pytest.mark.parametrize("state", [3, -4, "stat", ("params", 7), "train"])
def test_missing_state_names_what_was_looked_for_and_what_came(state):
    with pytest.raises(StepMismatchError) as error:
        form(step, state).state_of(("p", "o"), {"batch": "b"})
    message = str(error.value)
    assert re.search(r"`state=.*` names no argument", message)
    assert "whose parameters are `(params, opt_state, batch, *, train)`;" in message
    assert "given by position: 2, and by keyword `batch`." in message
    assert "wrap(step, state=...)" in message


@pytest.mark.parametrize(
    ("f", "takes"),
    [
        (lambda s, x: s, ", whose parameters are `(s, x)`"),
        (lambda s, /, x: jnp.ones(99_999), ", whose parameters are `(s, /, x)`"),
        (lambda s, *xs, rate=[0] * 999: s, ", whose parameters are `(s, *xs, rate)`"),
        (dict, ""),  # Python tells no signature of it
    ],
)
def test_missing_state_names_the_parameters_where_they_are_known(f, takes):
    told = re.escape(f"of the wrapped step{takes}; given by position: 2. Pass")
    with pytest.raises(StepMismatchError, match=told):
        CallForm(f, "y", _compat.JitSettings()).state_of((1, 2), {})


@pytest.mark.parametrize(
    ("f", "state", "told"),
    [
        (step, 0, "argument `params`"),
        (step, (0, "batch"), "arguments `params`, `batch`"),
        (step, -1, "the arguments at (-1,)"),
        (dict, 0, "the first argument"),
        (dict, (0, 1), "the arguments at (0, 1)"),
    ],
)
def test_which_arguments_are_the_state_in_words(f, state, told):
    assert CallForm(f, state, _compat.JitSettings()).told_state == told


def test_only_what_may_be_given_by_position_has_one():
    def several(first, *rest, state=None):
        return first

    with pytest.raises(StepMismatchError, match="`state='state'` names no argument"):
        form(several, "state").state_of((1, 2, 3), {})
    with pytest.raises(StepMismatchError, match="`state='rest'` names no argument"):
        form(several, "rest").state_of((1, 2, 3), {})


@pytest.mark.parametrize("places", [1.5, None, (), ("a", 2.0), {"a": 1}, True])
def test_places_that_are_none(places):
    with pytest.raises(WrapError, match=r"`state_out` must be a position.*pass `state_out=\(0, 1"):
        as_places("state_out", places)


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "dynamic", "static"),
    [
        ({}, (1, 2), {"b": 3}, ((1, 2), {"b": 3}), ()),
        ({"static_argnums": 0}, ("s", 2), {}, ((2,), {}), ((str, "s"),)),
        ({"static_argnums": -1}, (1, "s"), {}, ((1,), {}), ((str, "s"),)),
        ({"static_argnums": (0, 2)}, ("s", 1, "t"), {}, ((1,), {}), ((str, "s"), (str, "t"))),
        ({"static_argnames": "b"}, (1,), {"b": "s"}, ((1,), {}), (("b", str, "s"),)),
        ({"static_argnames": "b"}, (1, "s"), {}, ((1,), {}), ((str, "s"),)),
        ({"static_argnames": ("a", "b")}, (), {"b": "t", "a": "s"}, ((), {}),
         (("a", str, "s"), ("b", str, "t"))),
    ],
)  # fmt: skip
def test_static_arguments_are_told_apart(options, args, kwargs, dynamic, static):
    names = ("a", "b", "c")[: max(2, len(args))]
    f = eval(f"lambda {', '.join(names)}: None")
    found = form(f, 0, **options)
    assert found.dynamic(args, kwargs) == dynamic
    assert found.static(args, kwargs) == static


@pytest.mark.parametrize(
    ("result", "states", "state_out", "expected"),
    [
        (STATE, [STATE], None, (STATE,)),
        ((0.5, STATE), [STATE], None, (STATE,)),
        ((STATE, STATE), [STATE], None, (STATE,)),
        (((1, 2), STATE, 0.5), [STATE, (3, 4)], None, (STATE, (1, 2))),
        (((1, 2), (3, 4)), [(0, 0), (0, 0)], None, ((1, 2), (3, 4))),
        ((1, 2), [(3, 4)], None, ((1, 2),)),
        ((STATE, 0.5), [STATE], 0, (STATE,)),
        ((0.5, STATE), [STATE], -1, (STATE,)),
        ({"new": STATE, "loss": 0.5}, [STATE], "new", (STATE,)),
        (Out(0, STATE), [STATE], "state", (STATE,)),
        (Out(0, STATE), [STATE], None, (STATE,)),
        ((0.5, (1, 2), STATE), [STATE, (3, 4)], (2, 1), (STATE, (1, 2))),
        (((STATE, (1, 2)), 0.5), [STATE, (3, 4)], None, (STATE, (1, 2))),
        ({"a": {"b": Out(0, STATE)}, "c": 1}, [STATE], None, (STATE,)),
        ([{"x": STATE}, {"w": 3, "m": 4}], [STATE], None, ({"w": 3, "m": 4},)),
        ((0.5, [STATE, {"w": 3, "m": 4}]), [STATE, 0], None, (STATE, 0.5)),
        (([(1, 2), 3], (4, 5)), [[(0, 0), 0], (0, 0)], None, ([(1, 2), 3], (4, 5))),
        (((1, 0.5), (3, 4)), [0, (0, 0)], None, (1, (3, 4))),
        # One takes a part of what is another's, in its turn.
        (([(1, 2), 3], {"of": (4, 5)}), [(0, 0), [(0, 0), 0]], None, ((4, 5), [(1, 2), 3])),
        (
            ([0, 0, 0], [(1, 2), 3], {"of": (4, 5)}),
            [[0, 0, 0], (0, 0), [(0, 0), 0]],
            None,
            ([0, 0, 0], (4, 5), [(1, 2), 3]),
        ),
        (
            ([STATE, 3, STATE], {"of": [{"w": 4, "m": 5}, {"w": 6, "m": 7}]}),
            [STATE, STATE, [STATE, 0, STATE]],
            None,
            ({"w": 4, "m": 5}, {"w": 6, "m": 7}, [STATE, 3, STATE]),
        ),
    ],
)
def test_state_in_result(result, states, state_out, expected):
    assert found_in(result, states, state_out) == [jax.tree.leaves(part) for part in expected]


def found_in(result, states, state_out):
    """The leaves of each part, found as `CallForm` does."""
    leaves, out_tree = jax.tree.flatten(result)
    wanted = [jax.tree.structure(s) for s in states]
    if state_out is None:
        return [[leaves[i] for i in part] for part in states_within(out_tree, wanted, lambda *_: 0)]
    places = as_places("state_out", state_out)
    return [jax.tree.leaves(part) for part in states_at(result, places, wanted)]


@pytest.mark.parametrize(
    ("result", "state_out", "message"),
    [
        ((0.5, {"w": 1}), None, "holds no tree like the state"),
        ({"new": [1]}, None, r"say where it is with `wrap\(step, state=..., state_out=...\)`"),
        ((0.5, STATE), 0, r"`state_out=\(0,\)` does not lead to a tree like the state"),
        ((0.5, STATE), 5, "`state_out=5` names nothing in the step's result, a `tuple`"),
        (Out(0, STATE), "new", "`state_out='new'` names nothing in the step's result, a `Out`"),
        ({"a": STATE}, "b", "`state_out='b'` names nothing.*Pass the position or the name"),
        ((STATE, STATE), (0, 1), "does not lead to"),
    ],
)
def test_missing_result_names_the_place_and_the_remedy(result, state_out, message):
    with pytest.raises(StepMismatchError, match=message):
        found_in(result, [STATE], state_out)


def test_a_large_state_is_not_told_in_full():
    large = {f"leaf_{i}": i for i in range(1000)}
    for state_out in (None, 0):
        with pytest.raises(StepMismatchError, match=r"leaf_0.*1000 leaves") as error:
            found_in((1.0, 2.0), [large], state_out)
        assert len(str(error.value)) < 900


def test_errors_are_those_a_caller_would_catch():
    assert issubclass(StepMismatchError, ValueError)
    assert issubclass(WrapError, TypeError)


@pytest.mark.parametrize("state_out", [None, (1, 2)])
def test_locate_follows_leaves_through_static_arguments_and_keywords(state_out):
    def update(mode, opt_state, *, params, batch):
        return 0.0, params, opt_state

    jitted = jax.jit(update, static_argnums=0)
    settings = _compat.jit_settings(jitted)
    places = CallForm(jitted, ("params", "opt_state"), settings, state_out)
    params, opt_state = {"b": jnp.ones(2), "a": jnp.ones(3)}, (jnp.ones(4),)
    args, kwargs = ("train", opt_state), {"params": params, "batch": jnp.ones(5)}
    traced = jitted.trace(*args, **kwargs)
    found = places.locate(args, kwargs, jax.tree.structure(traced.out_info))
    assert [traced.jaxpr.in_avals[i].shape for i in found.inputs] == [(3,), (2,), (4,)]
    outputs = jax.tree.leaves(traced.out_info)
    assert [outputs[i].shape for i in found.outputs] == [(3,), (2,), (4,)]
    assert found.paths == ("[0]['a']", "[0]['b']", "[1][0]")


def test_paths_of_one_state_are_its_own():
    jitted = jax.jit(lambda s: s)
    places = CallForm(jitted, 0, _compat.jit_settings(jitted))
    state = {"w": jnp.ones(2)}
    assert places.locate((state,), {}, jax.tree.structure(state)).paths == ("['w']",)


@pytest.mark.parametrize(
    ("states", "result", "outputs"),
    [
        ((0,), ("grads", "new 0"), (1,)),
        ((0, 1), ("new 1", "new 0"), (1, 0)),
        ((0, 1), ("grads", "new 0", "new 1"), (1, 2)),
    ],
)
def test_of_several_parts_alike_the_one_that_the_loop_gives_back(states, result, outputs):
    jitted = jax.jit(lambda *args: result)
    places = CallForm(jitted, states, _compat.jit_settings(jitted))
    before = [{"w": jnp.full(2, i)} for i, _ in enumerate(result)]
    args = [before[result.index(f"new {n}")] for n in states]
    out_tree = jax.tree.structure(before)
    assert places.locate(args, {}, out_tree, jax.tree.leaves(before)).outputs == outputs
    assert places.locate(args, {}, out_tree).outputs == tuple(range(len(states)))


@pytest.mark.parametrize(
    ("like_the_state", "state_out", "outputs"),
    [([0, 1], None, None), ([0, 1], 1, (1,)), ([1], None, (1,))],
)
def test_a_call_that_says_nothing_of_the_last_result_is_waited_out(
    like_the_state, state_out, outputs
):
    """Where parts are alike: a state was restored, or the last call was another thread's."""
    places = CallForm(jitted := jax.jit(lambda s: s), 0, _compat.jit_settings(jitted), state_out)
    before = [{"w" if i in like_the_state else "v": jnp.ones(2)} for i in (0, 1)]
    leaves, out_tree = jax.tree.flatten(before)
    with pytest.raises(NotLookedAtError) if outputs is None else contextlib.nullcontext():
        assert places.locate(({"w": jnp.ones(2)},), {}, out_tree, leaves).outputs == outputs


def returned_elsewhere(given, state_out=None):
    """Where `locate` finds a state of two arrays that has come out in another container.

    Args:
      given: What goes into the second call, made of the first one's result.
      state_out: As in `CallForm`.
    """
    jitted = jax.jit(lambda *args: None)
    before = {"loss": jnp.float32(0), "new": {"a": jnp.ones(2), "b": jnp.ones(2)}}
    places = CallForm(jitted, 0, _compat.jit_settings(jitted), state_out)
    leaves, out_tree = jax.tree.flatten(before)
    return places.locate((given(before["new"]),), {}, out_tree, leaves).outputs


def test_a_state_in_another_container_is_what_the_loop_gives_back():
    assert returned_elsewhere(lambda new: (new["b"], new["a"])) == (2, 1)
    assert returned_elsewhere(lambda new: [[new["a"]], (new["b"],)]) == (1, 2)


def test_what_the_loop_gives_back_whole_is_not_taken_for_what_is_like_it():
    """The parameters come out in a list, and what has their container is a part of another's."""
    w = {"w": jnp.ones(2)}
    before = {"deep": {"er": {"average": w}}, "new": [jnp.ones(2)], "opt": [w, jnp.ones(2)]}
    before = jax.tree.map(jnp.copy, before)
    places = CallForm(jitted := jax.jit(lambda *args: None), (0, 1), _compat.jit_settings(jitted))
    leaves, out_tree = jax.tree.flatten(before)
    args = {"w": before["new"][0]}, before["opt"]
    assert places.locate(args, {}, out_tree, leaves).outputs == (1, 2, 3)


def test_the_message_names_what_is_missing_and_not_what_was_taken_for_it():
    with pytest.raises(StepMismatchError, match=r"state it was given, \{'w': \*\};"):
        found_in((0.5, [{"w": 1}, 2]), [{"w": 0}, [{"w": 0}, 0]], None)


@pytest.mark.parametrize(
    ("given", "state_out"),
    [
        (lambda new: (new["b"], jnp.ones(2)), None),  # it may be the step's, or another's
        (lambda new: (new["b"], new["b"]), None),
        (lambda new: (new["b"], 1.0), None),
        (lambda new: (), None),
        (lambda new: (new["b"], new["a"]), "new"),
    ],
)
def test_a_state_that_is_not_given_back_whole_is_not_found(given, state_out):
    with pytest.raises(StepMismatchError, match=r"no tree like the state|does not lead to a tree"):
        returned_elsewhere(given, state_out)


def test_of_several_parts_alike_the_one_of_the_states_shapes_and_dtypes():
    """Where the arrays alone tell: gradients may be narrower."""
    given = {"w": jnp.ones(2)}
    result = [{"w": jnp.ones(2, jnp.bfloat16)}, {"w": jnp.ones(3)}, {"w": jnp.ones(2)}, given]
    found = form(lambda state: result, 0).new_leaves_of(result, (given,))
    assert [x is result[2]["w"] for x in found] == [True]


def test_arrays_that_are_there_twice_are_found_in_turn():
    a, b = jnp.zeros(2), jnp.ones(2)
    assert identical([a, b, a, 3, jnp.ones(3)], [a, 3, a, b]) == [0, 3, 2, None, None]
    assert identical([a, a, a], [a, a]) == [0, 1, 1]
