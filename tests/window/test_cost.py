"""The cost model: budgets kept, nothing lost, never worse than a snapshot, and the paper's sums."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded import SEEDED

from gockpt_jax.window.choice import (
    LEAST_GAIN_SECS,
    best_per_steps,
    choose,
    into_blocks,
    windows_of,
)
from gockpt_jax.window.cost import Terms, Unit, copied_bytes, play

thorough = settings(SEEDED, max_examples=150)
TICK = 1.001e-3  # stalls closer than this are equal to the model


@st.composite
def terms(draw):
    """Budgets and links at which a window may gain, a state, and what it retains."""
    units: list[Unit] = []
    for _ in range(draw(st.integers(0, 6))):
        units.append(
            Unit(
                state_bytes=draw(st.integers(0, 1000)),
                retained_bytes=draw(st.integers(0, 600)),
                group=draw(st.sampled_from([None, 0, 1])),
                is_copied=draw(st.booleans()),
                sharers=draw(st.sampled_from([1, 1, 4])),
            )
        )
    late_bytes = draw(st.integers(1, 2000))
    state_bytes = late_bytes + sum(u.state_bytes for u in units)
    parts = st.one_of(st.none(), st.floats(0.2, 1.5), st.floats(0.5, 1.0))
    device, host = (
        None if x is None else math.ceil(x * state_bytes) for x in draw(st.tuples(parts, parts))
    )
    beside = draw(st.integers(0, 100))  # retained for leaves that the plan keeps, or by replicas
    return Terms(
        units=tuple(units),
        late_bytes=late_bytes,
        shared_bytes=draw(st.sampled_from([0, 0, late_bytes // 2])),
        retained_bytes=sum(u.retained_bytes for u in units) + beside,
        link_bytes_per_sec=draw(st.floats(1.0, 1e4)),
        step_secs=draw(st.floats(0.01, 100.0)),
        device_budget_bytes=device,
        host_budget_bytes=None if host is None else 2 * host,
        max_steps=draw(st.integers(1, 6)),
    )


# Of what Hypothesis draws few have a window at all, and next to none one that is worth it.
with_windows = terms().filter(windows_of)
gaining = terms().filter(lambda terms: choose(terms).cost.steps > 1)


def held_over_time(terms, cost):
    """Bytes held on the device, told anew from the rules: when each is taken, and given back.

    A slow and plain second model: intervals of what is held, not a queue.
    """
    rate, budget = terms.link_bytes_per_sec, terms.device_budget_bytes
    held, now, free, left = [], 0.0, 0.0, []

    def in_use(at):
        return sum(n for start, end, n in held if start <= at < end)

    def wait_for(n):
        nonlocal now
        ends = sorted(end for _, end, _ in held if end > now)
        while budget is not None and in_use(now) + n > budget and ends:
            now = max(now, ends.pop(0))

    for block in cost.blocks:
        block_bytes = sum(terms.units[u].state_bytes for u in block)
        wait_for(block_bytes)
        free = max(free, now) + sum(terms.units[u].sent_bytes for u in block) / rate
        held.append((now, free, block_bytes))
        left.append(block)
        following = sum(terms.units[u].retained_bytes for b in left for u in b)
        copies = sum(terms.units[u].retained_bytes for b in left for u in b
                     if is_copied(terms.units, u, b))  # fmt: skip
        sent = sum(terms.units[u].following_bytes for b in left for u in b)
        retained = terms.retained_bytes + copies
        wait_for(retained)
        ends = now + terms.step_secs
        free = max(free, ends) + sent / rate
        held += [(now, ends, retained - following), (now, free, following)]
        now = ends
    return held, now


def is_copied(units, u, block):
    """A value is pulled as it is only if it is no small one, and all of its group leave here."""
    unit = units[u]
    of_group = {v for v, other in enumerate(units) if other.group == unit.group}
    return unit.is_copied or (unit.group is not None and not of_group <= set(block))


@thorough
@given(with_windows)
def test_budgets_are_never_exceeded(terms):
    for cost in windows_of(terms):
        held, _ = held_over_time(terms, cost)
        peaks = [sum(n for a, b, n in held if a <= start < b) for start, _, _ in held]
        assert cost.peak_bytes >= max(peaks)
        if terms.device_budget_bytes is not None:
            assert cost.peak_bytes <= terms.device_budget_bytes
        if terms.host_budget_bytes is not None:
            assert cost.host_bytes <= terms.host_budget_bytes
    chosen = choose(terms).cost
    assert chosen.steps == 1 or chosen.fits


@thorough
@given(with_windows)
def test_a_window_lasts_as_long_as_its_waits(terms):
    """The queue of the model against the plain intervals."""
    for cost in windows_of(terms):
        _, now = held_over_time(terms, cost)
        before_the_rest = now - (cost.steps - 1) * terms.step_secs
        assert cost.stall_secs >= before_the_rest - 1e-6 * (1 + now)


def test_what_replicas_share_is_held_by_all_and_sent_by_one():
    """The device has as much to hold as alone, the link and the host a fourth."""
    alone = Terms(
        units=(Unit(state_bytes=80, retained_bytes=40),), late_bytes=40, retained_bytes=40,
        link_bytes_per_sec=10.0, step_secs=5.0, device_budget_bytes=90,
    )  # fmt: skip
    unit = dataclasses.replace(alone.units[0], sharers=4)
    shared = dataclasses.replace(alone, units=(unit,), shared_bytes=30)
    for blocks, host_bytes in (((), 120), (((0,),), 120 + 2 * 40)):
        one, four = play(alone, blocks), play(shared, blocks)
        assert (four.peak_bytes, four.moved_bytes) == (one.peak_bytes, one.moved_bytes / 4)
        assert four.stall_secs == pytest.approx(one.stall_secs / 4)
        assert (one.host_bytes, four.host_bytes) == (host_bytes, host_bytes // 4)
    odd = Unit(state_bytes=9, retained_bytes=5, sharers=4)
    assert (odd.sent_bytes, odd.following_bytes) == (3, 2)  # of the one that sends most
    assert shared.blocking_secs == alone.blocking_secs / 4
    assert shared.state_bytes == alone.state_bytes
    assert play(dataclasses.replace(shared, host_budget_bytes=50), ((0,),)).fits
    assert not play(dataclasses.replace(shared, host_budget_bytes=49), ((0,),)).fits


def test_what_nothing_follows_is_held_while_its_step_runs():
    """And what follows one step beside all that the next one retains."""
    unit = Unit(state_bytes=80, retained_bytes=40)
    tight = Terms(
        units=(unit, unit), late_bytes=80, retained_bytes=80, link_bytes_per_sec=1.0,
        step_secs=1000.0, device_budget_bytes=160,
    )  # fmt: skip
    blocks = ((0,), (1,))
    # Before the second step 40 follow the first, and the block is staged: they have to go first.
    assert play(tight, blocks).peak_bytes == 160
    assert play(tight, blocks).stall_secs == 40
    almost = dataclasses.replace(tight, device_budget_bytes=199)
    assert play(almost, blocks).stall_secs == 40
    enough = dataclasses.replace(tight, device_budget_bytes=200)
    assert play(enough, blocks).stall_secs == 0
    assert play(enough, blocks).peak_bytes == 80 + 40 + 80


def test_a_block_beside_what_the_step_before_it_retained():
    """That step has run: of its 400 only the 1 that follows is left."""
    units = (Unit(state_bytes=100, retained_bytes=1), Unit(state_bytes=400, retained_bytes=399))
    terms = Terms(
        units=units, late_bytes=1, retained_bytes=400, link_bytes_per_sec=1e9, step_secs=1.0,
        device_budget_bytes=801,
    )  # fmt: skip
    assert play(terms, ((0,), (1,))).stall_secs == 0
    assert play(terms, ((0,), (1,))).peak_bytes == 801


def test_what_is_there_in_any_case_takes_no_room():
    """As the paper's gradients: only the link is taken by what follows."""
    unit = Unit(state_bytes=80, retained_bytes=40)
    terms = Terms(
        units=(unit, unit), late_bytes=0, retained_bytes=0, link_bytes_per_sec=10.0, step_secs=8.0,
        device_budget_bytes=80,
    )  # fmt: skip
    cost = play(terms, ((0,), (1,)))
    assert (cost.stall_secs, cost.peak_bytes, cost.moved_bytes) == (0, 80, 160 + 40 + 80)


