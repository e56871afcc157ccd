"""The programs of a step, and when one more is traced, by what is told of its calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gockpt_jax import _compat
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.kinds import Kinds
from gockpt_jax.training.program import StepProgram

PROGRAMS, AT_ONCE = 8, 3


class Program:
    """As far as `Kinds` looks: takes calls of one length of batch."""

    def __init__(self, length=0):
        self.length, self.has_served, self.is_known = length, False, True

    def takes(self, args, kwargs):
        return self.is_known and args == (self.length,)

    def is_like(self, other):
        return self.length == other.length

    def is_forgotten(self):
        return not self.is_known


def refused(kinds, *, last=False, why="", in_window=True):
    kinds.called()
    return kinds.refused(why, last=last, in_window=in_window)


def traced(kinds, length=0):
    program = Program(length)
    kinds.traced()
    kinds.add(program)
    return program


def test_the_first_refused_call_of_a_window_is_one_program_more():
    kinds = Kinds(always=False)
    traced(kinds)
    assert not any(refused(kinds, in_window=False) for _ in range(5))
    assert refused(kinds)


def test_a_step_is_not_given_up_as_long_as_it_has_a_program_that_has_served():
    kinds = Kinds(always=False)
    for n in range(PROGRAMS + 1):
        served = traced(kinds, n)
    assert "changed shape" in kinds.why_no_more
    kinds.ran_armed(served)
    assert kinds.why_no_more is None
    kinds.drop(served)
    assert "changed shape" in kinds.why_no_more


def test_a_call_counts_once_however_often_it_is_told_of():
    kinds = Kinds(always=False)
    assert refused(kinds)
    assert not kinds.refused("", last=False, in_window=True)
    assert not refused(kinds, last=True)  # of the one that was told of before
    assert kinds.refused("", last=False, in_window=True)
    (told,) = kinds.explain()
    assert told.startswith("2 windows were lost")


def test_each_kind_of_call_has_its_program():
    kinds = Kinds(always=False)
    assert kinds.of((1,), {}) is None
    one = traced(kinds, 1)
    assert len(kinds) == 1
    two = traced(kinds, 2)
    assert len(kinds) == 2
    assert [kinds.of((n,), {}) for n in (1, 2, 3)] == [one, two, None]
    anew = traced(kinds, 1)
    assert kinds.of((1,), {}) is anew
    kinds.drop(anew)
    assert kinds.of((1,), {}) is None
    two.is_known = False
    kinds.forget()
    assert len(kinds) == 0
    assert kinds.of((2,), {}) is None


def test_the_program_that_has_been_wanted_least_lately_goes_first():
    kinds = Kinds(always=False)
    for length in range(PROGRAMS):
        traced(kinds, length)
    assert kinds.of((0,), {}) is not None  # 1 is the oldest now
    traced(kinds, PROGRAMS)
    assert [n for n in range(PROGRAMS + 1) if kinds.of((n,), {}) is None] == [1]


def test_where_all_steps_run_armed_the_first_refused_calls_are_programs_at_once():
    """Later it goes by the windows: an odd batch costs no more than the one that it comes in."""
    kinds = Kinds(always=True)
    traced(kinds)
    for _ in range(AT_ONCE - 1):
        assert refused(kinds, in_window=False)
        assert refused(kinds, in_window=False)  # the call before failed as it ran
        traced(kinds)
    assert not any(refused(kinds, in_window=False) for _ in range(9))
    assert refused(kinds)


def test_after_many_programs_for_nothing_only_what_lasts_is_traced():
    kinds = Kinds(always=False)
    for _ in range(PROGRAMS):
        assert refused(kinds)
        program = traced(kinds)
    assert kinds.why_no_more is not None
    kinds.ran_armed(program)
    for _ in range(2):  # one has served: for another there is room
        kinds.ran_armed(program)
        assert kinds.why_no_more is None
        assert refused(kinds)
        traced(kinds, 1)
        kinds.ran_armed(program)
        assert [refused(kinds) for _ in range(PROGRAMS)] == [False] * (PROGRAMS - 1) + [True]
        kinds.ran_armed(traced(kinds, 2))
        kinds.ran_armed(kinds.of((1,), {}))


def test_programs_that_run_armed_may_follow_each_other_for_ever():
    kinds = Kinds(always=False)
    for length in range(3 * PROGRAMS):
        assert kinds.why_no_more is None
        assert refused(kinds)
        kinds.ran_armed(traced(kinds, length))


def test_why_it_is_not_traced_any_more_tells_of_the_last_change():
    kinds = Kinds(always=False)
    for _ in range(PROGRAMS):
        traced(kinds)
    assert kinds.why_no_more.endswith("the same from call to call")
    refused(kinds, why="its batch")
    refused(kinds)  # nobody knows why
    assert kinds.why_no_more.endswith("from call to call (last difference: its batch)")


STATE, X = {"w": jnp.ones(4)}, jnp.ones(4)


def sized(state, x, scale=1.0, mode="a"):
    return state | {"w": state["w"] + jnp.sum(x) * scale}


def program_of(*args, **kwargs):
    jitted = jax.jit(sized, static_argnames="mode")
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    return StepProgram(jitted.trace(*args, **kwargs), form, args, kwargs, even_for_nothing=False)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((STATE, X[:3]), {}),
        ((STATE, X.astype(jnp.bfloat16)), {}),
        ((STATE, jax.device_put(X, jax.devices()[1])), {}),
        ((STATE, X, 2.0), {}),
        ((STATE, X), {"mode": "b"}),
        ((STATE, jnp.full(4, 1.0)), {}),
        ((STATE | {"v": X}, X), {}),
    ],
    ids=["shape", "dtype", "place", "one more", "static", "weak type", "structure"],
)
def test_a_program_takes_calls_of_its_own_kind(args, kwargs):
    program = program_of(STATE, X)
    assert program.takes((STATE, X * 2), {})
    assert not program.takes(args, kwargs)
    other = program_of(*args, **kwargs)
    assert other.takes(args, kwargs)
    assert not other.is_like(program)
    assert program_of(STATE, X * 3).is_like(program)


@pytest.mark.parametrize(
    "first",
    [{"w": jnp.full(4, 1.0)}, {"w": jax.device_put(jnp.ones(4), jax.devices()[0])}],
    ids=["weak type", "place"],
)
def test_the_program_of_a_state_that_has_settled_takes_the_place_of_the_one_before(first):
    """Or calls would have to be told apart in every run that begins with such a state."""
    program, settled = program_of(first, X), program_of(STATE, X)
    assert not program.takes((STATE, X), {})
    assert settled.is_like(program)


@pytest.mark.parametrize("x", ["text", np.array(["text"]), object(), {1: X, "a": X}])
def test_what_jax_takes_no_program_takes(x):
    """The call is for the user's own step to refuse."""
    assert not program_of(STATE, X).takes((STATE, x), {})


def test_a_program_takes_batches_that_lie_as_its_own():
    one, other = (jax.device_put(X, device) for device in jax.devices()[:2])
    program = program_of(STATE, one)
    assert program.takes((STATE, one * 2), {})
    assert not program.takes((STATE, other), {})


def test_a_program_that_jax_has_forgotten_takes_no_calls():
    program = program_of(STATE, X)
    program.arm()  # until then it keeps the trace itself
    assert program.takes((STATE, X), {})
    jax.clear_caches()
    assert not program.takes((STATE, X), {})


def test_a_program_takes_no_calls_under_other_settings():
    program = program_of(STATE, X)
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        assert not program.takes((STATE, X), {})
        assert not program_of(STATE, X).is_like(program)
    assert program.takes((STATE, X), {})
    assert program.takes((STATE, np.asarray(X)), {})
