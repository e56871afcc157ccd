"""Minimum cuts against all ways to part a small graph."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded import SEEDED

from gockpt_jax.training.flow import minimum_cut

START, END = "start", "end"


@st.composite
def networks(draw):
    """A small graph, cycles and all. Widths divide a power of two, so scaling rounds nothing."""
    inner = list(range(draw(st.integers(1, 5))))
    pairs = [(a, b) for a in (START, *inner) for b in (*inner, END) if a != b]
    width = st.sampled_from([1, 2, 4, 8, 16, None])
    links = draw(st.dictionaries(st.sampled_from(pairs), width, min_size=1, max_size=12))
    return inner, links


def all_sides(inner, links):
    """Every set of nodes around the start that no uncuttable link leaves, with its width."""
    for size in range(len(inner) + 1):
        for chosen in itertools.combinations(inner, size):
            side = {START, *chosen}
            leaving = [w for (a, b), w in links.items() if a in side and b not in side]
            if None not in leaving:
                yield side, sum(leaving)


@settings(SEEDED, max_examples=300)
@given(networks())
def test_narrowest_and_nearest_to_the_start(network):
    inner, links = network
    sides = list(all_sides(inner, links))
    if not sides:
        with pytest.raises(AssertionError, match="no link to cut"):
            minimum_cut(links, START, END)
        return
    found = minimum_cut(links, START, END)
    narrowest = min(width for _, width in sides)
    assert (found, narrowest) in sides
    assert all(found <= side for side, width in sides if width == narrowest)


def test_nothing_to_part():
    assert minimum_cut({("g", END): 1}, START, END) == {START}
    assert minimum_cut({(START, "g"): 1}, START, END) == {START, "g"}


def test_sizes_of_real_leaves():
    """Gigabytes beside a scalar of no width, and hundreds of sources at once."""
    big = 8.0 * 2**30
    links = {(START, "g"): None, (START, "flag"): None, (START, "h"): None}
    links |= {("g", "c"): big, ("flag", "c"): 0.0, ("h", "c"): big, ("c", END): big}
    assert minimum_cut(links, START, END) == {START, "g", "flag", "h", "c"}
    many = {(START, n): big for n in range(40_000)} | {(n, END): None for n in range(40_000)}
    assert minimum_cut(many, START, END) == {START}