def test_a_block_larger_than_the_budget_does_not_fit():
    """Whatever fits behind it."""
    units = (Unit(state_bytes=80, retained_bytes=0), Unit(state_bytes=40, retained_bytes=20))
    terms = Terms(
        units=units, late_bytes=80, retained_bytes=20, link_bytes_per_sec=10.0, step_secs=4.0,
        device_budget_bytes=80,
    )  # fmt: skip
    assert play(terms, ((0,), (1,))).fits
    assert not play(terms, ((0, 1),)).fits


@pytest.mark.parametrize(
    ("budget", "blocks", "stall_secs", "peak_bytes", "drain_secs"),
    [(90, (), 3, 90, 9), (None, (), 0, 120, 12), (None, ((0,),), 0, 160, 15)],
)
def test_the_rest_fills_the_budget_and_drains_behind_what_has_left(
    budget, blocks, stall_secs, peak_bytes, drain_secs
):
    """In a step of 1 s 10 bytes have gone: 70 of the block, what follows and the rest have not."""
    terms = Terms(
        units=(Unit(state_bytes=80, retained_bytes=40),), late_bytes=40, retained_bytes=40,
        link_bytes_per_sec=10.0, step_secs=1.0, device_budget_bytes=budget,
    )  # fmt: skip
    cost = play(terms, blocks)
    found = cost.stall_secs, cost.peak_bytes, cost.drain_secs
    assert found == (stall_secs, peak_bytes, drain_secs)


