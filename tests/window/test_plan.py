"""Plans: everything leaves once, within the budget, and never needlessly early."""

from __future__ import annotations

import collections
import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import FIRST_ALONE
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from seeded import SEEDED

from gockpt_jax import WindowOptions, _compat
from gockpt_jax.storage.writing.array_layout import ReplicaLayout
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.step_cut import StepCut
from gockpt_jax.transfer.chunks import Source
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.facts import Facts, SavedBytes
from gockpt_jax.window.plan import (
    GroupUnit,
    Plan,
    StateBytes,
    fill_blocks,
    measure_bytes,
    peak_device_bytes,
    plan_window,
)
from gockpt_jax.window.planned import Planned
from gockpt_jax.window.units import common_sharding, sharers, units_behind

NO_CUT = StepCut((), (), (), (), (), {}, True)

thorough = settings(SEEDED, max_examples=150)


@st.composite
def states(draw):
    """Leaves of some bytes; some of them in groups, the others late."""
    leaves = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=12))
    early = draw(st.permutations(range(len(leaves))))[: draw(st.integers(0, len(leaves)))]
    units = []
    while early:
        size = draw(st.integers(1, len(early)))
        found = unit(sum(leaves[j] for j in early[:size]), draw(st.integers(0, 200)))
        units.append(dataclasses.replace(found, group=draw(st.integers(0, len(units)))))
        early = early[size:]
    return state_of(leaves, units)


@st.composite
def tight(draw):
    """States, and a budget that they do not fit into: what does is a window, or nothing."""
    size = draw(states().filter(lambda size: size.units and sum(size.leaves) > 1))
    return size, draw(st.integers(1, sum(size.leaves) - 1))


def planned_for(facts, max_steps=8):
    """Such states and budgets of which a window comes: of few that Hypothesis draws one does."""
    options = WindowOptions(max_steps=max_steps)
    return tight().filter(lambda drawn: plan_window(drawn[0], options, drawn[1], facts).steps > 1)


def unit(state_bytes, retained_bytes=0, group=0):
    return GroupUnit(
        state_bytes=state_bytes, retained_bytes=retained_bytes, group=group, start=0, stop=1,
        travels_by=None, retained_sharding=None, is_copied=True,
    )  # fmt: skip


def state_of(leaves, units):
    taken = SavedBytes(sum(leaves), to_host=sum(leaves), owned=sum(leaves))
    return StateBytes(tuple(leaves), sum(u.retained_bytes for u in units), tuple(units), taken)


@thorough
@given(states(), st.integers(2, 9))
def test_every_unit_leaves_exactly_once(size, steps):
    plan = fill_blocks(size.units, steps, "why")
    if not size.units:
        assert (plan.steps, plan.blocks, plan.reason) == (1, (), "why")
        return
    assert plan.steps == steps
    assert len(plan.blocks) == steps - 1
    assert sorted(u for block in plan.blocks for u in block) == list(range(len(size.units)))
    assert plan == fill_blocks(size.units, steps, "why")


@thorough
@given(planned_for(Facts()) | tight(), st.integers(1, 9))
def test_planned_window_keeps_the_budget_and_is_the_shortest(drawn, max_steps):
    size, budget = drawn
    plan = plan_window(size, WindowOptions(max_steps=max_steps), budget, Facts())
    assert len(plan.blocks) == plan.steps - 1
    assert plan.steps <= max_steps
    shorter = range(2, plan.steps if plan.steps > 1 else max_steps + 1)
    assert all(peak_device_bytes(fill_blocks(size.units, k, ""), size) > budget for k in shorter)
    if plan.steps > 1:
        assert peak_device_bytes(plan, size) <= budget


@thorough
@given(states(), st.integers(0, 9), st.integers(1, 9))
def test_what_fits_the_budget_or_cannot_leave_early_is_a_snapshot(size, spare, max_steps):
    options = WindowOptions(max_steps=max_steps)
    for budget in (None, sum(size.leaves) + spare):
        assert plan_window(size, options, budget, Facts()).steps == 1
    assert plan_window(dataclasses.replace(size, units=()), options, 1, Facts()).steps == 1


@thorough
@given(states(), st.integers(1, 9), st.integers(1, 5000))
def test_fixed_steps_win_over_the_budget(size, steps, budget):
    plan = plan_window(size, WindowOptions(steps=steps), budget, Facts())
    assert plan.steps == (steps if size.units else 1)
    assert plan.reason


