"""Plans: everything leaves once, within the budget, and never needlessly early."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gockpt_jax import WindowOptions, _compat
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.program import ReplayGroup, StepProgram
from gockpt_jax.training.recipe import Recipe
from gockpt_jax.window.plan import (
    StateBytes,
    fill_blocks,
    measure_bytes,
    peak_device_bytes,
    plan_window,
)

NOTHING = Recipe(0, 0, 0, (), ())
thorough = settings(max_examples=150, derandomize=True, deadline=None, database=None)


@st.composite
def states(draw):
    """Leaves of some bytes; some of them in groups, the others late."""
    leaves = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=12))
    early = draw(st.permutations(range(len(leaves))))[: draw(st.integers(0, len(leaves)))]
    groups = []
    while early:
        size = draw(st.integers(1, len(early)))
        groups.append(ReplayGroup(tuple(sorted(early[:size])), (), (), NOTHING))
        early = early[size:]
    return groups, StateBytes(tuple(leaves), draw(st.integers(0, 500)))


@thorough
@given(states(), st.integers(2, 9))
def test_every_group_leaves_exactly_once(state, steps):
    groups, size = state
    plan = fill_blocks(groups, size, steps, "why")
    if not groups:
        assert (plan.steps, plan.blocks, plan.reason) == (1, (), "why")
        return
    assert plan.steps == steps
    assert len(plan.blocks) == steps - 1
    assert sorted(g for block in plan.blocks for g in block) == list(range(len(groups)))
    assert plan == fill_blocks(groups, size, steps, "why")


@thorough
@given(states(), st.integers(2, 9))
def test_blocks_are_even_and_shrink(state, steps):
    """No block outweighs another by more than one group, and the heaviest leaves first."""
    groups, size = state
    plan = fill_blocks(groups, size, steps, "")
    group_bytes = [sum(size.leaves[j] for j in g.leaves) for g in groups]
    blocks = [sum(group_bytes[g] for g in block) for block in plan.blocks]
    assert blocks == sorted(blocks, reverse=True)
    if blocks:
        assert blocks[0] - blocks[-1] <= max(group_bytes)


@thorough
@given(states(), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 12_000)))
def test_planned_window_keeps_the_budget_and_is_the_shortest(state, max_steps, budget):
    groups, size = state
    plan = plan_window(groups, size, WindowOptions(max_steps=max_steps), budget)
    assert len(plan.blocks) == plan.steps - 1
    assert plan.steps <= max_steps
    if not groups or budget is None or sum(size.leaves) <= budget:
        assert plan.steps == 1
        return
    shorter = range(2, plan.steps if plan.steps > 1 else max_steps + 1)
    peaks = [peak_device_bytes(fill_blocks(groups, size, k, ""), groups, size) for k in shorter]
    assert all(peak > budget for peak in peaks)
    if plan.steps > 1:
        assert peak_device_bytes(plan, groups, size) <= budget


@thorough
@given(states(), st.integers(1, 9), st.integers(1, 5000))
def test_fixed_steps_win_over_the_budget(state, steps, budget):
    groups, size = state
    plan = plan_window(groups, size, WindowOptions(steps=steps), budget)
    assert plan.steps == (steps if groups else 1)
    assert plan.reason


def test_reasons_tell_why():
    groups = [ReplayGroup((0,), (), (), NOTHING), ReplayGroup((1,), (), (), NOTHING)]
    size = StateBytes((100, 100, 50), 10)

    def reason(groups, budget, **options):
        return plan_window(groups, size, WindowOptions(**options), budget).reason

    assert "no leaf may leave early" in reason([], 1)
    assert "one device copy of the state fits" in reason(groups, 250)
    assert "3 steps keep within the device budget" in reason(groups, 120)
    assert "no window of at most 8 steps fits" in reason(groups, 100)
    assert "steps=4" in reason(groups, 1, steps=4)


def test_peak_counts_two_steps_in_flight_beside_the_heaviest_block():
    groups = [ReplayGroup((0,), (), (), NOTHING), ReplayGroup((1,), (), (), NOTHING)]
    size = StateBytes((100, 80, 50), 10)
    assert peak_device_bytes(fill_blocks(groups, size, 2, ""), groups, size) == 180 + 20
    assert peak_device_bytes(fill_blocks(groups, size, 3, ""), groups, size) == 100 + 20
    heavy = StateBytes((10, 10, 50), 10)
    # The late leaves follow when nothing more is retained.
    assert peak_device_bytes(fill_blocks(groups, heavy, 3, ""), groups, heavy) == 50


def test_bytes_are_those_of_one_device():
    """Sharded leaves weigh an eighth, replicated ones the whole; a gradient as its own dtype."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spread, whole = (NamedSharding(mesh, p) for p in (PartitionSpec("x"), PartitionSpec()))

    def step(state, g, h):
        new = {"a": state["a"] + g.astype(jnp.float32), "c": state["c"] + 1}
        return new | {"b": state["b"] + h, "d": state["d"] - h}

    f32 = np.zeros((16, 4), np.float32)
    state = {"a": spread, "b": whole, "c": whole, "d": whole}
    state = {k: jax.device_put(f32 if k != "c" else np.int32(0), s) for k, s in state.items()}
    args = (state, jax.device_put(f32.astype(jnp.bfloat16), spread), jax.device_put(f32, whole))
    jitted = jax.jit(step)
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    program = StepProgram(jitted, form, args, {}, even_for_nothing=False)
    size = measure_bytes(program, jax.tree.leaves(state))
    assert size.leaves == (32, 256, 4, 256)
    assert size.retained == 16 + 256
