"""What stays of a cut: which two are the same to a window, and what is told of one."""

from __future__ import annotations

import dataclasses

import pytest

from gockpt_jax.training.recipe import Recipe
from gockpt_jax.training.step_cut import ArraySpec, ReplayGroup, StepCut

LEAF, SCALAR = ArraySpec((4, 2), "float32"), ArraySpec((), "bool")
GROUP = ReplayGroup((0, 2), (0,), (1,), Recipe(2, 1, 1, (), (0, 1)))
CUT = StepCut(
    ("m", "n", "v", "w"), (LEAF, ArraySpec((), "int32"), LEAF, LEAF), (GROUP,), (LEAF, SCALAR),
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
        {"arrays": (ArraySpec((4, 2), "bfloat16"), SCALAR)},  # widened by the same recipe
        {"leaf_specs": (LEAF, ArraySpec((), "int32"), LEAF, ArraySpec((2, 4), "float32"))},
        {"paths": ("m", "n", "v", "p")},
    ],
)
def test_and_none_whose_leaves_or_values_are_others(other):
    assert dataclasses.replace(CUT, **other) != CUT


def test_each_leaf_is_told_once_with_its_reason():
    assert CUT.explain().splitlines() == [
        "in a window 2 leaves leave early, in 1 groups; 2 leaves are late.",
        "early, retaining float32[4,2], bool[]:",
        "  m float32[4,2]",
        "  v float32[4,2]",
        "late (small):",
        "  n int32[]",
        "late (a root):",
        "  w float32[4,2]",
    ]