def test_reasons_tell_why():
    size = state_of((100, 100, 50), [unit(100, 5), unit(100, 5)])

    def reason(size, budget, *known, **options):
        return plan_window(size, WindowOptions(**options), budget, Facts(*known)).reason

    assert "no leaf may leave early" in reason(state_of((250,), []), 1)
    assert "one device copy of the state fits" in reason(size, 250)
    assert "3 steps keep within the device budget of 120 B" in reason(size, 120)
    least = min(peak_device_bytes(fill_blocks(size.units, k, ""), size) for k in range(2, 9))
    fits = f"no window of at most 8 steps fits the device budget of 100 B: {least} B would do"
    assert fits in reason(size, 100)
    assert "no window of at most 1 step fits the device" in reason(size, 100, max_steps=1)
    assert "steps keep within the device budget" in reason(size, least)
    assert "not known yet: step time and link" in reason(size, 100)
    assert reason(size, 100, 1.0).endswith("not known yet: link")
    assert reason(size, 120, steps=3) == reason(size, None, steps=3) == "`steps=3`"
    takes = f"takes {peak_device_bytes(fill_blocks(size.units, 3, ''), size)} B of"
    assert f"`steps=3`, which {takes} the device budget of 50 B" in reason(size, 50, steps=3)


@pytest.mark.parametrize("facts", [Facts(), Facts(step_secs=1.0), Facts(link_bytes_per_sec=100.0)])
def test_until_time_and_rate_are_known_the_budget_decides(facts):
    size = state_of((100, 100, 50), [unit(100, 5), unit(100, 5)])
    plan = plan_window(size, WindowOptions(), 120, facts)
    assert plan == plan_window(size, WindowOptions(), 120, Facts())
    assert (plan.steps, plan.reason.partition(" of")[0]) == (
        3, "3 steps keep within the device budget",
    )  # fmt: skip


@pytest.mark.parametrize(("budget", "max_steps", "steps"), [(115, 3, 3), (115, 2, 1), (114, 8, 1)])
def test_the_longest_window_and_the_whole_budget_may_be_taken(budget, max_steps, steps):
    """A block of 100, beside what follows the one before it, 5, and all that a step retains."""
    size = state_of((100, 100, 50), [unit(100, 5), unit(100, 5)])
    assert plan_window(size, WindowOptions(max_steps=max_steps), budget, Facts()).steps == steps


def test_units_of_a_block_are_in_order():
    """Whatever gains most leaves first."""
    units = [unit(100, retained, group) for group, retained in enumerate((50, 20, 40, 10, 30))]
    assert fill_blocks(units, 3, "").blocks == ((1, 3, 4), (0, 2))
    assert fill_blocks(units, 2, "").blocks == ((0, 1, 2, 3, 4),)
    assert fill_blocks(units, 1, "").blocks == ()


def test_a_plan_is_shortened_only_where_the_save_is_nearer():
    """As it was chosen otherwise: its blocks need not be even."""
    size = state_of((100, 100, 100), [unit(100, 5, group) for group in range(3)])
    planned = Planned(NO_CUT, Plan(((0, 1), (2,), ()), "chosen"), size, 2, Facts())
    of_user = WindowOptions(steps=4)
    assert planned.within(4, of_user, None) is planned.within(9, of_user, None) is planned
    shorter = planned.within(3, of_user, None)
    assert shorter.plan == Plan(((0, 1), (2,)), "`steps=4`; the save was 2 steps away")
    assert shorter.size is size
    assert planned.host_bytes == shorter.host_bytes == (300, 2 * 15)
    assert planned.within(2, of_user, None).plan.blocks == ((0, 1, 2),)


def test_a_plan_that_is_shortened_is_none_where_larger_blocks_have_no_room():
    """Neither is it longer than the save is away."""
    size = state_of((100, 100, 100), [unit(100, 5, group) for group in range(3)])
    plan = plan_window(size, WindowOptions(), 125, Facts())
    planned = Planned(NO_CUT, plan, size, 1, Facts())
    assert plan.steps == 4
    assert planned.within(3, WindowOptions(), 125).plan.steps == 1
    assert planned.within(2, WindowOptions(), 125).plan.steps == 1