@thorough
@given(with_windows)
def test_every_unit_leaves_exactly_once(terms):
    for steps in range(2, terms.max_steps + 1):
        blocks = into_blocks(terms.units, steps, shrinking=steps % 2 == 0)
        if terms.units:
            assert len(blocks) == steps - 1
            assert sorted(u for b in blocks for u in b) == list(range(len(terms.units)))
    for cost in windows_of(terms):
        leaves_at = {u: i for i, block in enumerate(cost.blocks) for u in block}
        assert sum(map(len, cost.blocks)) == len(leaves_at)
        following = [
            sum(terms.units[u].following_bytes for u, at in leaves_at.items() if at <= i)
            for i in range(len(cost.blocks))
        ]
        assert cost.moved_bytes == terms.sent_bytes + sum(following)


@thorough
@given(terms() | gaining)
def test_never_worse_than_a_snapshot_or_a_blocking_save(terms):
    chosen = choose(terms).cost
    assert chosen.stall_secs <= play(terms, ()).stall_secs
    assert chosen.stall_secs <= terms.blocking_secs


@settings(thorough, max_examples=50)
@given(gaining, st.integers(0, 4000), st.floats(1.0, 10.0))
def test_more_budget_and_a_faster_link_never_stall_more(terms, more_bytes, faster):
    """But for what a window has to gain: for less than that a snapshot takes its place."""
    most = choose(terms).cost.stall_secs + LEAST_GAIN_SECS + TICK
    rate = terms.link_bytes_per_sec * faster
    assert choose(dataclasses.replace(terms, link_bytes_per_sec=rate)).cost.stall_secs <= most
    for name in ("device_budget_bytes", "host_budget_bytes"):
        if getattr(terms, name) is not None:
            for more in (getattr(terms, name) + more_bytes, None):
                easier = dataclasses.replace(terms, **{name: more})
                assert choose(easier).cost.stall_secs <= most


@thorough
@given(with_windows | gaining)
def test_least_stall_then_fewest_bytes_then_smallest_k(terms):
    chosen, snapshot = choose(terms).cost, play(terms, ())
    others = [snapshot, *windows_of(terms)]
    gain = snapshot.stall_secs - min(c.stall_secs for c in others)
    if gain < LEAST_GAIN_SECS or (chosen == snapshot and gain < LEAST_GAIN_SECS + TICK):
        assert chosen == snapshot
        return
    assert chosen.stall_secs <= min(c.stall_secs for c in others) + TICK
    as_good = [c for c in others if round(c.stall_secs / 1e-3) == round(chosen.stall_secs / 1e-3)]
    assert chosen.moved_bytes == min(c.moved_bytes for c in as_good)
    assert chosen.steps == min(c.steps for c in as_good if c.moved_bytes == chosen.moved_bytes)


