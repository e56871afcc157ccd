"""Turns: all is looked at in time, by few programs, that are the same at each save."""

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
    "other kinds on other devices": [(0, "a"), (0, "b"), (3, "b"), (3, "c"), (3, "c")],
    "thousands": [(0, n % 3) for n in range(3000)],
}
with_pieces = pytest.mark.parametrize("kinds", CASES.values(), ids=CASES)
with_fraction = pytest.mark.parametrize("fraction", [1 / 64, 1 / 3, 1.0])


def programs_of(kinds, turns):
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
    looked_at, part_of = collections.Counter(), {}
    # About: a piece comes again when all that are alike have come, and its last box is small.
    for sample in range(math.ceil(1.2 / fraction) + 2 * turns.programs):
        for turn in turns.of(sample):
            assert turn.time == looked_at[turn.piece, "times"], "each box is another one"
            looked_at[turn.piece, "times"] += 1
            looked_at[turn.piece] += turn.part
            part_of[turn.piece] = turn.part
    for piece in range(len(kinds)):
        whole_boxes = math.floor(1 / part_of[piece] + 1e-9)
        assert looked_at[piece, "times"] >= whole_boxes


@with_fraction
@with_pieces
def test_a_sample_is_the_fraction_on_average(kinds, fraction):
    turns = Turns(kinds, fraction)
    found = [sum(turn.part for turn in turns.of(n)) for n in range(turns.programs)]
    assert sum(found) / len(found) <= fraction * len(kinds) * 1.1
    assert sum(found) / len(found) >= fraction * len(kinds) * 0.9 or max(found) > 1


@with_fraction
@with_pieces
def test_samples_run_the_same_programs(kinds, fraction):
    turns = Turns(kinds, fraction)
    first = [programs_of(kinds, turns.of(n)) for n in range(turns.programs)]
    for sample in range(turns.programs, 40):
        for device, program in programs_of(kinds, turns.of(sample)).items():
            assert program in [of.get(device) for of in first]
    assert turns.programs <= max(1, math.ceil(len(set(kinds)) / 2))


@with_pieces
def test_boxes_are_few_and_different_pieces(kinds):
    turns = Turns(kinds, 1 / 64)
    devices = len({device for device, _ in kinds})
    for sample in range(10):
        pieces = [turn.piece for turn in turns.of(sample)]
        assert len(set(pieces)) == len(pieces)
        assert len(pieces) <= max(FEW_BOXES, devices, math.ceil(len(kinds) / 64) + 3)
        assert len(pieces) >= min(len(kinds), devices)


def test_what_is_asked_for_whole_is_looked_at_whole():
    turns = Turns(CASES["a model"], 1.0)
    assert [turn.part for turn in turns.of(5)] == [1.0] * 96
    assert turns.programs == 1


def test_devices_look_at_different_leaves():
    kinds = [(device, "w") for _ in range(20) for device in range(8)]
    leaves = [turn.piece // 8 for turn in Turns(kinds, 1 / 64).of(0)]
    assert len(set(leaves)) == len(leaves) == FEW_BOXES


def test_the_order_of_what_comes_does_not_matter():
    """What is compiled ahead may see the leaves in another order than the save."""
    kinds = CASES["a model"] + CASES["many kinds"]
    backwards = kinds[::-1]
    for sample in range(4):
        programs = [programs_of(k, Turns(k, 1 / 64).of(sample)) for k in (kinds, backwards)]
        assert programs[0] == programs[1]


def test_of_nothing_there_are_no_turns():
    turns = Turns([], 1 / 64)
    assert (turns.of(0), turns.programs) == ([], 0)