def test_rows_are_behind_where_others_of_their_group_have_left():
    """Of a group of which none has left, the leaves are late as a whole."""
    groups = tuple(SimpleNamespace(leaves=leaves) for leaves in ((0, 1), (2,)))
    units = [unit(50, 5, 0), unit(50, 6, 0), unit(100, 5, 1)]
    cut = dataclasses.replace(NO_CUT, groups=groups)
    assert units_behind(cut, units, {0}) == {0: [units[1]], 1: [units[1]]}
    assert units_behind(cut, units, {0, 1}) == units_behind(cut, units, ()) == {}


def test_departures_are_those_of_a_plan_before_where_they_are_of_the_same_units():
    """Blocks name units by their positions alone."""
    units = [unit(100, 5, group) for group in range(3)]
    plan = Plan(((0, 1), (2,)), "chosen")
    before, again, others = (
        Planned(NO_CUT, plan, state_of((100,) * 3, found), 2, Facts())
        for found in (units, units, units[::-1])
    )
    before._departures[plan.blocks] = []
    assert again.with_departures_of(before).has_departures
    assert not others.with_departures_of(before).has_departures


def test_the_host_needs_what_follows_that_which_leaves():
    """As the plan was chosen by: were all counted, it might be refused for ever."""
    size = state_of((100, 100, 100), [unit(100, n, group) for group, n in enumerate((5, 6, 7))])
    for blocks, following in ((), 0), (((1,),), 6), (((0,), (2,)), 12):
        planned = Planned(NO_CUT, Plan(blocks, "chosen"), size, 2, Facts())
        assert planned.host_bytes == (300, 2 * following)


KNOWN = Facts(step_secs=1.0, link_bytes_per_sec=100.0)


@settings(thorough, max_examples=50)
@given(planned_for(KNOWN))
def test_with_time_and_rate_the_plan_keeps_the_budget_too(drawn):
    size, budget = drawn
    plan = plan_window(size, WindowOptions(max_steps=8), budget, KNOWN)
    assert 1 < plan.steps == len(plan.blocks) + 1 <= 8
    early = [u for block in plan.blocks for u in block]
    assert len(early) == len(set(early))
    in_blocks = (sum(size.units[u].state_bytes for u in block) for block in plan.blocks)
    assert max(*in_blocks, size.retained) <= budget


@settings(thorough, max_examples=50)
@given(
    st.sampled_from([Facts(), KNOWN]).flatmap(lambda f: st.tuples(st.just(f), planned_for(f))),
    st.integers(2, 7),
)
def test_a_plan_that_is_shortened_keeps_the_budget(drawn, steps):
    """Its blocks are larger than those of the window that it is a part of."""
    facts, (size, budget) = drawn
    options = WindowOptions(max_steps=8)
    plan = plan_window(size, options, budget, facts)
    shorter = Planned(NO_CUT, plan, size, 1, facts).within(steps, options, budget).plan
    assert shorter.steps <= min(plan.steps, steps)
    if shorter.steps > 1:
        in_blocks = (sum(size.units[u].state_bytes for u in block) for block in shorter.blocks)
        assert max(*in_blocks, size.retained) <= budget
        # With a link it may wait for room; without, nothing is known of waits.
        assert facts is KNOWN or peak_device_bytes(shorter, size) <= budget


def test_a_plan_with_time_and_rate_tells_numbers():
    size = state_of((100, 100, 50), [unit(100, 5), unit(100, 5)])
    plan = plan_window(size, WindowOptions(), 200, KNOWN)
    assert plan.steps == 2
    assert "predicted stall 0.000 s, of a snapshot 0.500 s" in plan.reason
    assert plan_window(size, WindowOptions(), 250, KNOWN).steps == 1


@pytest.mark.parametrize(
    ("step_secs", "rate", "differs"),
    [
        (1.0, 100.0, False), (1.4, 75.0, False), (1.6, 100.0, True), (0.6, 100.0, True),
        (1.0, 160.0, True), (None, 1e9, False), (9.0, None, False),
    ],
)  # fmt: skip
def test_plans_are_made_anew_only_for_a_drift(step_secs, rate, differs):
    size, now = state_of((10, 10, 10), [unit(10, 5)]), Facts(step_secs, rate)
    known, unknown = (
        Planned(NO_CUT, Plan((), "why"), size, 1, facts, 20) for facts in (KNOWN, Facts())
    )
    assert known.is_outdated_by(now, 20) is differs
    assert unknown.is_outdated_by(now, 20) is (step_secs is not None and rate is not None)
    assert known.is_outdated_by(now, 19), "less room is a reason, however little"


