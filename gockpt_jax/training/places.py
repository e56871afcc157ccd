"""Where a user says the state is, and how it is found in a step's result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from gockpt_jax.errors import StepMismatchError, WrapError

Place = int | str
Places = Place | Sequence[Place]


def as_places(name: str, places: Any) -> tuple[Place, ...]:
    """Checks what the user gave as `state` or `state_out`.

    Raises:
      WrapError: if it is neither an integer, nor a name, nor a sequence of these.
    """
    listed = (places,) if isinstance(places, int | str) else places
    ok = isinstance(listed, Sequence) and not isinstance(places, bool) and len(listed) > 0
    if not ok or not all(isinstance(p, int | str) for p in listed):
        raise WrapError(
            f"`{name}` must be a position, an argument's name, or a sequence of these, "
            f"got {places!r}. For `step(params, opt_state, batch)` pass `{name}=(0, 1)`."
        )
    return tuple(listed)


def state_in_result(
    result: Any,
    states: Sequence[Any],
    state_out: Places | None,
    likeness: Callable[[Any, int], int] = lambda part, n: 0,
) -> tuple[Any, ...]:
    """Finds the new state in a step's result.

    Args:
      result: What the step returned (or a tree of the same structure).
      states: The state arguments, in the order of `state`.
      state_out: Positions or names in the result; `None`: the parts of the result whose tree
        structure is that of each state argument, however deep they lie, the whole result included.
      likeness: Of a part to the n-th state: of several parts of its structure the likest is taken,
        and of these the outermost, and the first.

    Returns:
      One part for each state argument; none lies within another.

    Raises:
      StepMismatchError: if a part is missing or its structure differs; the message says what to do.
    """
    wanted = [_structure(s) for s in states]
    if state_out is not None:
        parts = tuple(_part(result, place) for place in as_places("state_out", state_out))
        if [_structure(p) for p in parts] != wanted:
            raise StepMismatchError(
                f"`state_out={state_out!r}` does not lead to a tree like the state given to the "
                f"step.\n  expected: {_told(states)}\n  got: {_told(parts)}"
            )
        return parts
    inside = [(part, span) for part, span in _trees_in(result) if _structure(part) in wanted]
    found = []
    for n, structure in enumerate(wanted):
        alike = [i for i, (part, _) in enumerate(inside) if _structure(part) == structure]
        if not alike:
            raise StepMismatchError(
                f"the wrapped step's result holds no tree like the state it was given, "
                f"{_told([states[n]])}; it is {_told([result])}. Return the new state with the "
                "structure of the old one, or say where it is with `wrap(step, state=..., "
                "state_out=...)`."
            )
        likest = max((likeness(inside[i][0], n), -i) for i in alike)
        part, taken = inside.pop(-likest[1])
        found.append(part)
        inside = [(part, span) for part, span in inside if _apart(span, taken)]
    return tuple(found)


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)  # which JAX does not type


def _trees_in(tree: Any) -> Iterator[tuple[Any, range]]:
    """A tree and all trees within it, the outermost first, and which of its leaves are theirs."""
    level = [(tree, 0)]
    while level:
        inner = []
        for node, start in level:
            yield node, range(start, start + _structure(node).num_leaves)
            opened = jax.tree_util.default_registry.flatten_one_level(node)
            for child in () if opened is None else opened[0]:
                inner.append((child, start))
                start += _structure(child).num_leaves
        level = inner


def _apart(a: range, b: range) -> bool:
    return a.stop <= b.start or b.stop <= a.start


def _told(trees: Sequence[Any]) -> str:
    """Trees in a few words; a structure as JAX prints it may take pages."""

    def told(tree: Any) -> str:
        text = str(_structure(tree)).removeprefix("PyTreeDef(")[:-1]
        leaves = f"{_structure(tree).num_leaves} leaves"
        return text if len(text) < 200 else f"{text[:200]}... ({leaves})"

    return ", ".join(map(told, trees))


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