@thorough
@given(terms(), st.integers(2, 8), st.booleans())
def test_blocks_are_within_one_unit_of_their_share(terms, steps, shrinking):
    units = terms.units
    total = sum(u.state_bytes for u in units)
    if not total:
        return
    shrinks = max(1 - sum(u.retained_bytes for u in units) / total, 0.05)
    share = [shrinks**i if shrinking else 1 for i in range(steps - 1)]
    for block, part in zip(into_blocks(units, steps, shrinking=shrinking), share, strict=True):
        largest = max(u.state_bytes for u in units)
        assert sum(units[u].state_bytes for u in block) <= total * part / sum(share) + largest


@pytest.mark.parametrize("steps", [2, 3, 5, 8])
@pytest.mark.parametrize("gain", [1.25, 2, 4])
def test_every_step_moves_the_same_bytes(steps, gain):
    units = tuple(Unit(state_bytes=1000, retained_bytes=int(1000 / gain)) for _ in range(2000))
    blocks = into_blocks(units, steps, shrinking=True)
    left, traffic = 0, []
    for block in blocks:
        traffic.append(len(block) * 1000 + left * int(1000 / gain))
        left += len(block)
    assert max(traffic) <= min(traffic) + 4 * 1000


# The paper: a step hides one K-th of the state, whatever exceeds it is stall.


def paper(ratio, steps, budget_parts, retained_parts):
    """K equal parts, of which a step hides one; gradients weigh `ratio` of what they follow."""
    part = Unit(state_bytes=84_000, retained_bytes=round(84_000 * ratio))
    return Terms(
        units=(part,) * (steps - 1), late_bytes=84_000, retained_bytes=84_000 * retained_parts,
        link_bytes_per_sec=84_000, step_secs=1.0, device_budget_bytes=84_000 * budget_parts,
    )  # fmt: skip


def saved_steps(ratio, steps):
    """Steps of stall that K equal parts save against a snapshot that hides one step's worth."""
    terms = paper(ratio, steps, budget_parts=1, retained_parts=0)
    snapshot, window = play(terms, ()), play(terms, tuple((u,) for u in range(steps - 1)))
    assert snapshot.stall_secs == pytest.approx(steps - 1)  # Async-O: (K - 1) T
    # GoCkpt waits for all that moves: K (K - 1) / 14 T with r = 1/7.
    waits = window.moved_bytes / terms.link_bytes_per_sec - steps * terms.step_secs
    assert waits == pytest.approx(ratio * steps * (steps - 1) / 2)
    return snapshot.stall_secs - waits


@pytest.mark.parametrize(
    ("ratio", "best", "saved"), [(1 / 7, {7, 8}, 3.0), (1 / 3, {3, 4}, 1.0)], ids=["bf16", "fp32"]
)
def test_the_papers_best_k_and_what_it_saves(ratio, best, saved):
    by_steps = {k: saved_steps(ratio, k) for k in range(2, 13)}
    most = max(by_steps.values())
    assert {k for k, s in by_steps.items() if s == pytest.approx(most)} == best
    assert most == pytest.approx(saved)


@pytest.mark.parametrize("steps", [2, 4, 7])
def test_gradients_of_one_step_beside_the_next_hide_all_but_theirs(steps):
    """With room for a block and one step's gradients, each step waits for the last one's."""
    terms = paper(1 / 7, steps, budget_parts=2, retained_parts=1)
    window = play(terms, tuple((u,) for u in range(steps - 1)))
    assert window.stall_secs == pytest.approx((steps - 1) * (steps - 2) / 14)
    roomier = dataclasses.replace(terms, device_budget_bytes=84_000 * 5)
    assert play(roomier, window.blocks).stall_secs < 1.0


# The choice.

FP32_ADAM = Terms(
    units=tuple(Unit(state_bytes=80, retained_bytes=40) for _ in range(100)),
    late_bytes=4000, retained_bytes=4000, link_bytes_per_sec=1000.0, step_secs=10.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "steps", "says"),
    [
        (None, 1, "one device copy of the state fits: 12 kB, and the device tells no free memory,"),
        (12_000, 1, "12 kB, the device budget of 12 kB"),
        (
            10_000,
            2,
            "2 steps: predicted stall 0.000 s, of a snapshot 2.000 s; at most 10 kB",
        ),
        (100, 1, "no window fits the device budget of 100 B; predicted stall of a snapshot"),
    ],
)
def test_the_choice_says_which_and_why(budget, steps, says):
    choice = choose(dataclasses.replace(FP32_ADAM, device_budget_bytes=budget))
    assert choice.cost.steps == steps
    assert says in choice.reason


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (10_000, "no window fits the host budget, of which a device has 10 B; "),
        (100, "no window fits the device budget of 100 B; "),  # nor would it with more of the host
    ],
)
def test_which_budget_leaves_no_window_is_said(device, says):
    choice = choose(
        dataclasses.replace(FP32_ADAM, device_budget_bytes=device, host_budget_bytes=10)
    )
    assert choice.cost.steps == 1
    assert choice.reason.startswith(says)