@pytest.mark.parametrize(
    ("then", "now", "is_outdated"),
    [
        (25, 25, False), (25, 37, False), (25, 38, True), (25, None, True), (0, 1, True),
        (39, 10**9, True), (40, 10**9, False), (40, None, False), (None, 10, False),
    ],
)  # fmt: skip
def test_plans_that_were_short_of_the_host_s_room_are_made_anew_when_it_has_grown(
    then, now, is_outdated
):
    """A window takes 40 of it at the most: the state, and twice what follows."""
    size = state_of((10, 10, 10), [unit(10, 5)])
    planned = Planned(NO_CUT, Plan((), "why"), size, 1, with_room(KNOWN, then))
    assert planned.is_outdated_by(with_room(KNOWN, now), None) is is_outdated
    assert not planned.is_outdated_by(with_room(Facts(), now), None), (
        "nothing is predicted with that"
    )


def test_a_plan_that_has_been_refused_is_made_anew_where_the_host_has_less_than_it_takes():
    size = state_of((10, 10, 10, 10), [unit(10, 5), unit(10, 7, group=1)])
    facts = with_room(KNOWN, 100)
    window, snapshot = (
        Planned(NO_CUT, Plan(blocks, "why"), size, 1, facts) for blocks in (((0,),), ())
    )
    for room, was_refused, is_outdated in (
        (50, True, False), (49, True, True), (49, False, False), (None, True, False),
        (39, True, True),
    ):  # fmt: skip
        now = dataclasses.replace(with_room(KNOWN, room), was_refused=was_refused)
        assert window.is_outdated_by(now, None) is is_outdated
        assert not snapshot.is_outdated_by(now, None)


def with_room(facts, host_budget_bytes):
    return dataclasses.replace(facts, host_budget_bytes=host_budget_bytes)


def test_peak_counts_what_follows_a_step_beside_all_that_the_next_retains():
    size = state_of((100, 80, 50), [unit(100, 7, group=0), unit(80, 5, group=1)])
    assert peak_device_bytes(fill_blocks(size.units, 2, ""), size) == 180 + 12
    # The 80 leave first: they are followed by less.
    assert fill_blocks(size.units, 3, "").blocks == ((1,), (0,))
    assert peak_device_bytes(fill_blocks(size.units, 3, ""), size) == 100 + 5 + 12
    heavy = state_of((10, 10, 50), [unit(10, 5), unit(10, 5)])
    # The late leaves follow when nothing more is retained.
    assert peak_device_bytes(fill_blocks(heavy.units, 3, ""), heavy) == 50
    # Copies of what follows, once all has left.
    light = state_of((1, 1), [unit(1, 50), unit(1, 50)])
    assert peak_device_bytes(fill_blocks(light.units, 3, ""), light) == 100 + 100


def test_bytes_are_those_of_one_device(monkeypatch):
    """Sharded leaves weigh an eighth, replicated ones the whole; a gradient as its own dtype.

    Replicas that share send an eighth, and hold all that an armed step returns to them.
    """
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
    program = StepProgram(jitted.trace(*args), form, args, {}, even_for_nothing=False)
    size = measure_bytes(program.cut, jax.tree.leaves(state), FIRST_ALONE)
    assert size.leaves == (32, 256, 4, 256)
    # One of the replicas sends what is no slice of anybody's, in turn: an eighth each.
    assert (size.staged, size.to_host) == (32 + 256 + 4 + 256, 32 + 32 + 1 + 32)
    assert (size.retained, size.followers) == (16 + 256, 16 + 32)
    assert (size.late, size.late_shared) == (4, 4 - 1)
    monkeypatch.setattr("gockpt_jax.transfer.replicas.MIN_SLICE_ELEMENTS", 8)
    sharing = Replicas(ReplicaLayout(use_replica_parallel=True).write_shape)
    size = measure_bytes(program.cut, jax.tree.leaves(state), sharing)
    assert size.leaves == (32, 32, 4, 32)
    assert (size.staged, size.to_host) == (32 + 32 + 4 + 32, 32 + 32 + 1 + 32)
    assert (size.retained, size.followers, size.late) == (16 + 256, 16 + 32, 4)


