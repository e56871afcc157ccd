"""Where to cut a train step, so that the host can repeat what follows.

A worked example. One matrix `w` under clipped Adam; what XLA runs after the backward pass is

    g  = transpose(dot(...))            # the gradient; `dot`, `transpose` are opaque
    c  = select(norm < 1, g, g / norm)  # clipping
    m' = 0.9 * m + 0.1 * c              # first moment
    v' = 0.999 * v + 0.001 * c * c      # second moment
    w' = w - lr * m' / (sqrt(v') + eps)

Walk back from `m'` through exact elementwise operations (`exact.py`). The walk ends at `m` itself,
which the host will hold; at literals; and at what it cannot repeat: `g` (opaque) and `g / norm` (a
division). These last are the *sources*. Whatever set of values separates the sources from `m'` is
enough to compute `m'` again: {g, g / norm, norm < 1} is one, {c} is another and half as large. The
smallest by bytes is a minimum vertex cut, found as a maximum flow: a value becomes an edge as wide
as its bytes, a use becomes an edge of no limit, and the saturated edges are the cut. Among equally
small cuts the one nearest the sources is taken, and never a product: XLA may fold or contract a
product with what it feeds, and would then go on with another number than the one returned
(`exact.may_be_cut`).

`v'` gives {c} as well, so `m` and `v` form one *group*: both leave early, one array follows them.
Back from `w'` there is only the product `lr * ...` between it and a division: `w` has no cut and is
*late*. It is staged at the sealed version itself, and the walk from other leaves treats it as a
source, since the host will not have it. This is the paper's scheme (arXiv 2511.07035, section 3)
without its knowledge of Adam: "moments first, parameters last" comes out of the program.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from gockpt_jax.training.exact import SUMS, is_exact, is_identity, may_be_cut
from gockpt_jax.training.flow import minimum_vertex_cut
from gockpt_jax.training.graph import Op, Value

MIN_GAIN = 1.2
"""Bytes of a group over bytes retained for it, below which a window moves more than it spreads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the state: its value going into the step and coming out."""

    path: str
    old: Value
    new: Value


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Leaves that are replayed together, because they read each other or share what is retained.

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


@dataclasses.dataclass(frozen=True, slots=True)
class _LeafCut:
    values: tuple[Value, ...]
    reads: frozenset[int]  # leaves whose old value the recipe reads


def find_cut(leaves: Sequence[Leaf], *, min_gain: float = MIN_GAIN, even_for_nothing: bool) -> Cut:
    """Finds the leaves that can be repeated exactly from little.

    Args:
      leaves: The state, in flattening order.
      min_gain: A group leaves early only if its bytes are at least this many times what must be
        retained for it in every armed step.
      even_for_nothing: If no group gains as much, take those that lose nothing (a gain of 1).

    Returns:
      The groups, and a reason for each leaf outside them.
    """
    late = {j: reason for j, leaf in enumerate(leaves) if (reason := _unfit(leaf))}
    cuts = _cut_to_fixpoint(leaves, late)
    candidates = [_group(members, cuts, leaves) for members in _connected(cuts)]
    gains = [_gain(group, leaves) for group in candidates]
    if even_for_nothing and not any(gain >= min_gain for gain in gains):
        min_gain = 1.0
    for group, gain in zip(candidates, gains, strict=True):
        if gain < min_gain:
            saved = f"its group is {gain:.2f} times what it retains, under {min_gain:.2f}"
            late.update((j, f"leaving early saves too little: {saved}") for j in group.leaves)
    groups = [g for g, gain in zip(candidates, gains, strict=True) if gain >= min_gain]
    return Cut(tuple(groups), late)


def _unfit(leaf: Leaf) -> str | None:
    old, new = leaf.old, leaf.new
    if jnp.issubdtype(old.dtype, jax.dtypes.extended):
        return "a typed PRNG key has no arithmetic to repeat"
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return f"its shape or dtype changes, from {old.aval.str_short()} to {new.aval.str_short()}"
    if math.prod(old.shape) <= 1:
        return "it is as small as what would be retained for it"
    return None


def _cut_to_fixpoint(leaves: Sequence[Leaf], late: dict[int, str]) -> dict[int, _LeafCut]:
    """Cuts every leaf; one that fails becomes late, a source for those that read it."""
    host_has = {leaf.old: j for j, leaf in enumerate(leaves) if j not in late}
    cuts: dict[int, _LeafCut] = {}
    todo = set(host_has.values())
    while todo:
        failed = []
        for j in sorted(todo):
            found = _cut_leaf(leaves[j], host_has)
            if isinstance(found, _LeafCut):
                cuts[j] = found
            else:
                late[j] = found
                failed.append(j)
        for j in failed:
            cuts.pop(j, None)
            del host_has[leaves[j].old]
        todo = {k for k, cut in cuts.items() if not cut.reads.isdisjoint(failed)}
    return cuts


def _cut_leaf(leaf: Leaf, host_has: Mapping[Value, int]) -> _LeafCut | str:
    if leaf.new is leaf.old:
        return _LeafCut((), frozenset())  # frozen: nothing to replay, nothing to retain
    walk = _walk_back([leaf], host_has)
    if leaf.new in walk.sources:
        return f"its new value comes out of {_describe(leaf.new)}"
    cut = walk.minimum_cut([leaf.new])
    if cut is None:
        return "between what the host cannot repeat and it there is only a product, loop or branch"
    return _LeafCut(tuple(cut), frozenset(walk.reads))


@dataclasses.dataclass(frozen=True, slots=True)
class _Walk:
    """What lies between new values and what the host cannot repeat."""

    sources: dict[Value, None]
    uses: list[tuple[Value, Value]]
    reads: set[int]  # leaves whose old values it meets
    between: list[Value]  # everything else it meets

    def minimum_cut(self, outputs: Sequence[Value]) -> list[Value] | None:
        costs = {v: None if v in outputs else _cost(v) for v in self.between}
        for operand, user in self.uses:
            # `d + scatter(0, g)` becomes `scatter(d, g)`, unless the scattered value is returned.
            if operand.op and user.op and operand.op.name.startswith("scatter"):
                costs[operand] = None if user.op.name in SUMS else costs[operand]
        return minimum_vertex_cut(list(self.sources), outputs, self.uses, costs)


def _walk_back(leaves: Sequence[Leaf], host_has: Mapping[Value, int]) -> _Walk:
    walk = _Walk({}, [], set(), [])
    seen: set[Value] = set()
    stack = [(leaf.new, leaf.old.shape) for leaf in leaves]
    while stack:
        value, shape = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in host_has:
            walk.reads.add(host_has[value])
            continue
        walk.between.append(value)
        if value.op is None or not _repeatable(value.op, value, shape):
            walk.sources[value] = None
        elif is_identity(value.op) and value.site is not None and may_be_cut(value):
            walk.sources[value] = None  # a marked gradient, as a rule: no need to look behind
        else:
            for operand in value.op.inputs:
                if not (operand.is_constant and operand.shape == ()):
                    walk.uses.append((operand, value))
                    stack.append((operand, shape))
    return walk


def _repeatable(op: Op, value: Value, shape: tuple[int, ...]) -> bool:
    """Exact, elementwise over the leaf's shape (or on scalars), one result."""
    if op.num_outputs != 1 or value.shape not in (shape, ()):
        return False
    return all(v.shape in (value.shape, ()) for v in op.inputs) and is_exact(op)


