"""The cut that accepts rounding: what it frees, what it still refuses, how near it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_helpers import analyse, vector
from updates import UPDATES, adam, gradient, l2, state

from gockpt_jax import _compat
from gockpt_jax.replay.ulps import difference
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.recipe import make_recipe


@pytest.mark.parametrize("step", [adam, l2, UPDATES["worked example"].step])
def test_parameters_leave_with_their_moments_for_the_same_gradient(step):
    exact = analyse(step, state("m", "v", "w"), gradient())
    rounded = analyse(step, state("m", "v", "w"), gradient(), exact=False)
    assert (exact.groups, rounded.groups) == ([["m", "v"]], [["m", "v", "w"]])
    assert [v.shape for v in rounded.cut.groups[0].retained] == [vector(0).shape]


def test_scalars_are_captured_where_the_exact_cut_captures_them():
    """`1 - b1 ** count` costs nothing to send: it is not computed again with another rounding."""
    params = {"w": vector(1), "b": vector(2)}
    tx = optax.adamw(1e-3)

    def step(s, g):
        updates, opt = tx.update(g, s["opt"], s["params"])
        return {"params": optax.apply_updates(s["params"], updates), "opt": opt}

    found = analyse(step, {"params": params, "opt": tx.init(params)}, params, exact=False)
    assert [len(group.leaves) for group in found.cut.groups] == [3, 3]
    for group in found.cut.groups:
        names = {i.name for i in make_recipe(group, found.leaves).instructions if i.is_scalar}
        assert names.isdisjoint({"pow", "integer_pow", "div"})


def test_numbers_that_the_compiler_works_out_are_worked_out_by_the_host():
    """They cannot be sent: the step goes on with what the compiler makes of them."""

    def step(s, g):
        return {"m": jnp.exp(jnp.float32(-0.1)) * s["m"] + g, "w": s["w"] - g}

    exact, rounded = (
        analyse(step, state("m", "w"), gradient(), even_for_nothing=True, exact=is_exact)
        for is_exact in (True, False)
    )
    assert (exact.groups, rounded.groups) == ([["w"]], [["m", "w"]])


def test_arithmetic_below_fp32_stays_late():
    narrow = {name: x.astype(jnp.bfloat16) for name, x in state("m", "v", "w").items()}
    found = analyse(adam, narrow, gradient().astype(jnp.bfloat16), exact=False)
    assert found.groups == []


def test_a_gradient_widened_within_the_step_is_not_sent_narrow():
    """XLA may drop a narrowing that is undone; the difference would be one of bf16's places."""

    def step(s, x):
        return adam(s, jnp.tanh(x).astype(jnp.bfloat16).astype(jnp.float32))

    found = analyse(step, state("m", "v", "w"), gradient(), exact=False)
    (group,) = found.cut.groups
    assert [v.dtype for v in group.retained] == [jnp.float32]


def test_five_replayed_updates_stay_within_a_few_ulps():
    found = analyse(adam, state("m", "v", "w"), gradient(), exact=False)
    (group,) = found.cut.groups
    recipe = make_recipe(group, found.leaves)
    replay = jax.jit(lambda old, kept, scalars: recipe.apply(old, kept, scalars))
    (replayed, _), *updates = found.run_many(5, lambda n: [gradient(n)])
    for _, cut in updates:
        replayed = replay(
            replayed, [cut[v] for v in group.retained], [cut[v] for v in group.scalars]
        )
    for new, old in zip(updates[-1][0], replayed, strict=True):
        assert difference(np.asarray(old), np.asarray(new)).max_ulps <= 16


def test_a_rounded_program_has_the_same_trace_and_another_cut():
    jitted = jax.jit(adam, donate_argnums=0)
    args = (state("m", "v", "w"), gradient())
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    program = StepProgram(jitted.trace(*args), form, args, {}, even_for_nothing=False)
    rounded = program.rounded()
    assert (program.cut.is_exact, rounded.cut.is_exact) == (True, False)
    assert [len(p.cut.groups[0].leaves) for p in (program, rounded)] == [2, 3]
    rounded.arm()
    rounded.wait_until_ready()
    assert rounded.why_not_ready() is None
    assert not program.is_armed
    with pytest.raises(AssertionError, match="trace is dropped"):
        rounded.rounded()
