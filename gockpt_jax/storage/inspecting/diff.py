"""How two stored trees differ: structure, shapes, dtypes, and values chunk by chunk.

Nothing is restored: both are read box by box through TensorStore, a bounded number of bytes at a
time, so trees larger than the host's memory can be compared.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorstore as ts

from gockpt_jax.replay.ulps import UNEQUAL, difference, scale_of
from gockpt_jax.storage.files import grid
from gockpt_jax.storage.inspecting.stored_item import (
    READ_LIMIT_BYTES,
    StoredItem,
    chunk_boxes,
    chunk_shape,
    for_each,
    nbytes_of,
    telling_of,
)

Kind = Literal["only in A", "only in B", "type", "shape", "dtype", "values"]

_PIECE = 2**18  # elements; bounds the temporaries of a comparison


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """One leaf that is not the same in both.

    Attributes:
      name: Its parameter name.
      kind: What differs. `dtype` and `shape` come before `values`, which are not compared then.
      a: What is in A: its type, or dtype and shape.
      b: What is in B.
      elements: How many elements have other bits.
      size: Of how many.
      max_ulps: The largest distance in units in the last place, zero equal to denormals and NaN
        to NaN; `None` where there is none: integers, or only one of the two is finite.
      max_absolute: The largest difference of finite elements; infinite if float64 cannot hold it.
      max_relative: The same over the largest magnitude in A's leaf.
    """

    name: str
    kind: Kind
    a: str = ""
    b: str = ""
    elements: int = 0
    size: int = 0
    max_ulps: int | None = None
    max_absolute: float = 0.0
    max_relative: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Figures:
    elements: int = 0
    max_ulps: int = 0
    max_absolute: float = 0.0
    scale: float = 0.0

    def joined(self, other: "_Figures") -> "_Figures":
        return _Figures(
            self.elements + other.elements,
            max(self.max_ulps, other.max_ulps),
            max(self.max_absolute, other.max_absolute),
            max(self.scale, other.scale),
        )


class _Job(NamedTuple):
    name: str
    a: ts.TensorStore
    b: ts.TensorStore
    box: grid.Box


def diff_items(
    path_a: Any, path_b: Any, *, limit_bytes: int = READ_LIMIT_BYTES
) -> Iterator[LeafDifference]:
    """Yields the leaves that differ, by name.

    Args:
      path_a: An item's directory.
      path_b: Another one; its layout may be another.
      limit_bytes: The most bytes of values of both at one time.

    Raises:
      StoredItemError: One of them is no tree that Orbax has saved.
      StoredLeafError: A leaf cannot be read.
    """
    a, b = StoredItem(path_a), StoredItem(path_b)
    for name in sorted(a.leaves.keys() | b.leaves.keys()):
        found = _diff_leaf(name, a, b, limit_bytes)
        if found is not None:
            yield found


def _diff_leaf(name: str, a: StoredItem, b: StoredItem, limit_bytes: int) -> LeafDifference | None:
    if name not in b.leaves:
        return LeafDifference(name, "only in A", _told(a, name), "")
    if name not in a.leaves:
        return LeafDifference(name, "only in B", "", _told(b, name))
    left, right = a.leaves[name], b.leaves[name]
    if not (left.is_array and right.is_array):
        if (left.value_type, left.has_data) != (right.value_type, right.has_data):
            return LeafDifference(name, "type", _told(a, name), _told(b, name))
        texts = (a.text(name), b.text(name))
        if texts[0] == texts[1]:
            return None
        return LeafDifference(name, "values", repr(texts[0]), repr(texts[1]), 1, 1)
    one, other = a.open(name), b.open(name)
    if one.shape != other.shape:
        return LeafDifference(name, "shape", _array(one), _array(other))
    if one.dtype != other.dtype:
        return LeafDifference(name, "dtype", _array(one), _array(other))
    if one.dtype.name == "uint32":  # the data of typed random keys are such
        keys = [item.key_algorithms.get(name) for item in (a, b)]
        if keys[0] != keys[1]:
            told = [f"key<{key}>" if key else _array(one) for key in keys]
            return LeafDifference(name, "type", told[0], told[1])
    jobs = (_Job(name, one, other, box) for box in chunk_boxes(_coarser(one, other)))
    total = _Figures()
    for figures in for_each(
        jobs, _compare, nbytes=lambda job: 2 * nbytes_of(job.a, job.box), limit_bytes=limit_bytes
    ):
        total = total.joined(figures)
    return _difference(name, one, total) if total.elements else None


def _difference(name: str, store: ts.TensorStore, total: _Figures) -> LeafDifference:
    is_number = store.dtype.numpy_dtype.name in ("float16", "bfloat16", "float32", "float64")
    return LeafDifference(
        name,
        "values",
        _array(store),
        _array(store),
        total.elements,
        math.prod(store.shape),
        total.max_ulps if is_number and total.max_ulps != UNEQUAL else None,
        total.max_absolute,
        total.max_absolute / total.scale if total.scale else float(total.max_absolute > 0),
    )


def _coarser(a: ts.TensorStore, b: ts.TensorStore) -> ts.TensorStore:
    """The one with the larger chunks: the other's are read in parts at worst."""
    return a if math.prod(chunk_shape(a)) >= math.prod(chunk_shape(b)) else b


def _compare(job: _Job) -> _Figures:
    """Reads one box of both and compares it, piece by piece."""
    reads = [store[job.box].read() for store in (job.a, job.b)]
    with telling_of(job.name, "read"):
        a, b = (np.ascontiguousarray(read.result()).reshape(-1) for read in reads)
    total = _Figures(scale=scale_of(a))
    for start in range(0, a.size, _PIECE):
        left, right = a[start : start + _PIECE], b[start : start + _PIECE]
        bits = (x.view(np.uint8).reshape(-1, x.dtype.itemsize) for x in (left, right))
        other = np.any(np.not_equal(*bits), axis=1)
        if other.any():
            found = difference(left[other], right[other])
            total = total.joined(_Figures(int(other.sum()), found.max_ulps, found.max_absolute))
    return total


def _array(store: ts.TensorStore) -> str:
    return f"{store.dtype.numpy_dtype.name}{list(store.shape)}"


def _told(item: StoredItem, name: str) -> str:
    leaf = item.leaves[name]
    if leaf.is_array:
        return _array(item.open(name))
    return leaf.value_type if leaf.has_data else f"{leaf.value_type} (no data)"
