"""Boxes of an array: which part of it a shard, a chunk or a piece of one is."""

from collections.abc import Sequence
from typing import Any

Index = tuple[slice, ...]
"""A box as JAX tells it: a slice of step 1 per dimension, which may leave out start and stop."""

Box = tuple[slice, ...]
"""A part of an array: a slice of step 1 per dimension, with explicit start and stop."""


def explicit(index: Any, shape: Sequence[int]) -> Box:
    """The box that an `Index` takes of an array.

    Example:
      >>> explicit((slice(None), slice(2, None)), (4, 8))
      (slice(0, 4, None), slice(2, 8, None))
    """
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """All of an array."""
    return tuple(slice(0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of a box's values."""
    return tuple(s.stop - s.start for s in box)


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; `None` if that is nothing."""
    both = tuple(
        slice(max(s.start, t.start), min(s.stop, t.stop)) for s, t in zip(a, b, strict=True)
    )
    return both if all(s.start < s.stop for s in both) else None


def within(part: Box, box: Box) -> Box:
    """Where a part of a box lies in the values of that box."""
    return tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(part, box, strict=True))
