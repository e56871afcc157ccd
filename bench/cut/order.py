"""What it would change if the leaves of one group could leave at different steps.

A group leaves as a whole. Its leaves need not: a leaf that no other leaf of the group reads may
leave after them. Compared here for K = 5: groups as wholes, and leaves one by one, each order
filled largest first into the emptiest block.
"""

from collections.abc import Sequence

from gockpt_jax.training.cut import Cut
from gockpt_jax.training.walk import Leaf

STEPS = 5


def measure_order(cut: Cut, leaves: Sequence[Leaf]) -> dict[str, float]:
    """Largest block over an even share, and gradients moved over what is retained per step."""
    groups = [list(g.leaves) for g in cut.groups]
    retained = sum(v.nbytes for v in cut.values)
    if not retained:
        return {}
    figures: dict[str, float] = {"groups": len(groups)}
    for name, units in (("wholes", groups), ("leaves", [[j] for g in groups for j in g])):
        block_of, blocks = _fill(units, leaves)
        moved = sum(
            (STEPS - 1 - min(block_of[j] for j in g.leaves)) * sum(v.nbytes for v in g.retained)
            for g in cut.groups
        )
        figures[f"{name}/largest block"] = round(max(blocks) * (STEPS - 1) / sum(blocks), 3)
        figures[f"{name}/gradients"] = round(moved / retained, 3)
    return figures


def _fill(units: list[list[int]], leaves: Sequence[Leaf]) -> tuple[dict[int, int], list[int]]:
    weight = {tuple(u): sum(leaves[j].old.nbytes for j in u) for u in units}
    blocks: list[list[int]] = [[] for _ in range(STEPS - 1)]
    filled = [0] * (STEPS - 1)
    for unit in sorted(weight, key=lambda u: (-weight[u], u)):
        emptiest = filled.index(min(filled))
        blocks[emptiest].extend(unit)
        filled[emptiest] += weight[unit]
    order = sorted(range(STEPS - 1), key=lambda b: -filled[b])
    return {j: i for i, b in enumerate(order) for j in blocks[b]}, filled
