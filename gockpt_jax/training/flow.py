"""Minimum cuts, on SciPy's maximum flow."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

Node = TypeVar("Node", bound=Hashable)

# SciPy's flow takes int32 capacities. Widths are scaled so that the widest link becomes the first
# number, or less where there are so many links that their sum would come near the second.
_WIDEST = 1 << 16
_UNLIMITED = 1 << 30


def minimum_cut(
    links: Mapping[tuple[Node, Node], float | None], start: Node, end: Node
) -> set[Node]:
    """Parts the start from the end where the links between them are narrowest.

    Args:
      links: Width of each link (from, to), in any unit; `None` for one that cannot be cut. Widths
        are compared to 16 bits; the narrowest still count as something.
      start: Where everything flows from.
      end: Where it flows to; some link on each way there can be cut.

    Returns:
      The start's side: the links that leave it are the cut. Among equally narrow cuts the one
      nearest the start, so the smallest such side.

    Example:
      >>> links = {("s", "g"): None, ("g", "c"): 9, ("c", "m"): 9, ("c", "v"): 9,
      ...          ("m", "t"): None, ("v", "t"): None}
      >>> sorted(minimum_cut(links, "s", "t"))
      ['g', 's']
    """
    nodes = dict.fromkeys((start, end, *(node for link in links for node in link)))
    number = {node: i for i, node in enumerate(nodes)}
    widths = [width for width in links.values() if width is not None]
    scale = min(_WIDEST, _UNLIMITED // (len(widths) + 1)) / max(widths, default=1.0)
    capacity = csr_matrix(
        (
            np.array([_scaled(width, scale) for width in links.values()], np.int32),
            ([number[tail] for tail, _ in links], [number[head] for _, head in links]),
        ),
        shape=(len(number), len(number)),
    )
    flow = maximum_flow(capacity, number[start], number[end])
    assert flow.flow_value < _UNLIMITED, "a way from the start to the end has no link to cut"
    residual = capacity - flow.flow
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, number[start], return_predecessors=False)
    side = set(reached.tolist())
    return {node for node, i in number.items() if i in side}


def _scaled(width: float | None, scale: float) -> int:
    return _UNLIMITED if width is None else max(1, int(width * scale))
