"""Where to cut a train step, so that the host can repeat what follows.

A worked example. One matrix `w` under clipped Adam; what XLA runs after the backward pass is

    g  = transpose(dot(...))            # the gradient; `dot`, `transpose` are opaque
    c  = select(norm < 1, g, g / norm)  # clipping
    m' = 0.9 * m + 0.1 * c              # first moment
    v' = 0.999 * v + 0.001 * c * c      # second moment
    w' = w - lr * (m' / (sqrt(v') + eps))

Walk back from `m'` through exact elementwise operations (`walk.py`, `exact.py`). The walk ends at
`m` itself, which the host will hold; at literals; and at what the host cannot repeat: `g` (opaque)
and `g / norm` (a division). These last are the *sources*. Whatever set of values separates the
sources from `m'` is enough to compute `m'` again: {g, g / norm, norm < 1} is one, {c} is another.

Now let water run from the sources to the new values, through every use of every value. To keep a
new value dry, close pipes. Closing a value means retaining it: that costs its bytes, in every step
of the window. A new value may also be given up, for the price of its leaf's bytes over `MIN_GAIN`:
that leaf is then *late*, staged at the sealed version itself, and because the host does not have
its old value before, water runs there too. What is cheapest altogether is a *minimum cut*, and
equals the most water that can run (`flow.py`). With matrices of 4 bytes in all:

    retain c, give up w     4 + 4 / 1.2 = 7.3    <- the least: m and v leave early, c follows them
    retain c and m' / (..)  4 + 4       = 8      one more array for one more leaf gains nothing
    retain g and g / norm   4 + 4 + 4 / 1.2      c says the same with one array
    give up m, v and w      3 * 4 / 1.2 = 10     nothing leaves early

A scalar (`norm < 1`) costs next to nothing. Among equally cheap cuts the one nearest the sources is
taken, and never a product: XLA may fold or contract a product with what it feeds, and would then go
on with another number than the one returned (`merging.py`). So the cut lies at the gradient, or at
the first value after it that the host can go on from.

A leaf that becomes what is retained for others (the last gradient, as Adan keeps it) leaves early
for nothing.

`m` and `v` share `c`: they form one *group* and leave together. This is the paper's scheme (arXiv
2511.07035, section 3) without its knowledge of Adam: "moments first, parameters last" comes out of
the program.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from gockpt_jax.training.exact import is_close, is_exact, why_inexact
from gockpt_jax.training.flow import minimum_cut
from gockpt_jax.training.merging import is_by_flags
from gockpt_jax.training.primitives import MOVES
from gockpt_jax.training.values import Op, Value
from gockpt_jax.training.walk import Leaf, Walk, is_elementwise, walk_back, why_unfit

MIN_GAIN = 1.2
"""Bytes of a leaf over bytes retained for it, below which a window moves more than it spreads."""
_ANY_GAIN = 0.99
"""A gain of 1, where the scalars count for something too."""
_IN_BRANCH = 1 + 2**-10
"""Times its bytes a value costs in a branch, which then returns more: less than anything gains."""
_Repeats = Callable[[Op], bool]
"""Whether the host repeats an operation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Leaves that leave together, because they read each other or share what is retained.

    No recipe reads a leaf of another group: groups may leave in any order.

    Attributes:
      leaves: Positions among the state's leaves, ascending.
      retained: Large cut values, of the leaves' shape; as a rule one, the gradient.
      scalars: Small cut values, of shape ().
    """

    leaves: tuple[int, ...]
    retained: tuple[Value, ...]
    scalars: tuple[Value, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """What may leave early, and why the rest may not.

    Attributes:
      groups: In the order of their first leaf.
      late: For every other leaf, the reason in words.
    """

    groups: tuple[Group, ...]
    late: Mapping[int, str]

    @property
    def values(self) -> tuple[Value, ...]:
        """Every cut value once: what the armed step returns, large ones first."""
        retained = [v for g in self.groups for v in g.retained]
        scalars = [v for g in self.groups for v in g.scalars]
        return tuple(dict.fromkeys((*retained, *scalars)))


def find_cut(
    leaves: Sequence[Leaf], *, min_gain: float = MIN_GAIN, even_for_nothing: bool,
    exact: bool = True,
) -> Cut:  # fmt: skip
    """Finds the leaves that can be repeated from little.

    Args:
      leaves: The state, in flattening order.
      min_gain: A leaf leaves early only if its bytes are at least this many times what must be
        retained for it in every armed step, beside what is retained for others.
      even_for_nothing: If no leaf gains as much, take those that lose nothing (a gain of 1).
      exact: Whether what leaves early is repeated bit for bit, or only up to the rounding of
        divisions, roots and the like, which lets Adam's parameters leave early too.

    Returns:
      The groups, and a reason for each leaf outside them.
    """
    unfit = {j: reason for j, leaf in enumerate(leaves) if (reason := why_unfit(leaf))}
    known = {leaf.old: j for j, leaf in enumerate(leaves) if j not in unfit}
    repeats = is_exact if exact else is_close
    parts = _cut(leaves, known, repeats, min_gain)
    if even_for_nothing and not parts:
        parts = _cut(leaves, known, repeats, _ANY_GAIN)
    had = {leaves[j].old for j in parts}
    late = {
        j: unfit.get(j) or _why_late(leaf, had, repeats, min_gain)
        for j, leaf in enumerate(leaves)
        if j not in parts
    }
    groups = [_group(members, parts) for members in _connected(parts, known)]
    return Cut(tuple(groups), late)


def _cut(
    leaves: Sequence[Leaf], known: Mapping[Value, int], repeats: _Repeats, min_gain: float
) -> dict[int, Walk]:
    """Each leaf that leaves early, with the walk from it to the cut."""
    walks = {j: walk_back(leaves[j], known, repeats=repeats) for j in known.values()}
    cut: dict[int, Walk] = {}
    laid: dict[Value, set[Any]] = {}
    for members in _connected(walks, known):
        early, values = _cheapest([leaves[j] for j in members], [walks[j] for j in members],
                                  min_gain)  # fmt: skip
        specs = {leaves[j].spec for j in members}
        large = [v for v in values if v.shape]
        if len(specs) > 1 or any(laid.get(v, specs) != specs for v in large):
            continue  # one value cannot be laid out for all of them
        laid.update(dict.fromkeys(large, specs))
        had = {leaf.old for leaf in early}
        for leaf in early:
            walk = walk_back(leaf, had, stop=values, repeats=repeats)
            assert walk.sources.keys() <= values, "the cut parts a leaf from what it needs"
            cut[known[leaf.old]] = walk
    return dict(sorted(cut.items()))


def _cheapest(
    leaves: Sequence[Leaf], walks: Iterable[Walk], min_gain: float
) -> tuple[list[Leaf], set[Value]]:
    """Of leaves whose walks meet: those that leave early, and the values retained for them."""
    walk = Walk()
    for each in walks:
        walk.add(each)
    cuttable = walk.cuttable()
    links: dict[tuple[Hashable, Hashable], float | None] = {}
    for value in (*walk.reads, *walk.between):  # retaining it
        links[(value, "in"), (value, "out")] = (
            min_gain * _price(value) if value in cuttable else None
        )
    for value, user in walk.uses:
        links[(value, "out"), (user, "in")] = None
    for value in walk.sources:
        links["start", (value, "in")] = None
    used = {value for value, _ in walk.uses if value in walk.between}
    # What is retained for another leaf is had by its own, too.
    gates = [(leaf.new, "out" if leaf.new in used else "in") for leaf in leaves]
    for leaf, gate in zip(leaves, gates, strict=True):
        # Giving it up; then the host does not have its old value either.
        links[gate, "end"] = (links.get((gate, "end")) or 0.0) + leaf.old.nbytes
        links[gate, (leaf.old, "in")] = None
    wet = minimum_cut(links, "start", "end")
    early = [leaf for leaf, gate in zip(leaves, gates, strict=True) if gate not in wet]
    return early, {v for v in cuttable if (v, "in") in wet and (v, "out") not in wet}


def _price(value: Value) -> float:
    """Of retaining it; a scalar is next to nothing."""
    assert value.site is not None
    return (value.nbytes if value.shape else 0.0) * (_IN_BRANCH if value.site.is_in_branch else 1)


def _why_late(leaf: Leaf, had: Collection[Value], repeats: _Repeats, min_gain: float) -> str:
    """Why a leaf that might be replayed is not, given the old values that the host has."""
    walk = walk_back(leaf, {*had, leaf.old}, repeats=repeats)
    if leaf.new in walk.sources:
        return f"its new value comes out of {_describe(leaf.new)}"
    early, values = _cheapest([leaf], [walk], min_gain / 1024)
    if not early:
        return _why_not_cut(walk)
    gain = leaf.old.nbytes / max(1, sum(v.nbytes for v in values))
    saved = f"it is {gain:.2f} times what it retains, under {min_gain:.2f}"
    return f"leaving early saves too little: {saved}"


def _why_not_cut(walk: Walk) -> str:
    """Why nothing behind which a leaf is repeated can be retained, and what the user may change."""
    if any(v.op is not None and is_by_flags(v.op) for v in walk.sources):
        return (
            "it goes on from a product by flags, of which a compiler may make a choice; write"
            " `jnp.where(flags, x, 0)` in its place"
        )
    return (
        "what could be retained for it comes out of a product, loop or branch, a kernel or an"
        " array that changes in place, and the step may go on with another number"
    )


def _describe(value: Value) -> str:
    if value.op is None:
        return "an argument that the host will not have (a batch, a late leaf), or a constant"
    if value.op.name in ("scan", "while"):
        return f"a loop (`{value.op.name}`), within which nothing can be cut"
    if not is_elementwise(value.op, value) or value.op.name in MOVES:
        return f"`{value.op.name}`, which is not elementwise: the host repeats nothing else"
    return why_inexact(value.op)


def _connected(walks: Mapping[int, Walk], known: Mapping[Value, int]) -> Iterable[list[int]]:
    """Sets of leaves that read each other's old values or whose walks end at one large value."""
    parent = {j: j for j in walks}

    def find(j: int) -> int:
        while parent[j] != j:
            parent[j] = parent[parent[j]]
            j = parent[j]
        return j

    first_with: dict[Value, int] = {}
    for j, walk in walks.items():
        met = [first_with.setdefault(v, j) for v in walk.sources if v.shape != ()]
        for k in (*(known[v] for v in walk.reads), *met):
            parent[find(j)] = find(k)
    members: dict[int, list[int]] = defaultdict(list)
    for j in walks:
        members[find(j)].append(j)
    return members.values()


def _group(members: Sequence[int], walks: Mapping[int, Walk]) -> Group:
    values = dict.fromkeys(v for j in members for v in walks[j].sources)
    return Group(
        tuple(members),
        retained=tuple(v for v in values if v.shape != ()),
        scalars=tuple(v for v in values if v.shape == ()),
    )
