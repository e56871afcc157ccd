"""Distances in units in the last place, checked against counting."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded import SEEDED

from gockpt_jax.replay.ulps import UNEQUAL, Difference, difference, scale_of, ulp_distance

FLOATS = ["float16", "bfloat16", "float32", "float64"]
every_float = pytest.mark.parametrize("dtype", FLOATS)


def bits_to(dtype, bits):
    dtype = jnp.dtype(dtype)
    return np.asarray(bits, f"u{dtype.itemsize}").view(dtype)


def distance(dtype, a, b):
    values = (np.asarray([x]).astype(jnp.dtype(dtype)) for x in (a, b))
    return int(ulp_distance(*values)[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_neighbours_are_one_apart_over_the_whole_line(dtype):
    """All finite numbers of 16 bits that are not flushed, in order: each is one from the next."""
    every = bits_to(dtype, np.arange(2**16))
    assert difference(every, every[::-1]).elements == 2**16
    with np.errstate(invalid="ignore"):  # NaN that signals
        finite = every[np.isfinite(every.astype(np.float64))]
    info = jnp.finfo(dtype)
    least = info.smallest_subnormal if dtype == "float16" else info.smallest_normal
    normal = finite[np.abs(finite.astype(np.float64)) >= float(least)]
    line = np.sort(np.concatenate([normal, np.zeros(1, normal.dtype)]))
    assert len(line) == 2 * (len(normal) // 2) + 1
    assert set(ulp_distance(line[:-1], line[1:]).tolist()) == {1}
    assert int(ulp_distance(line[:1], line[-1:])[0]) == len(line) - 1


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_denormals_and_zeros_are_one_number(dtype):
    info = jnp.finfo(dtype)
    tiny = float(info.smallest_subnormal)
    least = float(info.smallest_normal)
    same = [0.0, -0.0, tiny, -tiny]
    for a, b in itertools.product(same, same):
        assert distance(dtype, a, b) == 0
    assert distance(dtype, tiny, least) == distance(dtype, -tiny, least) == 1
    assert distance(dtype, -least, least) == 2
    denormal, zero = (np.asarray([x]).astype(jnp.dtype(dtype)) for x in (tiny, 0.0))
    assert denormal.tobytes() != zero.tobytes()
    assert difference(denormal, zero) == Difference()


@every_float
def test_what_is_not_finite_meets_its_own_kind_only(dtype):
    largest = float(jnp.finfo(dtype).max)
    nan, inf = np.nan, np.inf
    for x in (nan, inf, -inf):
        assert distance(dtype, x, x) == 0
    assert int(ulp_distance(-np.asarray([nan], dtype), np.asarray([nan], dtype))[0]) == 0
    for a, b in itertools.permutations([nan, inf, -inf, 1.0], 2):
        assert distance(dtype, a, b) == UNEQUAL
    assert distance(dtype, largest, inf) == UNEQUAL
    assert 0 < distance(dtype, largest, -largest) < UNEQUAL


@settings(SEEDED, max_examples=100)
@given(bits=st.integers(0, 2**32 - 1), steps=st.integers(0, 20))
def test_steps_in_float32_are_counted(bits, steps):
    a = bits_to("float32", [bits])
    b = a
    for _ in range(steps):
        b = np.nextafter(b, np.float32(np.inf))
    if np.isfinite(a[0]) and np.isfinite(b[0]) and min(abs(a[0]), abs(b[0])) > 1e-37:
        assert int(ulp_distance(a, b)[0]) == steps
    assert ulp_distance(a, b).tolist() == ulp_distance(b, a).tolist()


@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool", "float8_e4m3fn"])
def test_other_dtypes_are_equal_or_not(dtype):
    a = np.array([0, 1, 1], jnp.dtype(dtype))
    b = np.array([0, 0, 1], jnp.dtype(dtype))
    assert ulp_distance(a, b).tolist() == [0, UNEQUAL, 0]
    assert difference(a, b).elements == 1


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_are_pairs(dtype):
    one = dtype(1).real
    a = np.array([1 + 1j], dtype)
    b = np.array([complex(1, np.nextafter(one, one + one))], dtype)
    assert ulp_distance(a, b).tolist() == [[0, 1]]
    assert (difference(a, b).max_ulps, difference(a, a)) == (1, difference(b, b))
    both = np.array([[1 + 1j, 3], [5j, 7 - 7j]], dtype)
    assert difference(both, both + dtype(1 + 1j)).elements == 4
    assert difference(both, both + dtype(1j)).elements == 4


@every_float
def test_difference_is_of_the_worst_element(dtype):
    a = np.linspace(1, 2, 100).astype(jnp.dtype(dtype))
    b = a.copy()
    assert difference(a, b) == difference(b, a)
    assert difference(a, b).elements == 0
    unit = float(jnp.finfo(dtype).eps)
    b[7], b[8] = 1 + 5 * unit, 1 + unit
    a[7] = a[8] = 1
    found = difference(a, b)
    assert (found.elements, found.max_ulps) == (2, 5)
    assert found.max_absolute == pytest.approx(5 * unit)
    a[9] = np.nan
    assert difference(a, b).max_ulps == UNEQUAL
    assert difference(a, b).max_absolute == pytest.approx(5 * unit)


def test_difference_that_no_number_holds():
    """As an audit's, it is told in an error, and is none of NumPy's warnings."""
    a = np.array([1.7e308, 1])
    assert difference(a, -a) == Difference(int(ulp_distance(a, -a).max()), 2, np.inf)


def test_scale_is_the_largest_finite_magnitude():
    x = np.zeros(2**18 + 5, np.float32)
    assert scale_of(x) == 0
    x[0], x[1] = np.nan, np.inf
    x.view(np.uint32)[2] = 0x7F800001  # NaN that signals: no warning
    for n, at in enumerate((-1, 2**18, 2**18 - 1, 3)):
        x[at] = -7 - n
        assert scale_of(x) == 7 + n
    assert scale_of(np.array([3 - 9j], np.complex64)) == 9
    assert scale_of(x[1:2]) == 0