def test_nothing_to_gain_is_said():
    slow_to_follow = Unit(state_bytes=100, retained_bytes=100)
    terms = Terms(
        units=(slow_to_follow,), late_bytes=1, retained_bytes=100, link_bytes_per_sec=1.0,
        step_secs=0.001, device_budget_bytes=100,
    )  # fmt: skip
    choice = choose(terms)
    assert choice.cost.steps == 1
    least, *_, most = sorted(window.stall_secs for window in windows_of(terms))
    assert f"no window gains 0.03 s: predicted stall at least {least:.3f} s" in choice.reason
    assert most > least + 1
    nothing = choose(dataclasses.replace(terms, units=(), late_bytes=101))
    assert nothing.reason.startswith("no leaf may leave early")


LIGHT, FREE = (Unit(state_bytes=n, retained_bytes=0) for n in (10, 1000))


@pytest.mark.parametrize(
    ("terms", "sizes"),
    [
        # Equal traffic: equal blocks would stall for 22.5 s.
        (
            Terms(
                units=tuple(Unit(state_bytes=10, retained_bytes=5, group=g) for g in range(20)),
                late_bytes=100, retained_bytes=100, link_bytes_per_sec=2.0, step_secs=60.0,
                device_budget_bytes=210, max_steps=4,
            ),
            (10, 5, 3),
        ),
        # Equal blocks: of equal traffic, what is followed most would leave at the seal.
        (
            Terms(
                units=(Unit(state_bytes=40, retained_bytes=20), LIGHT),
                late_bytes=40, retained_bytes=20, link_bytes_per_sec=10.0, step_secs=10.0,
                device_budget_bytes=60, max_steps=3,
            ),
            (1, 1),
        ),
        # A fifth of a millisecond of stall is none: fewer bytes are moved than by three steps.
        (
            Terms(
                units=(FREE, Unit(state_bytes=200, retained_bytes=20)),
                late_bytes=850, retained_bytes=20, link_bytes_per_sec=10_000.0, step_secs=10.0,
                device_budget_bytes=1048,
            ),
            (1,),
        ),
        # Nor does a step more count, if it moves fewer bytes.
        (
            Terms(
                units=tuple(Unit(state_bytes=10, retained_bytes=2, group=g) for g in range(40)),
                late_bytes=80, retained_bytes=80, link_bytes_per_sec=5.0, step_secs=10.0,
                device_budget_bytes=432, max_steps=4,
            ),
            (3, 4, 3),
        ),
    ],
)  # fmt: skip
def test_which_of_the_windows_is_taken(terms, sizes):
    cost = choose(terms).cost
    assert cost.stall_secs < 1e-3
    assert tuple(map(len, cost.blocks)) == sizes


@pytest.mark.parametrize(("link", "steps"), [(95.0, 2), (105.0, 1)])
def test_a_window_that_gains_less_than_it_takes_by_itself_is_none(link, steps):
    """Three bytes do not fit the budget: they are 32 ms of the slower link, 29 of the other."""
    terms = Terms(
        units=(Unit(state_bytes=40, retained_bytes=0),), late_bytes=63, retained_bytes=0,
        link_bytes_per_sec=link, step_secs=10.0, device_budget_bytes=100,
    )  # fmt: skip
    assert play(terms, ((0,),)).stall_secs == 0
    choice = choose(terms)
    assert choice.cost.steps == steps
    assert choice.reason.startswith("no window gains 0.03 s: predicted") == (steps == 1)


def test_a_host_budget_for_the_state_alone_leaves_snapshots():
    terms = dataclasses.replace(FP32_ADAM, device_budget_bytes=10_000, host_budget_bytes=12_000)
    assert choose(terms).cost.steps == 1
    assert "host budget" in choose(terms).reason
    roomier = dataclasses.replace(terms, host_budget_bytes=20_000)
    assert choose(roomier).cost.steps > 1


