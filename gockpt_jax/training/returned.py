"""The new state among what a step returned, taken out of it at once.

A loop may change the containers that it is given: it adds the time of the step to the metrics, or
takes the state out. A result that is looked at later is then not what the step has returned.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from gockpt_jax.training.step_cut import ArraySpec

_Place = list[tuple[int, "_Place"]] | None
"""Which children of a node to look into, and where in them; `None`: the node itself is a part."""


class NewState(NamedTuple):
    """The new state in a result, its leaves not looked at yet.

    Attributes:
      parts: The trees that are it together.
      found_by: Who knows how they do.
      nodes: The result, flattened down to them. Of what lies beside them weak references: it may be
        large, and the loop has no more use for it.
    """

    parts: list[Any]
    found_by: "StateInResult"
    nodes: list[Any]

    def in_places(self) -> list[Any]:
        """All leaves in their order; `None` for what lay beside the state and is gone."""
        found: list[Any] = []
        for node in self.nodes:
            found += [node()] if isinstance(node, weakref.ref) else jax.tree.leaves(node)
        return found


class StateInResult:
    """Takes a program's new state out of results, without a look at the leaves in it.

    Args:
      out_tree: The structure of the program's result.
      outputs: Which of its leaves are the state's, in the order of the state's.
      specs: What these are.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> m, w = jnp.zeros(2), jnp.ones(3)
      >>> result = {"logs": {"loss": 1.0}, "state": {"w": w, "m": m}}
      >>> specs = [ArraySpec.of(w), ArraySpec.of(m)]
      >>> state = StateInResult(jax.tree.structure(result), [2, 1], specs)
      >>> new = state.found_in(result)
      >>> result["logs"]["secs"] = 0.5
      >>> [leaf.tolist() for leaf in state.leaves(new)]
      [[1.0, 1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, out_tree: Any, outputs: Sequence[int], specs: Sequence[ArraySpec]):
        self._out_tree = out_tree
        self._place, self._structures = _place_of(out_tree, set(outputs))
        rank = {output: i for i, output in enumerate(sorted(set(outputs)))}
        self._order = [rank[output] for output in outputs]
        self._specs = specs
        self._beside: Any = None  # the structure of all but the parts, once one has been seen

    def found_in(self, result: Any) -> NewState | None:
        """The new state in a result; `None` if it is another program's.

        Where a static argument or the state's structure has changed, the user's own executable has
        returned something else than what was traced, and nothing in it is where it was.
        """
        parts: list[Any] = []
        try:
            _take(result, self._place, parts)
        except LookupError:
            return None
        taken = set(map(id, parts))
        nodes, beside = jax.tree.flatten(result, is_leaf=lambda node: id(node) in taken)
        if self._beside is None:
            if jax.tree.structure(result) != self._out_tree:
                return None
            self._beside = beside
        if beside != self._beside:
            return None
        return NewState(parts, self, [n if id(n) in taken else _weakly(n) for n in nodes])

    def leaves(self, new: NewState | None) -> list[Any] | None:
        """The leaves of a new state; `None` if they have come to be others.

        Args:
          new: Found by itself, or for another program of the same step: a result that holds more
            beside the state has it elsewhere.
        """
        if new is None or new.found_by._specs != self._specs:
            return None
        flat: list[Any] = []
        for part, wanted in zip(new.parts, new.found_by._structures, strict=True):
            leaves, structure = jax.tree.flatten(part)
            if structure != wanted:
                return None
            flat += leaves
        leaves = [flat[i] for i in new.found_by._order]
        are_ours = all(map(_is_of, leaves, self._specs))
        return leaves if are_ours else None


def _weakly(leaf: Any) -> Any:
    return weakref.ref(leaf) if isinstance(leaf, jax.Array) else leaf


def _is_of(x: Any, spec: ArraySpec) -> bool:
    """Whether this is such an array; a loop may have put a number in its place."""
    return isinstance(x, jax.Array) and x.shape == spec.shape and x.dtype == spec.dtype


def _place_of(tree: Any, wanted: set[int], start: int = 0) -> tuple[_Place, list[Any]]:
    """Where the largest trees lie of which all leaves are wanted, and their structures."""
    if all(i in wanted for i in range(start, start + tree.num_leaves)):
        return None, [tree]
    place, structures = [], []
    for n, child in enumerate(tree.children()):
        span = range(start, start + child.num_leaves)
        if any(i in wanted for i in span):
            inner, found = _place_of(child, wanted, start)
            place.append((n, inner))
            structures += found
        start = span.stop
    return place, structures


def _take(node: Any, place: _Place, parts: list[Any]) -> None:
    """Adds what lies at a place in a node.

    Raises:
      LookupError: if the node has no such children.
    """
    if place is None:
        parts.append(node)
        return
    level = jax.tree_util.default_registry.flatten_one_level(node)
    children: Iterable[Any] = () if level is None else level[0]
    listed = list(children)
    for n, inner in place:
        _take(listed[n], inner, parts)
