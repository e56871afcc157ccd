"""What stays of a cut: which two are the same to a window, and what is told of one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gockpt_jax.training.recipe import Recipe
from gockpt_jax.training.step_cut import ArraySpec, ReplayGroup, StepCut

LEAF, SCALAR = ArraySpec((500, 500), np.dtype("float32")), ArraySpec((), np.dtype("bool"))
COUNT = ArraySpec((), np.dtype("int32"))
GROUP = ReplayGroup((0, 2), (0,), (1,), Recipe(2, 1, 1, (), (0, 1)))
CUT = StepCut(
    ("m", "n", "v", "w"), (LEAF, COUNT, LEAF, LEAF), (GROUP,), (LEAF, SCALAR),
    (), {3: "a root", 1: "small"}, True,
)  # fmt: skip


@pytest.mark.parametrize(
    "other", [{"late": {3: "a sine", 1: "small"}}, {"is_exact": False}, {"sites": (None, None)}]
)
def test_a_window_may_follow_a_step_that_has_the_same_values_elsewhere(other):
    assert dataclasses.replace(CUT, **other) == CUT


@pytest.mark.parametrize(
    "other",
    [
        {"groups": (dataclasses.replace(GROUP, scalars=()),)},
        {"groups": (dataclasses.replace(GROUP, recipe=Recipe(2, 1, 1, (), (0, 0))),)},
        {"arrays": (ArraySpec((500, 500), "bfloat16"), SCALAR)},  # widened by the same recipe
        {"leaf_specs": (LEAF, COUNT, LEAF, ArraySpec((250, 1000), np.dtype("float32")))},
        {"paths": ("m", "n", "v", "p")},
    ],
)
def test_and_none_whose_leaves_or_values_are_others(other):
    assert dataclasses.replace(CUT, **other) != CUT


def test_each_leaf_is_told_once_with_its_reason():
    assert CUT.explain().splitlines() == [
        "in a window 2 leaves leave early, in 1 group: 2.00 of 3.00 MB, retaining 1.00 MB in each "
        "step; 2 leaves are late.",
        "early, retaining float32[500,500], bool[]:",
        "  m float32[500,500]",
        "  v float32[500,500]",
        "late (small):",
        "  n int32[]",
        "late (a root):",
        "  w float32[500,500]",
    ]


def test_one_of_something_is_told_as_one():
    cut = dataclasses.replace(CUT, paths=CUT.paths[:2], leaf_specs=CUT.leaf_specs[:2])
    cut = dataclasses.replace(cut, groups=(dataclasses.replace(GROUP, leaves=(0,)),))
    text = dataclasses.replace(cut, late={1: "small"}).explain()
    assert text.startswith("in a window 1 leaf leaves early, in 1 group: 1.00 of 1.00 MB, ")
    assert "; 1 leaf is late.\n" in text