def test_one_plan_for_each_k():
    costs = best_per_steps(dataclasses.replace(FP32_ADAM, device_budget_bytes=10_000))
    assert [c.steps for c in costs] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert costs[0].stall_secs == 2.0


@thorough
@given(with_windows)
def test_each_k_is_told_by_its_best_plan(terms):
    best = {cost.steps: cost.stall_secs for cost in best_per_steps(terms)}
    played = windows_of(terms)
    assert set(best) == {1, *(cost.steps for cost in played)}
    assert all(best[cost.steps] <= cost.stall_secs + TICK for cost in played)


def test_what_is_copied_before_it_travels_is_held_twice_while_the_step_runs():
    terms = Terms(
        units=(Unit(state_bytes=60, retained_bytes=40),), late_bytes=10, retained_bytes=40,
        link_bytes_per_sec=10.0, step_secs=5.0, device_budget_bytes=120,
    )  # fmt: skip
    unit = dataclasses.replace(terms.units[0], is_copied=True)
    twice = dataclasses.replace(terms, units=(unit,))
    assert play(terms, ((0,),)).stall_secs == 0
    assert play(twice, ((0,),)).stall_secs == 6  # until the 60 have gone
    assert play(twice, ((0,),)).moved_bytes == play(terms, ((0,),)).moved_bytes
    assert play(twice, ((0,),)).peak_bytes == 80
    assert play(dataclasses.replace(twice, device_budget_bytes=140), ((0,),)).peak_bytes == 140
    assert not play(dataclasses.replace(twice, device_budget_bytes=79), ((0,),)).fits


def test_what_follows_a_group_is_copied_unless_all_of_it_leaves_in_one_block():
    rows = [Unit(state_bytes=8, retained_bytes=4, group=g) for g in (0, 0, 0, 1, 1)]
    small = dataclasses.replace(rows[0], group=2, is_copied=True)
    alone = dataclasses.replace(rows[0], group=None)
    units = (*rows, small, alone)
    assert copied_bytes(units, ((0, 1, 2), (3, 4, 5, 6))) == [0, 4]
    assert copied_bytes(units, ((0, 1), (2, 3, 4, 5, 6))) == [8, 8]
    assert copied_bytes(units, ((3,), (0, 1, 2))) == [4, 0]  # the other row is late


@pytest.mark.parametrize("steps", [3, 5, 8])
@pytest.mark.parametrize("shrinking", [True, False])
def test_rows_of_a_group_leave_together(steps, shrinking):
    """Each boundary cuts one group at most, so little is copied of what follows."""
    units = [
        Unit(state_bytes=rows * 10 + n % 2, retained_bytes=rows * 5, group=n)
        for n, rows in enumerate((3, 9, 3, 6, 9, 6, 3, 3, 9))
        for _ in range(rows)
    ]
    blocks = into_blocks(units, steps, shrinking=shrinking)
    order = [u for block in blocks for u in sorted(block, key=lambda u: units[u].group)]
    assert sorted(order) == list(range(len(units)))
    cut = [
        g for g in range(9) if len({b for b in blocks if any(units[u].group == g for u in b)}) > 1
    ]
    assert len(cut) <= steps - 2
    in_cut_groups = sum(u.retained_bytes for u in units if u.group in cut)
    assert sum(copied_bytes(units, blocks)) == in_cut_groups < sum(u.retained_bytes for u in units)


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_gains_most_leaves_first(is_whole):
    units = tuple(
        Unit(state_bytes=8, retained_bytes=r, group=None if is_whole else r)
        for r in (4, 0, 4, 2, 0, 2)
    )
    assert into_blocks(units, 4, shrinking=False) == ((1, 4), (3, 5), (0, 2))


def test_one_large_unit_leaves_the_other_blocks_even():
    sizes = (100, 10, 10, 10, 10, 10, 10)
    units = tuple(Unit(state_bytes=n, retained_bytes=0) for n in sizes)
    assert into_blocks(units, 5, shrinking=False) == ((0,), (1, 2), (3, 4), (5, 6))
    assert into_blocks(units[:3], 5, shrinking=False) == ((0,), (1,), (2,), ())
