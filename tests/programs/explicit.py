"""Explicit mesh axes, the default of `jax.make_mesh` since jax 0.8: types say how arrays lie.

Where an operation cannot tell how its result is to lie, its operands are made whole first, and the
result is put where the first one lay, as users do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def is_explicit(place: Any) -> bool:
    """Whether a placement is part of the types of arrays that lie so."""
    return isinstance(place, NamedSharding) and AxisType.Explicit in place.mesh.axis_types


def place_of(x: Any) -> NamedSharding | None:
    """How a value lies by its type; `None` where its type does not tell."""
    place = getattr(jax.typeof(x), "sharding", None)
    return place if is_explicit(place) else None


def whole(x: Any) -> Any:
    """The same on every device, if its type tells that it is not."""
    place = place_of(x)
    if place is None or not any(place.spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(place.mesh, PartitionSpec()))


def lying_like(x: Any, y: Any) -> Any:
    """The same as `x`, where `y` lies, if that is told."""
    place = place_of(y)
    if place is None or place_of(x) == place:
        return x
    return jax.sharding.reshard(x, place)


def put(x: Any, place: jax.sharding.Sharding) -> Any:
    """The same, where it is to lie; of a mesh whose axes are not explicit, that is a constraint."""
    if is_explicit(place):
        return jax.sharding.reshard(x, place)
    return jax.lax.with_sharding_constraint(x, place)


def together(f: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of any arrays of a shape, whose result lies like the first."""

    def placed(x: Any, *others: Any) -> Any:
        if place_of(x) is None:
            return f(x, *others)
        try:
            result = f(x, *others)
        except Exception:  # JAX's for it has no public name; any other comes again
            result = f(whole(x), *map(whole, others))
        return lying_like(result, x)

    return placed
