"""Minimum vertex cuts against all subsets."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gockpt_jax.training.flow import minimum_vertex_cut

SINK = "sink"


@st.composite
def problems(draw):
    """A small acyclic graph. Costs divide a power of two, so that scaling them rounds nothing."""
    size = draw(st.integers(1, 6))
    nodes = list(range(size))
    pairs = [*itertools.combinations(nodes, 2), *((n, SINK) for n in nodes)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=len(pairs)))
    cost = st.sampled_from([1, 2, 4, 8, 16, None])
    costs = {n: draw(cost) for n in nodes}
    sources = draw(st.lists(st.sampled_from(nodes), unique=True, max_size=3))
    return sources, edges, {**costs, SINK: None}


def reached(sources, edges, removed):
    """All nodes that something flows to once `removed` is gone."""
    seen = set(sources) - removed
    while more := {head for tail, head in edges if tail in seen} - removed - seen:
        seen |= more
    return seen


def all_cuts(sources, edges, costs):
    removable = [n for n, cost in costs.items() if cost is not None]
    for size in range(len(removable) + 1):
        for removed in map(set, itertools.combinations(removable, size)):
            if SINK not in reached(sources, edges, removed):
                yield removed


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(problems())
def test_cheapest_and_nearest_to_the_sources(problem):
    sources, edges, costs = problem
    found = minimum_vertex_cut(sources, [SINK], edges, costs)
    cuts = list(all_cuts(sources, edges, costs))
    if not cuts:
        assert found is None
        return
    assert found == [n for n in costs if n in found]  # in the order of `costs`, each once
    cheapest = min(sum(costs[n] for n in cut) for cut in cuts)
    assert set(found) in cuts
    assert sum(costs[n] for n in found) == cheapest
    near = reached(sources, edges, set(found))
    for cut in cuts:
        if sum(costs[n] for n in cut) == cheapest:
            assert near <= reached(sources, edges, cut)


def test_nothing_to_part():
    assert minimum_vertex_cut([], [SINK], [(0, SINK)], {0: 1, SINK: None}) == []
    assert minimum_vertex_cut([0], [SINK], [], {0: 1, SINK: None}) == []


def test_edges_at_unnamed_nodes_are_left_out():
    """The walk ends at what the host has: such a node has no cost."""
    edges = [("state", SINK), ("g", SINK)]
    assert minimum_vertex_cut(["g"], [SINK], edges, {"g": 4, SINK: None}) == ["g"]


def test_sizes_of_real_leaves():
    """Gigabytes beside a scalar of four bytes, and hundreds of sources at once."""
    big = 8 * 2**30
    edges = [("g", "c"), ("flag", "c"), ("h", "c"), ("c", SINK)]
    costs = {"g": big, "flag": 1, "h": big, "c": big, SINK: None}
    assert minimum_vertex_cut(["g", "flag", "h"], [SINK], edges, costs) == ["c"]
    sources = list(range(400))
    costs = dict.fromkeys(sources, big) | {SINK: None}
    assert minimum_vertex_cut(sources, [SINK], [(s, SINK) for s in sources], costs) == sources
