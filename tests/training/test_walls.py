"""Chains of factors that go on inside a branch or behind one, or in a block that is computed again.

A step folds them up to there, or as one: other bits (found by random programs).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from training_helpers import N, analyse, bits, vector

Step = Callable[..., dict[str, jax.Array]]
ARGUMENTS = (vector(2, N), jnp.float32(0.7123), jnp.float32(1.0))


def in_a_branch(state: dict[str, Any], x: Any, s: Any, limit: Any) -> dict[str, Any]:
    """The factor 3 outside, two inside."""
    g = x * 3.0

    def update() -> dict[str, Any]:
        return {"m": 0.9 * state["m"] + 0.1 * (g * s)}

    return lax.cond(s < limit, update, lambda: state)


def computed_again(state: dict[str, Any], x: Any, s: Any, limit: Any) -> dict[str, Any]:
    """The gradient is elementwise in what goes into the block."""
    loss = jax.checkpoint(lambda w, g: jnp.sum(w * g * s) * 0.1 + limit)
    return {"m": 0.9 * state["m"] + jax.grad(loss)(state["m"], x * 3.0)}


def out_of_branches(state: dict[str, Any], x: Any, s: Any, limit: Any) -> dict[str, Any]:
    """A TPU's compiler multiplies behind the branches, and then by both factors at once."""
    g = lax.cond(s < limit, lambda: x * 0.3, lambda: jnp.cos(x) * 0.3)
    return {"m": g * 0.7 + state["m"]}


def out_of_a_loop(unroll: int, state: dict[str, Any], x: Any, s: Any, limit: Any) -> dict[str, Any]:
    """Of three turns, each after the first a product: the last comes behind a loop, or all do."""
    del s, limit

    def turn(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        return (carry[1], carry[0] * 0.7), None

    (g, _), _ = lax.scan(turn, (x, jnp.sin(x)), length=3, unroll=unroll)
    return {"m": g * 3.7 + state["m"]}


def torn(step: Step) -> int:
    """In how many elements replay differs from the step."""
    found = analyse(step, {"m": vector(1, N)}, *ARGUMENTS, even_for_nothing=True)
    new, cut = found.run()
    return sum(int(np.sum(bits(leaf) != bits(new[j]))) for j, leaf in found.replayed(cut))


OUT_OF_LOOPS = [functools.partial(out_of_a_loop, unroll) for unroll in (2, 3)]


@pytest.mark.parametrize("step", [in_a_branch, out_of_branches, computed_again, *OUT_OF_LOOPS])
def test_what_replays_replays_exactly(step: Step) -> None:
    assert torn(step) == 0


def test_a_product_in_a_branch_is_not_cut() -> None:
    """But the sum behind it, which is worth as much as the leaf."""
    found = analyse(in_a_branch, {"m": vector(1, N)}, *ARGUMENTS, even_for_nothing=True)
    (group,) = found.cut.groups
    assert [v.op.name for v in group.retained if v.op] == ["add"]


@pytest.mark.parametrize("step", [out_of_branches, *OUT_OF_LOOPS])
def test_what_may_be_merged_across_a_branch_is_late(step: Step) -> None:
    found = analyse(step, {"m": vector(1, N)}, *ARGUMENTS, even_for_nothing=True)
    assert found.groups == []


def test_what_ends_before_the_wall_leaves_early() -> None:
    """Clipping as optax has it: a choice ends the chain."""

    def step(state: dict[str, Any], x: Any, s: Any, limit: Any) -> dict[str, Any]:
        g = jnp.where(s < limit, x, x * 3.0)
        return lax.cond(
            s < limit, lambda: {"m": 0.9 * state["m"] + 0.1 * (g * s)}, lambda: state
        )  # fmt: skip

    found = analyse(step, {"m": vector(1, N)}, *ARGUMENTS, even_for_nothing=True)
    assert found.groups == [["m"]]
    assert torn(step) == 0
