"""Turns: all is looked at in time, by few programs, that are the same at nearly each save."""

from __future__ import annotations

import collections
import math

import pytest

from gockpt_jax.transfer.turns import FEW_BOXES, Turns

CASES = {
    "a few": [(0, "a")] * 3 + [(0, "b")],
    "a model": [
        (0, kind) for kind, n in (("w", 48), ("v", 45), ("e", 2), ("s", 1)) for _ in "." * n
    ],
    "many kinds": [(0, n) for n in range(40)],
    "many of many kinds": [(0, n % 23) for n in range(300)],
    "eight devices": [(device, kind) for kind in "wwwwwwwwwwve" for device in range(8)],
    "many devices": [(device, "w") for device in range(40) for _ in range(3)],
    "one device has more": [(0, n) for n in range(90)]
    + [(d, n) for n in range(9) for d in range(8)],
    "other kinds on other devices": [(0, "a"), (0, "b"), (3, "b"), (3, "c"), (3, "c")],
    "thousands": [(0, n % 3) for n in range(3000)],
}
with_pieces = pytest.mark.parametrize("kinds", CASES.values(), ids=CASES)
with_fraction = pytest.mark.parametrize("fraction", [1 / 64, 1 / 3, 1.0])


def on_devices(kinds, turns):
    """What each device's program is made from."""
    made = collections.defaultdict(list)
    for turn in turns:
        device, kind = kinds[turn.piece]
        made[device].append((kind, turn.part))
    return {device: tuple(of) for device, of in made.items()}


@with_fraction
@with_pieces
def test_every_part_of_every_piece_has_its_turn_in_about_one_over_the_fraction(kinds, fraction):
    turns = Turns(kinds, fraction)
    times, part_of = collections.defaultdict(set), {}
    for sample in range(math.ceil(1.2 / fraction) + 1):
        for turn in turns.of(sample):
            times[turn.piece].add(turn.time)
            part_of[turn.piece] = turn.part
    for piece in range(len(kinds)):
        seen = sorted(times[piece])
        assert seen == [*range(seen[0], seen[0] + len(seen))], "each box is the next one"
        assert len(seen) >= math.floor(1 / part_of[piece] + 1e-9), "a last box is a small one"


@with_fraction
@with_pieces
def test_a_sample_is_the_fraction_on_average(kinds, fraction):
    turns = Turns(kinds, fraction)
    found = [sum(turn.part for turn in turns.of(n)) for n in range(64)]
    assert 0.9 * fraction * len(kinds) <= sum(found) / 64 <= 1.4 * fraction * len(kinds)


@with_pieces
def test_all_leaves_have_their_turn_before_any_has_another(kinds):
    """What is wrong throughout a leaf is found by the first box of it."""
    turns = Turns(kinds, 1 / 64)
    by_device = collections.Counter(device for device, _ in kinds)
    boxes = collections.Counter(kinds[turn.piece][0] for turn in turns.of(0))
    seen = set()
    for sample in range(max(math.ceil(n / boxes[d]) for d, n in by_device.items())):
        seen |= {turn.piece for turn in turns.of(sample)}
    assert len(seen) == len(kinds)


@with_pieces
def test_boxes_are_few_and_of_different_pieces(kinds):
    turns = Turns(kinds, 1 / 64)
    devices = len({device for device, _ in kinds})
    for sample in range(100):
        pieces = [turn.piece for turn in turns.of(sample)]
        assert len(set(pieces)) == len(pieces)
        most = max(FEW_BOXES, devices, math.ceil(len(kinds) / 64))
        assert min(len(kinds), FEW_BOXES) <= len(pieces) <= most


@pytest.mark.parametrize(
    "kinds",
    [
        [(0, n) for n in range(16)],
        [(device, n) for n in range(2) for device in range(8)],
        [(0, n) for n in range(8)] + [(device, "cut") for device in range(8)],
        [(0, "a")] * 9 + [(1, "a")],
    ],
)
def test_sixteen_pieces_give_a_box_each_time_wherever_they_lie(kinds):
    for sample in range(3):
        pieces = [turn.piece for turn in Turns(kinds, 1 / 64).of(sample)]
        assert sorted(pieces) == [*range(len(kinds))]


@pytest.mark.parametrize(("leaves", "samples"), [(6, 1), (16, 1), (20, 2), (98, 7)])
def test_leaves_that_are_cut_over_devices_all_have_a_turn_as_soon_as_on_one(leaves, samples):
    kinds = [(device, leaf % 7) for leaf in range(leaves) for device in range(8)]
    turns = Turns(kinds, 1 / 64)
    for first in range(20):
        seen = {turn.piece // 8 for n in range(first, first + samples) for turn in turns.of(n)}
        # Leaves that are the neighbours of many alike may wait for one more.
        more = {turn.piece // 8 for turn in turns.of(first + samples)}
        assert len(seen | more) == leaves


@with_fraction
@with_pieces
def test_all_programs_are_foreseen_and_few(kinds, fraction):
    turns = Turns(kinds, fraction)
    foreseen = collections.defaultdict(set)
    for cast in turns.casts():
        ((device, program),) = on_devices(kinds, cast).items()
        foreseen[device].add(program)
    for sample in range(3 * len(kinds) if len(kinds) < 500 else 400):
        for device, program in on_devices(kinds, turns.of(sample)).items():
            assert program in foreseen[device]
    for device, programs in foreseen.items():
        count = len({kind for d, kind in kinds if d == device})
        # A box comes to another kind once for each; and the last section ends in the first one.
        assert len(programs) <= count + 1


@pytest.mark.parametrize("order", [-1, 3])
def test_the_order_of_what_comes_does_not_matter(order):
    """What is compiled ahead may see the leaves in another order than the save."""
    kinds = CASES["a model"] + CASES["many kinds"] + CASES["eight devices"]
    other = kinds[::-1] if order < 0 else sorted(kinds, key=lambda kind: hash(str(kind)) % 7)
    for sample in range(9):
        programs = [on_devices(k, Turns(k, 1 / 64).of(sample)) for k in (kinds, other)]
        assert programs[0] == programs[1]


def test_what_is_asked_for_whole_is_looked_at_whole():
    turns = Turns(CASES["a model"], 1.0)
    assert [turn.part for turn in turns.of(5)] == [1.0] * 96


def test_of_nothing_there_are_no_turns():
    turns = Turns([], 1 / 64)
    assert (turns.of(0), [*turns.casts()]) == ([], [])
