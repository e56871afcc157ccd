"""Turns: all is looked at in time, by few programs, that are the same at nearly each save."""

from __future__ import annotations

import collections
import math

import pytest

from gockpt_jax.transfer.turns import FEW_BOXES, Turns


def on(kind, *devices):
    """A leaf with a piece on each of the devices."""
    return [(device, kind) for device in devices]


ALL = range(8)
CASES = {
    "a few": [on("a", 0)] * 3 + [on("b", 0)],
    "a model": [on(k, 0) for k, n in (("w", 48), ("v", 45), ("e", 2), ("s", 1)) for _ in "." * n],
    "many kinds": [on(n, 0) for n in range(40)],
    "many of many kinds": [on(n % 23, 0) for n in range(300)],
    "eight devices": [on(kind, *ALL) for kind in "wwwwwwwwwwve"],
    "a model on eight devices": [on(n % 7, *ALL) for n in range(98)],
    "many devices": [on("w", *range(40))] * 3,
    "some on one device": [on(n % 4, *ALL) for n in range(60)] + [on(n % 3, 0) for n in range(90)],
    "many on one device": [on("w", 0) for n in range(90)] + [on(n, *ALL) for n in range(9)],
    "cut in three ways": [on("a", *ALL)] * 30 + [on("b", 0, 1)] * 9 + [on("c", 0, 2, 4, 6)] * 9,
    "other kinds on other devices": [on("a", 0), on("b", 0, 3), on("c", 3), on("c", 3)],
    "each on one device": [on(n, n % 3) for n in range(33)],
    "thousands": [on(n % 3, 0) for n in range(3000)],
}
with_leaves = pytest.mark.parametrize("leaves", CASES.values(), ids=CASES)
with_fraction = pytest.mark.parametrize("fraction", [1 / 64, 1 / 3, 1.0])


def pieces_of(leaves):
    return [(n, piece) for n, leaf in enumerate(leaves) for piece in range(len(leaf))]


def on_devices(leaves, turns):
    """What each device's program is made from."""
    made = collections.defaultdict(list)
    for turn in turns:
        device, kind = leaves[turn.leaf][turn.piece]
        made[device].append((kind, turn.part))
    return {device: tuple(of) for device, of in made.items()}


@with_fraction
@with_leaves
def test_every_part_of_every_piece_has_its_turn_in_about_one_over_the_fraction(leaves, fraction):
    turns = Turns(leaves, fraction)
    times, part_of = collections.defaultdict(set), {}
    for sample in range(math.ceil(1.4 / fraction) + 3):
        for turn in turns.of(sample):
            times[turn.leaf, turn.piece].add(turn.time)
            part_of[turn.leaf, turn.piece] = turn.part
    assert sorted(times) == pieces_of(leaves)
    for piece, seen in times.items():
        assert sorted(seen) == [*range(len(seen))], "each box is the next one"
        assert len(seen) >= math.floor(1 / part_of[piece] + 1e-9), "a last box is a small one"


@with_fraction
@with_leaves
def test_a_sample_is_about_the_fraction(leaves, fraction):
    turns = Turns(leaves, fraction)
    pieces = len(pieces_of(leaves))
    found = sum(turn.part for n in range(64) for turn in turns.of(n)) / 64
    assert 0.9 * fraction * pieces <= found <= 1.5 * fraction * pieces


@pytest.mark.parametrize(
    ("case", "samples"),
    [
        ("a few", 1), ("a model", 6), ("many kinds", 3), ("many of many kinds", 19),
        ("eight devices", 1), ("a model on eight devices", 7), ("many devices", 1),
        ("some on one device", 13), ("many on one device", 11), ("cut in three ways", 4),
        ("other kinds on other devices", 1), ("each on one device", 3), ("thousands", 64),
    ],
)  # fmt: skip
def test_all_leaves_have_a_turn_before_any_has_another(case, samples):
    """What is wrong throughout a leaf is found by the first box of it, on whichever device."""
    leaves = CASES[case]
    turns = Turns(leaves, 1 / 64)
    seen = [{turn.leaf for turn in turns.of(sample)} for sample in range(300)]
    assert len(set().union(*seen[:samples])) == len(leaves)
    for first in range(0, 200, 7):
        assert len(set().union(*seen[first : first + 4 * samples])) == len(leaves)


@with_leaves
def test_boxes_are_few_and_of_different_pieces(leaves):
    turns = Turns(leaves, 1 / 64)
    most = max(map(len, leaves))
    looks = collections.Counter(device for leaf in leaves for device, _ in leaf)
    needed = sum(math.ceil(n / 64 * most) for n in looks.values())
    for sample in range(100):
        taken = [(turn.leaf, turn.piece) for turn in turns.of(sample)]
        assert len(set(taken)) == len(taken)
        assert len(taken) <= FEW_BOXES + needed
        assert len(taken) >= min(len(leaves), FEW_BOXES) / 2


@pytest.mark.parametrize(
    "leaves",
    [
        [on(n, 0) for n in range(16)],
        [on(n, *ALL) for n in range(2)],
        [on(n, 0) for n in range(8)] + [on("cut", *ALL)],
        [on("a", 0)] * 9 + [on("a", 1)],
        [on("a", 0, 1), on("b", 3)],
    ],
)
def test_sixteen_pieces_give_a_box_each_time_wherever_they_lie(leaves):
    turns = Turns(leaves, 1 / 64)
    for sample in range(3):
        taken = [(turn.leaf, turn.piece) for turn in turns.of(sample)]
        assert sorted(taken) == pieces_of(leaves)
        assert {turn.time for turn in turns.of(sample)} == {sample}


@with_fraction
@with_leaves
def test_all_programs_are_foreseen_and_few(leaves, fraction):
    turns = Turns(leaves, fraction)
    foreseen = collections.defaultdict(set)
    for cast in turns.casts():
        ((device, program),) = on_devices(leaves, cast).items()
        foreseen[device].add(program)
    for sample in range(math.ceil(3 / fraction) + 3):  # each box of each piece twice
        for device, program in on_devices(leaves, turns.of(sample)).items():
            assert program in foreseen[device]
    for device, programs in foreseen.items():
        kinds = {kind for leaf in leaves for d, kind in leaf if d == device}
        rounds = max(len(leaf) for leaf in leaves if device in dict(leaf))
        # In a round a box comes to another kind once for each; the last section ends in the first.
        assert len(programs) <= rounds * (len(kinds) + 1)


@pytest.mark.parametrize("order", [-1, 3])
@with_leaves
def test_the_order_of_what_comes_does_not_matter(leaves, order):
    """What is compiled ahead may see the leaves in another order than the save."""
    other = leaves[::-1] if order < 0 else sorted(leaves, key=lambda leaf: hash(str(leaf)) % order)
    for sample in range(9):
        programs = [on_devices(x, Turns(x, 1 / 64).of(sample)) for x in (leaves, other)]
        assert programs[0] == programs[1]


def test_what_is_asked_for_whole_is_looked_at_whole():
    turns = Turns(CASES["some on one device"], 1.0)
    assert [turn.part for turn in turns.of(5)] == [1.0] * (60 * 8 + 90)


def test_of_nothing_there_are_no_turns():
    turns = Turns([], 1 / 64)
    assert (turns.of(0), [*turns.casts()]) == ([], [])