def test_what_the_host_holds_takes_neither_device_nor_link():
    """Nor does it leave early; but the armed step retains for it all the same."""
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")

    def step(state):
        m = 0.5 * state["m"] + jnp.sin(state["w"])
        return {"m": m, "w": state["w"] - m}

    jitted, leaf = jax.jit(step), 64 * 4
    state = {k: jnp.ones(64) for k in ("m", "w")}
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    program = StepProgram(jitted.trace(state), form, (state,), {}, even_for_nothing=False)
    both = measure_bytes(program.cut, [state["m"], state["w"]], FIRST_ALONE)
    assert (both.staged, both.late, len(both.units)) == (2 * leaf, 0, 1)
    for on_host in (("m",), ("m", "w")):
        leaves = [jax.device_put(x, host) if k in on_host else x for k, x in state.items()]
        size = measure_bytes(program.cut, leaves, FIRST_ALONE)
        sent = 2 * leaf - len(on_host) * leaf
        assert (size.staged, size.late, size.units, size.retained) == (sent, sent, (), leaf)
        assert size.leaves == (leaf, leaf)  # what is on the host and on disk in the end
        assert plan_window(size, WindowOptions(), max(sent, 1), Facts()).steps == 1


@pytest.mark.parametrize(
    ("unsaved", "sent"), [((), "mvw"), ((0,), "mvw"), ((0, 1), "w"), ((0, 1, 2), "")]
)
def test_a_group_of_which_saves_take_the_larger_part_leaves_early_as_a_whole(unsaved, sent):
    """For replay reads all of it; of another that is sent which saves take."""

    def step(state, x):
        m = 0.5 * state["m"] + jnp.sin(x)
        v = 0.5 * state["v"] + m
        return {"m": m, "v": v, "w": state["w"] - v}

    jitted, leaf = jax.jit(step), 64 * 4
    state, x = {k: jnp.ones(64) for k in "mvw"}, jnp.ones(64)
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    program = StepProgram(jitted.trace(state, x), form, (state, x), {}, even_for_nothing=False)
    leaves = jax.tree.leaves(state)
    size = measure_bytes(program.cut, leaves, FIRST_ALONE, Facts(unsaved=frozenset(unsaved)))
    assert size.leaves == tuple(leaf * (name in sent) for name in "mvw")
    assert size.staged == leaf * len(sent)
    assert [unit.state_bytes for unit in size.units] == [3 * leaf] * (sent == "mvw")


def test_what_no_program_cuts_leaves_as_a_whole(monkeypatch):
    """Frozen numbers of which two are in a byte, beside others, which leave in parts."""
    monkeypatch.setattr("gockpt_jax.window.units.MIN_CHUNK_BYTES", 64)
    monkeypatch.setattr("gockpt_jax.window.units.MAX_CHUNK_BYTES", 32)
    jitted = jax.jit(lambda s: s | {"w": jnp.cos(s["w"])})
    state = {"base": jnp.ones(512, jnp.int4), "kept": jnp.ones(512, jnp.int8), "w": jnp.ones(64)}
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    program = StepProgram(jitted.trace(state), form, (state,), {}, even_for_nothing=True)
    parts = collections.defaultdict(list)
    for found in measure_bytes(program.cut, jax.tree.leaves(state), FIRST_ALONE).units:
        (leaf,) = program.cut.groups[found.group].leaves
        parts[program.positions.paths[leaf]].append((found.start, found.stop))
    base, kept = parts.values()
    assert base == [(0, 512)]
    assert {stop - start for start, stop in kept} == {32}
    assert [0, *(stop for _, stop in kept)] == [*(start for start, _ in kept), 512]


MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
ROWS, WHOLE = (NamedSharding(MESH, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
COLUMNS = NamedSharding(MESH, PartitionSpec(None, "x"))
ON_HOST = ROWS.with_memory_kind("pinned_host")
ALONE = [jax.sharding.SingleDeviceSharding(device) for device in jax.devices()[:2]]


@pytest.mark.parametrize(
    ("places", "like"),
    [
        ([ROWS, ROWS], ROWS),
        ([WHOLE, ROWS], ROWS),
        ([ROWS, WHOLE], ROWS),
        ([WHOLE, COLUMNS, WHOLE], COLUMNS),
        (ALONE[:1] * 2, ALONE[0]),
        (ALONE, None),
        ([ROWS, ON_HOST], None),
        ([WHOLE, ON_HOST], None),
    ],
)
def test_a_group_travels_as_its_most_sharded_leaf(places, like):
    """Unless its leaves lie on different devices, or one of them on the host."""
    leaves = [jax.device_put(jnp.zeros((16, 8)), place) for place in places]
    assert common_sharding(leaves, range(len(leaves)), FIRST_ALONE) == like


@pytest.mark.parametrize(("dtype", "senders"), [(jnp.int8, 8), (jnp.int4, 1)])
def test_replicas_share_the_way_of_what_a_program_cuts(dtype, senders):
    leaf = jax.device_put(jnp.ones((16, 8), dtype), WHOLE)
    assert sharers(Source.of(leaf, WHOLE)) == senders


def test_processes_have_no_group_of_which_the_leaves_lie_differently(monkeypatch):
    """Each writes what it has of each leaf, and not what it has of another.

    What is retained for it is taken to lie as the leaf of which a device has most.
    """
    leaves = [jax.device_put(jnp.zeros((16, 8)), place) for place in (ROWS, WHOLE, ROWS)]
    jitted = jax.jit(lambda state, g: [0.5 * x + g for x in state])
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    program = StepProgram(
        jitted.trace(leaves, leaves[0]), form, (leaves, leaves[0]), {}, even_for_nothing=False
    )
    size = measure_bytes(program.cut, leaves, FIRST_ALONE)
    assert ([unit.state_bytes for unit in size.units], size.retained) == ([3 * 64], 64)
    monkeypatch.setattr(NamedSharding, "is_fully_addressable", False)
    assert common_sharding(leaves, (0, 1), FIRST_ALONE) is None
    assert common_sharding(leaves, (0, 2), FIRST_ALONE) == ROWS
    size = measure_bytes(program.cut, leaves, FIRST_ALONE)
    assert (size.units, size.retained) == ((), 512)


@pytest.mark.parametrize(
    ("large_bytes", "spec", "shares", "is_copied"),
    [
        (128, PartitionSpec("x"), False, False),
        (129, PartitionSpec("x"), False, True),  # the smaller of the two
        (128, PartitionSpec(), False, True),
        (128, PartitionSpec(), True, True),
    ],
)
def test_what_follows_is_copied_where_it_is_small_or_shared(
    monkeypatch, large_bytes, spec, shares, is_copied
):
    monkeypatch.setattr("gockpt_jax.window.units.LARGE_BYTES", large_bytes)
    monkeypatch.setattr("gockpt_jax.transfer.replicas.MIN_SLICE_ELEMENTS", 64)
    place = NamedSharding(MESH, spec)

    def step(state, g, h):
        given = g.astype(jnp.float32)
        return {"a": state["a"] + given + h, "b": state["b"] - given - h}

    state, h = jax.device_put(({k: jnp.ones(512) for k in "ab"}, jnp.ones(512)), place)
    args = (state, h.astype(jnp.bfloat16), h)
    jitted = jax.jit(step)
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    program = StepProgram(jitted.trace(*args), form, args, {}, even_for_nothing=False)
    replicas = Replicas(ReplicaLayout(use_replica_parallel=shares).write_shape)
    (found,) = measure_bytes(program.cut, jax.tree.leaves(state), replicas).units
    assert {x.dtype.itemsize for x in program.cut.arrays} == {2, 4}
    assert found.stop == (64 if shares or spec else 512)
    assert found.is_copied is is_copied


def test_copies_that_the_host_makes_take_of_its_budget():
    size = state_of((100, 100, 50), [unit(100, 5), unit(100, 5)])
    facts = dataclasses.replace(KNOWN, host_budget_bytes=300)
    assert plan_window(size, WindowOptions(), 200, facts).steps == 2
    taken = size.taken.plus(SavedBytes(of_device=50, in_host_memory=50, to_host=50))
    beside = dataclasses.replace(size, taken=taken)
    assert (beside.staged, beside.late) == (size.staged, size.late)
    tight = plan_window(beside, WindowOptions(), 200, facts)
    assert (tight.steps, "the host budget" in tight.reason) == (1, True)
    roomy = dataclasses.replace(facts, host_budget_bytes=350)
    assert plan_window(beside, WindowOptions(), 200, roomy) == plan_window(
        size, WindowOptions(), 200, facts
    )


def test_copies_of_what_follows_are_planned_for():
    found = unit(60, 40)
    facts = Facts(step_secs=20.0, link_bytes_per_sec=10.0)
    in_place, copied = (
        plan_window(state_of([60, 100], [one]), WindowOptions(max_steps=3), 100, facts)
        for one in (dataclasses.replace(found, is_copied=False), found)
    )
    assert in_place.blocks == ((0,),)  # beside the 60 there is room for the 40 that are retained
    assert copied.blocks == ()  # not for 40 again: the step would wait until the 60 have been sent
