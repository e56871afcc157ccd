"""Where a user says the state is, and how it is found in a step's result.

A result is looked at by its structure alone: classes that check what they are given are never
asked to hold something else.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from gockpt_jax.checks import told
from gockpt_jax.errors import StepMismatchError, WrapError

Place = int | str
Places = Place | Sequence[Place]


def as_places(name: str, places: Any) -> tuple[Place, ...]:
    """Checks what the user gave as `state` or `state_out`.

    Raises:
      WrapError: if it is neither an integer, nor a name, nor a sequence of these.
    """
    is_one = isinstance(places, str | bytes) or not isinstance(places, Sequence)
    listed = tuple(map(_place, (places,) if is_one else places))
    if not listed or None in listed:
        raise WrapError(
            f"`{name}` must be a position, an argument's name, or a sequence of these, "
            f"got {told(places)}. For `step(params, opt_state, batch)` pass `{name}=(0, 1)`."
        )
    return listed


def _place(given: Any) -> Any:
    """A name, or a position as Python has them; `None` for what is neither."""
    if isinstance(given, str):
        return given
    try:
        return None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        return None


def states_at(result: Any, state_out: tuple[Place, ...], wanted: Sequence[Any]) -> tuple[Any, ...]:
    """The new state where the user says that it is.

    Args:
      result: What the step returned (or a tree of the same structure).
      state_out: Positions or names in it.
      wanted: The structure of each state argument.

    Raises:
      StepMismatchError: if there is nothing, or something of another structure.
    """
    parts = tuple(_part(result, place) for place in state_out)
    structures = [jax.tree.structure(p) for p in parts]
    if structures != list(wanted):
        raise StepMismatchError(
            f"`state_out={state_out!r}` does not lead to a tree like the state given to the "
            f"step.\n  expected: {_told(wanted)}\n  got: {_told(structures)}"
        )
    return parts


def states_within(
    out_tree: Any, wanted: Sequence[Any], likeness: Callable[[range, int], int], *,
    largest_first: bool = True,
) -> tuple[range, ...]:  # fmt: skip
    """Finds the new state in a result, however deep it lies.

    Args:
      out_tree: The result's structure.
      wanted: The structure of each state argument.
      likeness: Of the leaves of a tree to the n-th state: of several trees of its structure the
        likest is taken, and of these the outermost, and the first.
      largest_first: Whether the largest choose first if one finds nothing in its turn: a smaller
        one may have taken a part of what is its own, as parameters have the structure of moments.

    Returns:
      For each state argument, which of the result's leaves are the new one; no two share any.

    Raises:
      StepMismatchError: if there is no such tree; the message says what to do.
    """
    trees = [(tree, leaves) for tree, leaves in _trees_in(out_tree) if tree in wanted]
    in_turn = range(len(wanted))
    orders: list[Sequence[int]] = [in_turn]
    if largest_first:
        orders.append(sorted(in_turn, key=lambda n: -wanted[n].num_leaves))
    for order in orders:
        found = _chosen(trees, wanted, likeness, order)
        if len(found) == len(wanted):
            return tuple(found[n] for n in in_turn)
    missing = wanted[order[len(found)]]
    raise StepMismatchError(
        "the wrapped step's result holds no tree like the state it was given, "
        f"{_told([missing])}; it is {_told([out_tree])}. Return the new state with the structure "
        "of the old one, or say where it is with `wrap(step, state=..., state_out=...)`."
    )


def are_several(out_tree: Any, wanted: Sequence[Any]) -> bool:
    """Whether a result holds more trees like a state than there are states."""
    return sum(tree in wanted for tree, _ in _trees_in(out_tree)) > len(wanted)


def _chosen(
    trees: list[tuple[Any, range]], wanted: Sequence[Any],
    likeness: Callable[[range, int], int], order: Sequence[int],
) -> dict[int, range]:  # fmt: skip
    """The leaves that each state takes in turn, up to the first one that finds none."""
    found: dict[int, range] = {}
    for n in order:
        alike = [leaves for tree, leaves in trees if tree == wanted[n]]
        if not alike:
            break
        taken = found[n] = max(alike, key=lambda leaves: likeness(leaves, n))  # the first of these
        trees = [(tree, leaves) for tree, leaves in trees if _apart(leaves, taken)]
    return found


def identical(leaves: Sequence[Any], among: Sequence[Any]) -> list[int | None]:
    """Where each array is, by identity; one that is there twice is found in turn."""
    places: dict[int, list[int]] = {}
    for i in reversed(range(len(among))):
        if isinstance(among[i], jax.Array):
            places.setdefault(id(among[i]), []).append(i)
    found = (places.get(id(leaf), [None]) for leaf in leaves)
    return [at.pop() if len(at) > 1 else at[0] for at in found]


def _trees_in(tree: Any) -> Iterator[tuple[Any, range]]:
    """A structure and all within it, the outermost first, and which of its leaves are theirs."""
    level = [(tree, 0)]
    while level:
        inner = []
        for node, start in level:
            yield node, range(start, start + node.num_leaves)
            for child in node.children():
                inner.append((child, start))
                start += child.num_leaves
        level = inner


def _apart(a: range, b: range) -> bool:
    return a.stop <= b.start or b.stop <= a.start


def _told(structures: Sequence[Any]) -> str:
    """Structures in a few words; as JAX prints one it may take pages."""

    def told(structure: Any) -> str:
        text = str(structure).removeprefix("PyTreeDef(")[:-1]
        return text if len(text) < 200 else f"{text[:200]}... ({structure.num_leaves} leaves)"

    return ", ".join(map(told, structures))


def _part(result: Any, place: Place) -> Any:
    try:
        if isinstance(place, str) and not isinstance(result, Mapping):
            return getattr(result, place)
        return result[place]
    except (LookupError, TypeError, AttributeError) as error:
        raise StepMismatchError(
            f"`state_out={place!r}` names nothing in the step's result, a "
            f"`{type(result).__name__}`. Pass the position or the name of the new state."
        ) from error
