"""States as bits: copies on the host, leaf by leaf, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Bits = dict[str, np.ndarray]
"""Leaves by path, on the host. A typed key is its key data."""


def by_path(tree: Any) -> dict[str, Any]:
    """The tree's leaves by their paths."""
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def to_host(tree: Any) -> Bits:
    """A copy of every leaf by its path; of a key, its numbers.

    NumPy is given a copy: jax 0.11 does not donate what it has looked at on several CPU devices.
    """

    def host(leaf: Any) -> np.ndarray:
        is_key = jnp.issubdtype(jax.dtypes.result_type(leaf), jax.dtypes.prng_key)
        leaf = jax.random.key_data(leaf) if is_key else leaf
        if isinstance(leaf, jax.Array):  # no program, which has to be in the mesh of its axes
            leaf = jax.device_put(leaf, leaf.sharding, may_alias=False)
        return np.array(leaf)

    return {path: host(leaf) for path, leaf in by_path(tree).items()}


def differing(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> list[str]:
    """Paths whose shape, dtype or bits differ; other paths are an error."""
    assert got.keys() == want.keys()
    return [path for path in want if not _identical(got[path], want[path])]


def _identical(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
