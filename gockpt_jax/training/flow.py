"""Minimum vertex cuts, on SciPy's maximum flow."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

Node = TypeVar("Node")

# SciPy's flow takes int32 capacities. Costs are scaled so that the dearest fits this many times.
_CAPACITY_OF_DEAREST = 1 << 16
_UNLIMITED = 1 << 30


def minimum_vertex_cut(
    sources: Sequence[Node],
    sinks: Sequence[Node],
    edges: Sequence[tuple[Node, Node]],
    costs: Mapping[Node, int | None],
) -> list[Node] | None:
    """The cheapest set of nodes whose removal parts the sources from the sinks.

    Among equally cheap sets, the one nearest the sources.

    Args:
      sources: Nodes from which everything flows; each is also a candidate for the cut.
      sinks: The nodes that must be parted from them.
      edges: Pairs (from, to). Edges at nodes that `costs` does not name are left out.
      costs: Cost of removing each node, in any unit; `None` for one that cannot be removed.

    Returns:
      The set, in the order of `costs`; `None` if none exists; empty if there are no sources.

    Example:
      >>> edges = [("g", "c"), ("norm", "c"), ("g", "h"), ("c", "m"), ("h", "m")]
      >>> costs = {"g": 9, "norm": 1, "c": 9, "h": 9, "m": None}
      >>> minimum_vertex_cut(["g", "norm"], ["m"], edges, costs)
      ['g', 'norm']
      >>> minimum_vertex_cut(["a", "b"], ["m"], [("a", "s"), ("b", "s"), ("s", "m")],
      ...                    {"a": 4, "b": 4, "s": 4, "m": None})
      ['s']
    """
    if not sources:
        return []
    nodes = list(costs)
    enter = {node: 2 * i for i, node in enumerate(nodes)}  # a node is the edge enter -> enter + 1
    start, end = 2 * len(nodes), 2 * len(nodes) + 1
    dearest = max((c for c in costs.values() if c is not None), default=1) or 1
    links = [
        (enter[n], enter[n] + 1, _UNLIMITED if c is None else _scaled(c, dearest))
        for n, c in costs.items()
    ]
    links += [
        (enter[tail] + 1, enter[head], _UNLIMITED)
        for tail, head in set(edges)
        if tail in enter and head in enter
    ]
    links += [(start, enter[source], _UNLIMITED) for source in sources]
    links += [(enter[sink] + 1, end, _UNLIMITED) for sink in sinks]
    reached = _reached_behind_maximum_flow(links, start, end)
    if reached is None:
        return None
    return [n for n in nodes if enter[n] in reached and enter[n] + 1 not in reached]


def _scaled(cost: int, dearest: int) -> int:
    return max(1, cost * _CAPACITY_OF_DEAREST // dearest)


def _reached_behind_maximum_flow(
    links: Sequence[tuple[int, int, int]], start: int, end: int
) -> set[int] | None:
    """What can still be reached from the start once the flow is at its most; `None`: no limit."""
    tails, heads, capacities = zip(*links, strict=True)
    capacity = csr_matrix(
        (np.array(capacities, np.int32), (tails, heads)), shape=(end + 1, end + 1)
    )
    flow = maximum_flow(capacity, start, end)
    if flow.flow_value >= _UNLIMITED:
        return None
    residual = capacity - flow.flow
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    return set(breadth_first_order(residual, start, return_predecessors=False).tolist())