def _cost(value: Value) -> int | None:
    """Bytes on the wire; `None`: cannot be cut here."""
    return value.nbytes if value.site is not None and may_be_cut(value) else None


def _describe(value: Value) -> str:
    if value.op is None:
        return "an input or constant of another kind"
    dtypes = sorted({str(v.dtype) for v in value.op.inputs})
    return f"`{value.op.name}` on {', '.join(dtypes)}, which the host does not repeat exactly"


def _connected(cuts: Mapping[int, _LeafCut]) -> Iterable[list[int]]:
    """Sets of leaves that read each other's old values or share a large cut value."""
    parent = {j: j for j in cuts}

    def find(j: int) -> int:
        while parent[j] != j:
            parent[j] = parent[parent[j]]
            j = parent[j]
        return j

    first_with: dict[Value, int] = {}
    for j, cut in cuts.items():
        shared = [first_with.setdefault(v, j) for v in cut.values if v.shape != ()]
        for k in (*cut.reads, *shared):
            parent[find(j)] = find(k)
    members: dict[int, list[int]] = defaultdict(list)
    for j in sorted(cuts):
        members[find(j)].append(j)
    return members.values()


def _group(members: Sequence[int], cuts: Mapping[int, _LeafCut], leaves: Sequence[Leaf]) -> Group:
    """Cuts a group once for all its leaves: their own cuts together may be more than it takes."""
    values = tuple(dict.fromkeys(v for j in members for v in cuts[j].values))
    if len(members) > 1:
        host_has = {leaves[j].old: j for j in members}
        changing = [leaves[j] for j in members if leaves[j].new is not leaves[j].old]
        together = _walk_back(changing, host_has).minimum_cut([x.new for x in changing])
        values = values if together is None else tuple(together)
    return Group(
        tuple(members),
        retained=tuple(v for v in values if v.shape != ()),
        scalars=tuple(v for v in values if v.shape == ()),
    )


def _gain(group: Group, leaves: Sequence[Leaf]) -> float:
    retained_bytes = sum(v.nbytes for v in group.retained)
    state_bytes = sum(leaves[j].old.nbytes for j in group.leaves)
    return state_bytes / retained_bytes if retained_bytes else math.inf
