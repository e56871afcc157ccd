"""How far elements are from each other: the arithmetic of the audit, and of `diff`.

A distance in ULPs is the number of steps from one floating-point number to the other through all
those between them. Denormals count as zero on both sides: XLA's CPU backend flushes them, and an
accelerator may not. Not those of float16, with which all compute in fp32, where they are none.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

UNEQUAL = 2**64 - 1
"""Distance of elements that no number of ULPs is between: integers, NaN or infinity and others."""

_PIECE = 2**18  # elements; bounds the temporary memory of a look at a whole leaf


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """How two chunks differ.

    Attributes:
      max_ulps: Largest distance of two elements.
      elements: How many elements are not the same; a complex one is one, of two parts.
      max_absolute: Largest difference of finite elements; infinite if float64 cannot hold it.
    """

    max_ulps: int = 0
    elements: int = 0
    max_absolute: float = 0.0


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distances of elements in units in the last place.

    Args:
      a: Any shape; float16, bfloat16, float32, float64 or complex (as pairs). All other dtypes are
        compared as bits: equal, or `UNEQUAL`.
      b: Same shape and dtype.

    Returns:
      uint64, same shape (complex: one more dimension). NaN equals NaN, zero equals minus zero and
      every denormal, but those of float16.

    Example:
      >>> a = np.array([1.0, 1e-40, np.nan, 1.0], np.float32)
      >>> b = np.array([np.nextafter(a[0], a[0] + 1), 0.0, np.nan, -1.0], np.float32)
      >>> ulp_distance(a, b).tolist()
      [1, 0, 0, 2113929218]
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind == "c":
        return ulp_distance(_pairs(a), _pairs(b))
    if a.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        return np.asarray(np.where(_bits(a) == _bits(b), np.uint64(0), np.uint64(UNEQUAL)))
    bits, info = a.dtype.itemsize * 8, jnp.finfo(a.dtype)
    sign = np.uint64(1 << (bits - 1))
    denormals = np.uint64((1 << info.nmant) - 1 if a.dtype != np.float16 else 0)
    infinity = np.uint64(((1 << info.nexp) - 1) << info.nmant) - denormals

    def magnitude(x: np.ndarray) -> Any:
        found = _bits(x).astype(np.uint64) & ~sign
        return np.maximum(found, denormals) - denormals  # the least normal is next to zero

    near, far = magnitude(a), magnitude(b)
    same_side = (_bits(a) ^ _bits(b)).astype(np.uint64) & sign == 0
    low, high = np.minimum(near, far), np.maximum(near, far)
    distance = np.where(same_side, high - low, high + low)
    both_nan = low > infinity
    one_is_not_finite = (high >= infinity) & (distance > 0)
    distance = np.where(one_is_not_finite, np.uint64(UNEQUAL), distance)
    return np.asarray(np.where(both_nan, np.uint64(0), distance))


def difference(replayed: np.ndarray, true: np.ndarray) -> Difference:
    """Compares a replayed chunk with the device's own.

    Args:
      replayed: Any dtype.
      true: Same shape and dtype.
    """
    if np.array_equal(_bits(replayed), _bits(true)):  # nearly always, and without temporaries
        return Difference()
    distance = ulp_distance(replayed, true)
    elements = (distance > 0).reshape(*replayed.shape, -1).any(axis=-1)
    if replayed.dtype.kind == "c":
        replayed, true = _pairs(replayed), _pairs(true)
    with np.errstate(invalid="ignore"):  # NaN that signals
        a, b = replayed.astype(np.float64), true.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b) & (distance > 0)
    with np.errstate(over="ignore"):  # of float64
        max_absolute = float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))
    return Difference(int(distance.max()), int(np.count_nonzero(elements)), max_absolute)


def scale_of(flat: np.ndarray) -> float:
    """The largest finite magnitude; 0 if there is none."""
    largest = 0.0
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        piece = _pairs(piece) if piece.dtype.kind == "c" else piece
        with np.errstate(invalid="ignore"):  # NaN that signals
            magnitudes = np.abs(piece.astype(np.float64))
        largest = max(largest, float(np.max(magnitudes[np.isfinite(magnitudes)], initial=0.0)))
    return largest


def _pairs(x: np.ndarray) -> np.ndarray:
    return np.stack([x.real, x.imag], axis=-1)


def _bits(x: np.ndarray) -> np.ndarray:
    if x.dtype.kind == "c":  # of complex128 there is no integer as wide
        return _bits(_pairs(x))
    return x.view(f"u{x.dtype.itemsize}")
