"""Which operations are repeated on the host, and which values may be cut."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training_helpers import graph_of

from gockpt_jax.training.exact import is_close, is_exact
from gockpt_jax.training.merging import may_be_cut, melts

enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64


def last(f, *dtypes, size=4):
    """The value that a function of arrays of these dtypes ends in."""
    return graph_of(f, *(jnp.ones(size, d) for d in dtypes)).outputs[0]


def case(name, f, *dtypes):
    return pytest.param(f, dtypes, id=f"{name} {' '.join(dtypes)}")


def root():
    """A number that the compiler works out."""
    return jnp.sqrt(jnp.full(4, 0.3))


def far_from(x):
    """Many operations away."""
    return functools.reduce(lambda v, _: -v, range(6), x)


EXACT = [
    *(case("add", jnp.add, d, d) for d in ("float32", "int32", "int8")),
    case("subtract", jnp.subtract, "float32", "float32"),
    case("multiply", jnp.multiply, "float32", "float32"),
    case("square", jnp.square, "float32"),
    case("cube", lambda x: x**3, "float32"),
    *(
        case(f"compare, {f.__name__}", f, "float32", "float32")
        for f in (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
    ),
    *(case(f"round, {f.__name__}", f, "float32") for f in (lax.floor, lax.ceil, lax.round)),
    case("shift to the left", lax.shift_left, "int32", "int32"),
    case("shift to the right", lax.shift_right_arithmetic, "int32", "int32"),
    case("shift bits to the right", lax.shift_right_logical, "uint32", "uint32"),
    case("not followed", lax.stop_gradient, "float32"),
    case("compare complex numbers", lambda x, y: -x == y, "complex64", "complex64"),
    *(case("select", lambda x: jnp.where(x < 1, x, -x), d) for d in ("float32", "bfloat16")),
    *(case("negate", jnp.negative, d) for d in ("float32", "bfloat16", "float16")),
    case("sign", jnp.sign, "bfloat16"),
    case("absolute", jnp.abs, "bfloat16"),
    case("maximum", jnp.maximum, "bfloat16", "bfloat16"),
    case("clamp", lambda x: lax.clamp(0.0, x, 1.0), "float32"),
    case("is finite", jnp.isfinite, "bfloat16"),
    case("logical and", jnp.logical_and, "bool", "bool"),
    *(
        case("remainder of 8", lambda x: lax.rem(x, jnp.full(4, 8, x.dtype)), d)
        for d in ("int32", "uint8")
    ),
    case("divide by 8", lambda x: x / 8.0, "float32"),
    case("divide by 1/4", lambda x: x / 0.25, "float32"),
    case("divide by -2", lambda x: x / -2.0, "float32"),
    case("divide by a constant array", lambda x: x / jnp.full(x.shape, 4.0), "float32"),
    case("narrow", lambda x: x.astype(jnp.bfloat16), "float32"),
    *(
        case(name, f, "bfloat16", "bfloat16")
        for name, f in {
            "compare what was stored": lambda x, y: x < y,
            "compare what was stored with a number": lambda x, y: x == jnp.full(4, 1, x.dtype),
            "round what was stored": lambda x, y: jnp.floor(x),
        }.items()
    ),
    case("bound what was narrowed", lambda x: jnp.maximum(x.astype(jnp.bfloat16), 1), "float32"),
    case("compare a count", lambda n: n.astype(jnp.float32) < 3, "int32"),
    case("compare a count with zero", lambda n: n >= 0, "int32"),
    case("widen what was stored", lambda x: x.astype(jnp.float32), "bfloat16"),
    case("widen a flag", lambda x, y: (x < y).astype(jnp.float32), "float32", "float32"),
    case("widen a count", lambda n: (n + 1).astype(jnp.float32), "int32"),
    case("widen a code", lambda x: x.astype(jnp.bfloat16), "int8"),
    case("narrow a count", lambda n: n.astype(jnp.int8), "int32"),
    case(
        "narrow what was widened",
        lambda n: n.astype(jnp.float32).astype(jnp.bfloat16),
        "int16",
    ),
    case(
        "narrow a sum with a count",
        lambda n, x: (x + n.astype(jnp.float32)).astype(jnp.bfloat16),
        "int32",
        "float32",
    ),
    case(
        "narrow a product with a count",
        lambda n, x: (x * n.astype(jnp.float32)).astype(jnp.bfloat16),
        "int32",
        "float32",
    ),
    case("spread a scalar", lambda x: jnp.full((4,), x[0] * 2.0), "float32"),
    case("add products by other numbers", lambda x, y: x * 0.9 + y * 0.1, "float32", "float32"),
    case("add zero", lambda x: x + 0.0, "float32"),
    case(
        "add a sum of constants",
        lambda x: x + (jnp.full(4, 0.3) + jnp.full(4, 0.7)),
        "float32",
    ),
    case("from a constant, from another", lambda x: 0.7 - (0.3 - x), "float32"),
    case(
        "add products, by what is negated",
        lambda x, y: x * -jnp.full(4, 0.7) + y * 0.7,
        "float32",
        "float32",
    ),
    case(
        "multiply a product by an array", lambda x, y: (x * 0.3) * jnp.sin(y), "float32", "float32"
    ),
    case("add to a sum with a constant", lambda x, y: (x + 0.3) + y, "float32", "float32"),
    case("add to the square of one", lambda x: jnp.square(x + 0.3) + 0.7, "float32"),
    case("add quarters", lambda x, y: x / 4.0 + y / 4.0, "float32", "float32"),
    case("add halves", lambda x, y: x * 0.5 + y * 0.5, "float32", "float32"),
    case("add to a sum by an array", lambda x: (x + 0.1) * np.arange(4.0) + 0.3, "float32"),
    case(
        "add products by other constant arrays",
        lambda x, y: x * np.arange(4, dtype=np.float32) + y * np.arange(1, 5, dtype=np.float32),
        "float32",
        "float32",
    ),
    case("add a product and its factor", lambda x, y: x * y + y, "float32", "float32"),
    case("add products of counts", lambda x, y: x * 3 + y * 3, "int32", "int32"),
    case("multiply a count by flags", lambda n: n * (n > 3), "int32"),
    case("by a known root and an array", lambda x, y: x * root() + y * -x, "float32", "float32"),
    case("by a known root and a number", lambda x, y: x * root() + y * 0.7, "float32", "float32"),
    case(
        "by an exponential and a scalar",
        lambda x, y: x * jnp.exp(0.3) + y * jnp.sin(x[0]),
        "float32",
        "float32",
    ),
    case(
        "by a scheduled number and its rest",
        lambda x, y: x * jnp.cos(y[0]) + y * (1 - jnp.cos(y[0])),
        "float32",
        "float32",
    ),
    case(
        "by a sine and a cosine", lambda x, y: x * jnp.sin(y) + y * jnp.cos(y), "float32", "float32"
    ),
    case(
        "by a sum and its rest",
        lambda x, y: x * jnp.sum(x) + y * (1 - jnp.sum(x)),
        "float32",
        "float32",
    ),
    case("by other sums", lambda x, y: x * (x + y) + y * (x + 0.5), "float32", "float32"),
    case("root of a constant", lambda x: jnp.sqrt(jnp.full(4, 0.3)), "float32"),
    case("select by a constant", lambda x: jnp.where(True, x, -x), "float32"),
    case("select one", lambda x: jnp.where(x < 1, x * 0.3, x * 0.3), "float32"),
    case("larger of one, once", lambda x: jnp.maximum(x, x * 1.0), "float32"),
    case("select one, plus nothing", lambda x: jnp.where(x < 1, x + 0.0, x), "float32"),
    case("larger of one", lambda x: jnp.maximum(x * 0.3, x * 0.3), "float32"),
    case("larger than minus infinity", lambda x: jnp.maximum(x, -jnp.inf), "float32"),
    case("negate twice", lambda x: jnp.negative(-x), "float32"),
    case("absolute twice", lambda x: jnp.abs(jnp.abs(x)), "float32"),
    case("product, once more by a scalar", lambda x: (x * x[0]) * 0.7, "float32"),
    case("twice, and a product", lambda x: (x * 2.0) * 0.3, "float32"),
    case("product, once more by two", lambda x: (x * 0.3) * 2.0, "float32"),
    case("product with nothing added, by two", lambda x: ((x * 0.3) + 0.0) * 2.0, "float32"),
    case("product, and a sum with a constant", lambda x: x * 0.3 + 0.7, "float32"),
    case(
        "products by what differs far back",
        lambda x, y: x * far_from(x) + y * far_from(y),
        "float32",
        "float32",
    ),
    case("quotient of constants", lambda x: lax.div(jnp.full(4, 0.3), jnp.full(4, 0.7)), "float32"),
]

ROUNDED = [
    case("divide", jnp.divide, "float32", "float32"),
    case("divide by 10", lambda x: x / 10.0, "float32"),
    case("divide by 2**-126", lambda x: x / jnp.float32(2.0**-126), "float32"),
    case("divide by zero", lambda x: x / 0.0, "float32"),
    *(
        case(name, getattr(lax, name), "float32")
        for name in [
            "sqrt",
            "rsqrt",
            "cbrt",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log1p",
            "tanh",
            "logistic",
            "sin",
            "cos",
            "tan",
            "asin",
            "acos",
            "atan",
            "sinh",
            "cosh",
            "asinh",
            "acosh",
            "atanh",
            "erf",
            "erfc",
        ]
    ),
    case("angle", lax.atan2, "float32", "float32"),
    case("reciprocal power", lambda x: x**-2, "float32"),
    case("power", lambda x, y: x**y, "float32", "float32"),
    case("whole power", lax.pow, "float32", "int32"),
    *(
        case(f"of a constant, {f.__name__}", lambda x, f=f: f(jnp.full(4, 0.3)), "float32")
        for f in (lax.exp, lax.log, lax.cbrt, lax.rsqrt)
    ),
    case("power of constants", lambda x: lax.pow(jnp.full(4, 0.3), jnp.full(4, 0.7)), "float32"),
    case("root over a constant", lambda x: jnp.sqrt(jnp.full(4, 0.3)) / 0.7, "float32"),
    *(
        case(how, f, "float32")
        for how, f in {
            "times two constants": lambda x: (x * 0.3) * 0.7,
            "times a constant and a scalar": lambda x: (x * 0.3) * x[0],
            "times a constant and a constant array": lambda x: (
                (x * 0.3) * np.arange(4, dtype=np.float32)
            ),
            "times a constant and one of one": lambda x: (
                (x * 0.3) * lax.broadcast_in_dim(x[:1], (4,), (0,))
            ),
            "times a constant and a sum with one of one": lambda x: (
                (x * 0.3) * (jnp.full(4, x[0]) + x[:1])
            ),
            "times a constant and spread ones": lambda x: (x * 0.3) * (jnp.full(4, x[0]) * x[1]),
            "times a constant and such, negated twice": lambda x: (
                (x * 0.3) * jnp.negative(-(jnp.full(4, x[0]) * x[1]))
            ),
            "times a constant and rows": lambda x: (
                (x.reshape(2, 2) * 0.3) * jnp.broadcast_to(jnp.sin(x[:2]), (2, 2))
            ),
            "times a constant, plus zeros of constants, and another": lambda x: (
                (x * 0.3 + jnp.minimum(np.arange(4, dtype=np.float32), 0.0)) * 0.7
            ),
            "times a constant, negated, and another": lambda x: 0.7 * -(x * 0.3),
            "times a constant and no less, and another": lambda x: (
                jnp.maximum(x * 0.3, x * 0.3) * 3
            ),
            "over a constant, times another": lambda x: (x / 0.3) * 0.7,
            "plus two constants": lambda x: (x + 0.3) + 0.7,
            "from a constant, plus another": lambda x: (0.3 - x) + 0.7,
            "plus a constant, times one, plus another": lambda x: ((x + 0.3) * 1.0) - 0.7,
            "plus a constant, times what is made one, plus another": lambda x: (
                ((x + 0.3) * lax.reduce_precision(jnp.full(4, 1.001), 8, 7)) - 0.7
            ),
        }.items()
    ),
    *(
        case(f"{how}, {f.__name__}", lambda x, y, f=f, of=of: f(*of(x, y)), "float32", "float32")
        for f in (jnp.add, jnp.subtract)
        for how, of in {
            "products by one number": lambda x, y: (x * 0.3, 0.3 * y),
            "products by one scalar": lambda x, y: (x * x[0], y * x[0]),
            "products by one array": lambda x, y: (x * y, y * jnp.sin(x)),
            "squares": lambda x, y: (x * x, x * y),
            "products of products": lambda x, y: (x * 0.9, (x * 0.3) * 0.1),
            "products by known numbers": lambda x, y: (x * root(), lax.div(root(), root()) * y),
            "products by what is the same far back": lambda x, y: (
                x * far_from(x),
                y * far_from(x),
            ),
            "products by a square": lambda x, y: (x * (x[0] * x[0] + y), y * (x[0] ** 2 + y)),
            "products by a sum, reordered": lambda x, y: (x * (x[0] + y), y * (y + x[0])),
            "products by a difference": lambda x, y: (x * (y[0] - 0.3), y * (-0.3 + y[0])),
            "products by what is chosen among many": lambda x, y: (
                x * lax.switch(y[0].astype(int), [lambda n=n: y[1] * n for n in range(1, 40)]),
                y * lax.switch(y[0].astype(int), [lambda n=n: n * y[1] for n in range(1, 40)]),
            ),
            "products by what is bounded twice": lambda x, y: (
                x * jnp.maximum(y, 0.0),
                y * jnp.maximum(jnp.maximum(y, 0.0), 0.0),
            ),
            "named products": lambda x, y: (checkpoint_name(x * 0.3, "a"), y * 0.3),
            "a product and a half": lambda x, y: (x * 0.1, x / 2.0),
            "quarters of products": lambda x, y: (x * 0.3 / 4.0, y * 0.3 / 4.0),
            "products with nothing added": lambda x, y: (x * 0.9, (x + 0.0) * 0.1),
            "a product and what it was": lambda x, y: (x * 0.9 + 0.0, x * 0.1),
            "products, one not followed": lambda x, y: (x * 0.9, lax.stop_gradient(x) * 0.1),
            "products by what is made of constants": lambda x, y: (
                x * abs(jnp.full(4, -0.3)),
                y * 0.3,
            ),
            "products by an exponential": lambda x, y: (x * jnp.exp(jnp.full(4, 0.1)), y * 0.3),
            "products of a larger": lambda x, y: (x * 0.9, jnp.maximum(x, x) * 0.1),
            "products by a choice, its flags reordered": lambda x, y: (
                x * jnp.where((x < 1) & (y < 1), jnp.sin(x), jnp.sin(y)),
                y * jnp.where((y < 1) & (x < 1), jnp.sin(x), jnp.sin(y)),
            ),
            "products by a choice, and the other way round": lambda x, y: (
                x * jnp.where(x < 1, jnp.sin(x), jnp.sin(y)),
                y * jnp.where(~(x < 1), jnp.sin(y), jnp.sin(x)),
            ),
            "products by a choice of a flag": lambda x, y: (
                x * jnp.where(lax.convert_element_type(x, bool), jnp.sin(x), jnp.sin(y)),
                y * jnp.where(x != 0, jnp.sin(x), jnp.sin(y)),
            ),
            "products by a power": lambda x, y: (
                x * (lax.pow(x, 2.0) + jnp.sin(y)),
                y * (x * x + jnp.sin(y)),
            ),
            "products by the reciprocal of a root": lambda x, y: (
                x * lax.rsqrt(y),
                y * (1.0 / jnp.sqrt(y)),
            ),
            "products by two absolute numbers": lambda x, y: (
                x * (jnp.abs(y) * jnp.abs(y)),
                jnp.sin(y) * (y * y),
            ),
            "products by what may overflow": lambda x, y: (
                x * jnp.exp(y * y),
                jnp.sin(y) * jnp.exp(y * y),
            ),
            "products, one negated twice": lambda x, y: (jnp.negative(-(x * 0.3)), y * 0.3),
            "quotients by zero": lambda x, y: (x / 0.0, y / 0.0),
            "products by a sum of sums": lambda x, y: (
                x * jnp.sum(jnp.sum(y.reshape(2, 2), 0)),
                y * jnp.sum(y),
            ),
            "products by a dot and a sum": lambda x, y: (x * jnp.dot(y, y), y * jnp.sum(y * y)),
            "products by slices of slices": lambda x, y: (x * y[1:][1], jnp.sin(y) * y[2]),
            "products by what is padded": lambda x, y: (
                x * (lax.pad(x, 0.0, [(0, 0, 0)]) + jnp.sin(y)),
                y * (x + jnp.sin(y)),
            ),
        }.items()
    ),
]

OTHER = [
    case("divide bf16 by 8", lambda x: x / 8.0, "bfloat16"),
    case("whole power", lax.pow, "bfloat16", "int32"),
    *(case("add", jnp.add, d, d) for d in ("bfloat16", "float16")),
    case("multiply", jnp.multiply, "bfloat16", "bfloat16"),
    case("multiply complex numbers", jnp.multiply, "complex64", "complex64"),
    case("narrow and widen again", lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), "float32"),
    *(
        case(f"{f.__name__} what was narrowed", lambda x, f=f, d=d: f(x.astype(d)), "float32")
        for d in (jnp.bfloat16, jnp.float16)
        for f in (jnp.floor, jnp.ceil, lax.round, jnp.sign, jnp.isfinite)
    ),
    case("compare what was narrowed", lambda x, y: x.astype(y.dtype) == y, "float32", "float16"),
    case("compare a narrow product", lambda x, y: x * y <= y, "bfloat16", "bfloat16"),
    *(case("to whole numbers", lambda x: x.astype(jnp.int32), d) for d in ("float32", "bfloat16")),
    case("narrow to 8 bits", lambda x: x.astype(jnp.float8_e4m3fn), "float32"),
    case("narrow a large count", lambda n: n.astype(jnp.bfloat16), "int32"),
    case("round a count twice", lambda n: n.astype(jnp.float32).astype(jnp.bfloat16), "int32"),
    case(
        "round a count, add nothing, and round it again",
        lambda n: (n.astype(jnp.float32) + 0.0).astype(jnp.bfloat16),
        "uint32",
    ),
    case(
        "round as bf16, widen, and round as fp16",
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32).astype(jnp.float16),
        "float16",
    ),
    case("absolute of a complex one", jnp.abs, "complex64"),
    case("sign of a complex one", jnp.sign, "complex64"),
    case("widen a narrow sum", lambda x: (-x).astype(jnp.float32), "bfloat16"),
    case("sum", lambda x: jnp.sum(x), "float32"),
    case("dot", jnp.dot, "float32", "float32"),
    case("cumulative sum", jnp.cumsum, "float32"),
    case("reverse", lambda x: x[::-1], "float32"),
    case("sort", jnp.sort, "float32"),
    case("remainder", lax.rem, "float32", "float32"),
    case("remainder of some number", lax.rem, "int32", "int32"),
    case("remainder of one more", lambda n, k: lax.rem(n, k + 1), "int32", "int32"),
    case("remainder of several", lambda n: lax.rem(n, np.arange(4, dtype=np.int32)), "int32"),
    case("remainder of two, of floats", lambda x: lax.rem(x, jnp.full(4, 2.0)), "float32"),
    case("root of a narrow constant", lambda x: jnp.sqrt(jnp.full(4, 0.3, x.dtype)), "bfloat16"),
    case("remainder of zero", lambda x: lax.rem(x, jnp.zeros(4, x.dtype)), "int32"),
    case("reduce precision", lambda x: lax.reduce_precision(x, 8, 7), "float32"),
    case("optimization barrier", lambda x: lax.optimization_barrier(x), "float32"),
    *(
        case("choose a denormal", lambda x, z=z: jnp.where(x.real > 0, x.dtype.type(z), x), d)
        for d, z in (("float32", 1e-40), ("bfloat16", 1e-40), ("complex64", 1 + 1e-40j))
    ),
    case(
        "choose what constants make denormal",
        lambda x: jnp.where(x > 0, jnp.full(4, 1e-20, x.dtype) * np.float32(1e-20), x),
        "float32",
    ),
    case("spread a row", lambda x: jnp.broadcast_to(x[:, None], (4, 3)), "float32"),
]


@pytest.mark.parametrize(("f", "dtypes"), EXACT)
def test_exact(f, dtypes):
    """Bit for bit on every machine, also as any compiler rewrites it."""
    assert is_exact(last(f, *dtypes).op)


@pytest.mark.parametrize(("f", "dtypes"), ROUNDED + OTHER)
def test_inexact(f, dtypes):
    assert not is_exact(last(f, *dtypes).op)


@pytest.mark.parametrize(("f", "dtypes"), EXACT + ROUNDED)
def test_close(f, dtypes):
    assert is_close(last(f, *dtypes).op)


@pytest.mark.parametrize("wide", ["int32", "int64", "float64"])
@pytest.mark.parametrize("then", ["float64", "bfloat16"])
def test_what_was_rounded_is_not_converted_again(wide, then):
    """An H100's compiler drops the first conversion: seen with each of these."""
    with enable_x64(True):
        value = last(lambda x: lax.convert_element_type(x.astype(jnp.float32), then), wide)
        is_stored = last(lambda x: lax.convert_element_type(x, then), "float32")
    assert not is_exact(value.op)
    assert is_exact(value.op.inputs[0].op)
    assert is_exact(is_stored.op)


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (lambda x: x + x, "float64"),
        (lambda x: x / 3.0, "float64"),
        (lambda x: jnp.where(x > 1, x, -x), "float64"),
        (lambda x: x.astype(jnp.float64), "int64"),
        (lambda x: x.astype(jnp.float32), "float64"),
    ],
)
def test_a_tpu_has_no_fp64_of_its_own(f, dtype, monkeypatch):
    """Its compiler makes two fp32 of each, and several operations of one."""
    with enable_x64(True):
        op, on_tpu = (last(f, dtype).op for _ in range(2))
        narrow, flag = (last(f, "float32").op for f in (lambda x: x + x, lambda x: x > 0))
    assert is_close(op)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert not is_close(on_tpu)
    assert not is_exact(on_tpu)
    assert is_exact(narrow)
    assert is_exact(flag)  # it takes denormals for zero, as the host does


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_of_fp64_other_numbers_are_denormal(dtype):
    with enable_x64(True):
        small, denormal = (
            last(lambda x, z=z: jnp.where(x.real > 0, x.dtype.type(z), x), dtype).op
            for z in (1e-40, 1e-310)
        )
    assert is_exact(small)
    assert not is_exact(denormal)


@pytest.mark.parametrize(
    ("f", "dtype", "expected"),
    [
        (jnp.sign, "float32", False),
        (jnp.sign, "bfloat16", False),
        (lambda x: x > 0, "float32", False),
        (lambda x: x == -x, "float32", False),
        (jnp.floor, "float32", False),
        (jnp.ceil, "float32", False),
        (lambda x: x > 1, "float32", True),
        (lambda x: x < -1e-30, "float32", True),
        (lambda x: x > np.arange(4, dtype=np.float32), "float32", False),
        (lambda x: x > np.full(4, 2, np.float32), "float32", True),
        (lambda x: x.astype(bool), "float32", False),
        (lambda x: x.astype(bool), "int32", True),
        (jnp.isfinite, "float32", True),
        (jnp.sign, "int32", True),
        (lambda x: x > 0, "int32", True),
        (jnp.sign, "float16", True),
        (lambda x: x + x, "float32", True),
    ],
)
def test_a_gpu_may_tell_from_zero_what_the_host_flushes(f, dtype, expected, monkeypatch):
    """A moment without gradients decays to 7e-44, and stays there; its sign is that of Lion."""
    op, on_gpu = (last(f, dtype).op for _ in range(2))
    assert is_exact(op)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert is_exact(on_gpu) is expected


@pytest.mark.parametrize(("f", "dtypes"), OTHER)
def test_not_close(f, dtypes):
    """A cumulative sum, say, is none of the elements of a chunk alone."""
    assert not is_close(last(f, *dtypes).op)


def scaled(turns, unroll, x, y):
    """A product in a loop."""
    del y
    return lax.scan(lambda c, _: (c * 0.1, None), x, length=turns, unroll=unroll)[0]


def handed_on(turns, x, y):
    """From the second turn on, a product."""
    del y

    def swap(carry, _):
        return (carry[1], carry[0] * 0.1), None

    return lax.scan(swap, (x, jnp.sin(x)), length=turns, unroll=max(1, turns))[0][0]


def rows_of(f, given, turns, unroll, x, y):
    """What each turn adds."""
    del y
    return lax.scan(lambda c, _: f(c), given(x), length=turns, unroll=unroll)[1]


def product_of_rows(turns, unroll, x, y):
    """The first turn multiplies by one."""
    rows = jnp.sin(jnp.stack([x, y, x, y, x])[:turns])
    return lax.scan(lambda c, row: (c * row, None), jnp.ones_like(x), rows, unroll=unroll)[0]


def in_place(x, y):
    """Written into an array of one row, which is then read by a number that is no constant."""
    if not hasattr(jax, "new_ref"):
        pytest.skip("this version of JAX has no such arrays")
    return jax.new_ref(x[None] * 0.1)[y[0].astype(jnp.int32)]


def turned(count, body, result=0):
    """What a loop that is written out makes of a product, at last or in each of its turns."""
    return lambda x, y: lax.scan(
        lambda c, _: body(c), x * y, None, length=count, unroll=max(1, count)
    )[result]


def looping(condition, factor=lambda y: 0.1):
    """A product in a loop that goes on as long as a condition holds."""
    return lambda x, y: lax.while_loop(condition, lambda c: (c[0] + 1, c[1] * factor(y)), (0, x))[1]


def mapped(devices, f):
    mesh = jax.make_mesh((devices,), ("rows",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def summed(x, y, groups=None):
    return lax.psum(x * y, "rows", axis_index_groups=groups)


def batched(rows, f):
    """Over so many rows of a product, as a batch that has a name."""
    over_rows = jax.vmap(lambda row: f(row, "rows"), axis_name="rows", out_axes=None)
    return lambda x, y: over_rows((x * y).reshape(rows, -1))


def exchanged(x, y):
    return lax.all_to_all(x * y, "rows", 0, 0, tiled=True)


def ragged(size, x, y):
    """The gradient of two experts, of so many tokens together; with the first number of each."""
    sizes = jnp.array([size - size // 2, size // 2], jnp.int32)
    return jax.grad(lambda w: jnp.sum(lax.ragged_dot(x[:size, None] * y[:size, None], w, sizes)))(
        jnp.ones((2, 1, 4), x.dtype)
    )


def by_features(x, filters):
    """Each element, as a feature of its own, convolved with its own filter."""
    spread = jnp.broadcast_to(x[None, :, None], (1, 4, 5))
    return lax.conv_general_dilated(spread, filters, (1,), "VALID", feature_group_count=4)


def convolved(size):
    """With a kernel of so many numbers."""
    return lambda x, y: lax.conv_general_dilated((x * y)[None, None], y[None, None, :size], (1,),
                                                 "SAME")  # fmt: skip


def in_a_kernel(x, y):
    """As the accelerators' own compilers make them: only traced here."""

    def scale(given, made):
        made[...] = given[...] * 0.1

    return pallas.pallas_call(scale, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.parametrize("f", [lambda x: x.astype(jnp.float32), jnp.floor])
def test_what_enters_a_shard_map_is_as_it_is_stored(f):
    (inside,) = last(mapped(1, f), "bfloat16").op.stands_for
    assert is_exact(inside.op)


# Of what is summed up, or moved, the compiler sees parts: here it finds no more than a sum.
SUMMED_UP = {
    "sum of rows side by side": lambda x, y: jnp.sum(
        jnp.concatenate([jnp.outer(x, y), jnp.outer(y, x)], 1), 0
    ),
    "sum of rows and more of them": lambda x, y: jnp.sum(
        jnp.concatenate([jnp.outer(x, y), jnp.outer(y, x)]), 0
    ),
    "sum of rows and no more": lambda x, y: jnp.sum(jnp.pad(jnp.outer(x, y), ((0, 1), (0, 0))), 0),
    "sum of rows by what is spread": lambda x, y: jnp.sum(x[None] * jnp.outer(y, y), 0),
    "dot of what is spread": lambda x, y: jnp.repeat(x[:, None] * y[0], 3, 1) @ y[:3],
    "dot of rows by a constant": lambda x, y: jnp.outer(x, y) @ np.ones(4, np.float32),
    "largest of a pair": lambda x, y: jnp.max(jnp.stack([x, y]), 0),
    "whether all of a pair": lambda x, y: jnp.all(jnp.stack([x[0] * y[0] > 0, y[0] > 0])),
    "gathered somewhere": lambda x, y: jnp.take(x * y, y.astype(jnp.int32)),
    "scattered somewhere": lambda x, y: jnp.zeros(9).at[y.astype(jnp.int32)].add(x * y),
    "set at a place": lambda x, y: jnp.zeros((2, 4)).at[1].set(x),
    "smallest of a pair": lambda x, y: jnp.min(jnp.stack([x, y]), 0),
    "count of a pair": lambda x, y: jnp.sum(jnp.stack([x, y]).astype(jnp.int32), 0),
    "sum of a pair and of what is given": lambda x, y: jnp.sum(
        jnp.stack([x[:2], y[:2]]) + y.reshape(2, 2), 0
    ),
    "sum of a pair and of products": lambda x, y: jnp.sum(
        jnp.stack([x, y]) + jnp.stack([x, y]) @ jnp.outer(x, y), 0
    ),
    "sum of rows that are spread": lambda x, y: jnp.sum(
        jnp.broadcast_to(jnp.outer(x, y), (2, 4, 4)), 1
    ),
    "sum of rows of which one was set": lambda x, y: jnp.sum(y.reshape(2, 2).at[1].set(x[:2]), 0),
    **{
        f"{f.__name__} of products": lambda x, y, f=f: f(x * y)
        for f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
    },
}
TAKEN_APART = {
    "sum of a pair": lambda x, y: jnp.sum(jnp.stack([x, y]), 0),
    "sum of a pair along an axis of NumPy's": lambda x, y: lax.reduce(
        jnp.stack([x, y]), 0.0, lax.add, tuple(np.arange(1))
    ),
    "sum of a pair, transposed": lambda x, y: jnp.sum(jnp.stack([x, y]).T, 1),
    "sum of a pair, less one": lambda x, y: jnp.sum(jnp.stack([x, y]) - 1.0, 0),
    "sum of a pair and nothing": lambda x, y: jnp.sum(
        jnp.pad(jnp.stack([x, y]), ((0, 2), (0, 0))), 0
    ),
    "sum of rows and a constant": lambda x, y: jnp.sum(
        jnp.concatenate([jnp.outer(x, y), np.ones((2, 4), np.float32)]), 0
    ),
    "sum of rows and constants around": lambda x, y: jnp.sum(
        jnp.pad(jnp.outer(x, y), ((0, 1), (0, 0)), constant_values=0.1), 0
    ),
    "sum of a row among others": lambda x, y: jnp.sum(
        lax.dynamic_update_slice(jnp.zeros((3, 4)), x[None], (1, 0)), 0
    ),
    "sum of a row that was set": lambda x, y: jnp.sum(jnp.zeros((3, 4)).at[1].set(x), 0),
    "sum of a row that was added": lambda x, y: jnp.sum(jnp.zeros((3, 4)).at[1].add(x), 0),
    "sum of a pair by constants": lambda x, y: jnp.sum(
        jnp.stack([x, y]) * np.arange(8, dtype=np.float32).reshape(2, 4), 0
    ),
    "sum of a pair by a number": lambda x, y: jnp.sum(jnp.stack([x, y]) * y[0], 0),
    "sum of two of three": lambda x, y: jnp.sum(lax.slice(jnp.stack([x, y, x]), (0, 0), (2, 4)), 0),
    "sum of a pair behind a barrier": lambda x, y: jnp.sum(
        lax.optimization_barrier((y, jnp.stack([x, y])))[1], 0
    ),
    "sum of what is spread": lambda x, y: jnp.sum(jnp.broadcast_to(x, (3, 4)), 0),
    "twice a sum of what is spread": lambda x, y: jnp.sum(jnp.broadcast_to(x, (3, 4)), 0) * 2.0,
    "sum of a number that is spread": lambda x, y: jnp.sum(jnp.full(3, y[0])),
    "sum of what is tiled": lambda x, y: jnp.sum(
        (lax.tile if hasattr(lax, "tile") else jnp.tile)(x, (3,)).reshape(3, 4), 0
    ),
    "sum of the cosine of what is spread": lambda x, y: jnp.sum(
        jnp.cos(jnp.broadcast_to(x, (3, 4))), 0
    ),
    "product with a constant": lambda x, y: jnp.prod(jnp.stack([x[0], jnp.float32(0.1)])),
    "product so far with a constant": lambda x, y: jnp.cumprod(jnp.stack([x, jnp.full(4, 0.1)]), 0),
    "sums so far of a pair": lambda x, y: jnp.cumsum(jnp.stack([x, y]), 0),
    "sums in windows of a pair": lambda x, y: lax.reduce_window(
        jnp.stack([x, y]), 0.0, lax.add, (2, 1), (1, 1), "VALID"
    ),
    "sum of a pair that is mapped": lambda x, y: jax.vmap(
        lambda v: lax.psum(v, "pair"), axis_name="pair", out_axes=None
    )(jnp.stack([x, y])),
    "in windows of one": lambda x, y: lax.reduce_window(x * y, 0.0, lax.add, (1,), (2,), "VALID"),
    "larger of a product and nothing": lambda x, y: jnp.max(
        jnp.stack([x * y, jnp.full(4, -jnp.inf)]), 0
    ),
    "larger so far of nothing and a product": lambda x, y: lax.cummax(
        jnp.stack([jnp.full(4, -jnp.inf), x * y]), 0
    ),
    "dot of a pair with a constant": lambda x, y: jnp.stack([x, y], 1) @ np.ones(2, np.float32),
    "constant dot of what is spread": lambda x, y: np.ones(3, np.float32) @ jnp.full((3, 4), x[0]),
    "gathered at a place": lambda x, y: jnp.take((x * y)[:, None], jnp.array([1]), 0),
    "gathered at some place": lambda x, y: jnp.take((x * y)[:, None], y[:1].astype(jnp.int32), 0),
    "gathered at a place of two numbers": lambda x, y: (x * y).reshape(2, 2)[
        y[:1].astype(jnp.int32), y[1:2].astype(jnp.int32)
    ],
    "gathered whole": lambda x, y: jnp.take((x * y)[None], y.astype(jnp.int32), 0),
    "scattered whole": lambda x, y: (
        jnp.zeros((1, 4)).at[y.astype(jnp.int32)].add((x * y) * jnp.ones((4, 1)))
    ),
    "gathered in order": lambda x, y: jnp.take(x * y, jnp.array([3, 1])),
    "a product set at a place": lambda x, y: jnp.zeros((2, 4)).at[1].set(x * y),
    "added to a constant": lambda x, y: jnp.ones((2, 4)).at[1].add(x),
    "multiplied at a place": lambda x, y: jnp.outer(x, y).at[1].multiply(y),
}


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        pytest.param(lambda x, y: x * y, False, id="product"),
        pytest.param(lambda x, y: jnp.square(x), False, id="square"),
        pytest.param(lambda x, y: lax.integer_pow(x, 3), False, id="cube"),
        pytest.param(lambda x, y: lax.integer_pow(x, 1), True, id="first power"),
        pytest.param(lambda x, y: lax.integer_pow(x, -2), False, id="reciprocal of a square"),
        pytest.param(lambda x, y: lax.pow(x, 2.0), False, id="square as a power"),
        pytest.param(lambda x, y: lax.pow(x, 1.0), True, id="first power as a power"),
        pytest.param(lambda x, y: lax.pow(x * y, 0.5), True, id="root as a power"),
        pytest.param(lambda x, y: jnp.log(lax.pow(x, 0.3)), False, id="logarithm of a power"),
        pytest.param(lambda x, y: jnp.log(lax.pow(x, y)[::-1]), False, id="of any, moved"),
        pytest.param(lambda x, y: jnp.log(lax.exp2(x)), False, id="logarithm of a power of two"),
        pytest.param(lambda x, y: jnp.log(x + y), True, id="logarithm of a sum"),
        pytest.param(lambda x, y: x * 0.25, True, id="product with a power of two"),
        pytest.param(lambda x, y: x / 8.0, True, id="division by a power of two"),
        pytest.param(lambda x, y: x / 10.0, False, id="division by a constant"),
        pytest.param(lambda x, y: x / jnp.full((4,), 10.0), False, id="by a constant array"),
        pytest.param(
            lambda x, y: x * lax.pad(jnp.full(2, 0.5), jnp.float32(0.3), [(1, 1, 0)]), False,
            id="by a constant that is padded",
        ),
        pytest.param(lambda x, y: jnp.real(x * (2 + 3j)), False, id="product with a complex one"),
        pytest.param(
            lambda x, y: mapped(1, jnp.divide)(x, jnp.full(4, 10.0, x.dtype)), False,
            id="by what enters",
        ),
        pytest.param(
            lambda x, y: y / mapped(1, lambda x, y: (x, jnp.full(4, 0.3)))(x, y)[1], False,
            id="by what comes out",
        ),
        pytest.param(
            lambda x, y: y / jnp.full(4, mapped(1, lambda x, y: (x, jnp.exp(0.3)))(x, y)[1]), False,
            id="by what comes out and is spread",
        ),
        pytest.param(lambda x, y: x / y, True, id="division"),
        pytest.param(lambda x, y: x * y + y, True, id="what a product feeds"),
        pytest.param(lambda x, y: jnp.where(x > 0, x * y, y), True, id="a select"),
        pytest.param(lambda x, y: jnp.maximum(x * y, 0.5), True, id="at least a half"),
        pytest.param(lambda x, y: jnp.maximum(x * y, -jnp.inf), False, id="at least -infinity"),
        pytest.param(lambda x, y: lax.max(-jnp.inf, x * y), False, id="-infinity at least"),
        pytest.param(
            lambda x, y: jnp.maximum(x * y, jnp.log(0.0)), False, id="at least what is -infinity"
        ),
        pytest.param(lambda x, y: jnp.sum(x[:, None] * y, 0), True, id="sum"),
        *(
            pytest.param(lambda x, y, a=a, b=b: lax.clamp(a, x * y, b), is_cut, id=f"{a} to {b}")
            for a, b, is_cut in ((-1.0, 1.0, True), (-np.inf, 1.0, False), (-1.0, np.inf, False))
        ),
        pytest.param(lambda x, y: jnp.sum((x * y)[None], 0), False, id="sum of one"),
        pytest.param(lambda x, y: jnp.sqrt(x), True, id="root"),
        pytest.param(lambda x, y: x, True, id="argument"),
        pytest.param(lambda x, y: jnp.argmax(x * y), True, id="place of the largest"),
        pytest.param(lambda x, y: jnp.dot(x * y, y), True, id="dot"),
        pytest.param(lambda x, y: jnp.dot((x * y)[:, None], y[:1]), False, id="dot with one"),
        pytest.param(lambda x, y: jnp.dot(y[:1], (x * y)[None]), False, id="one dot"),
        pytest.param(
            lambda x, y: lax.dot_general(x * y, y, (((), ()), ((), ()))), True, id="outer product"
        ),
        pytest.param(
            lambda x, y: jnp.einsum("i,j->ij", x, jnp.full(3, 0.3)), False,
            id="outer product by a constant",
        ),
        pytest.param(
            lambda x, y: jnp.einsum("i,ij->j", x, jnp.full((4, 3), 0.3)), True,
            id="dot by a constant",
        ),
        pytest.param(lambda x, y: jnp.einsum("i,i->i", x, y), False, id="product by rows"),
        pytest.param(functools.partial(ragged, 4), True, id="ragged"),
        pytest.param(functools.partial(ragged, 1), False, id="ragged product"),
        *(
            pytest.param(
                lambda x, y, f=f, n=n: f(jnp.tile((x * y)[:, None, None], (1, n, n))), n > 1,
                id=f"{name} of {n} rows",
            )
            for n in (1, 2)
            for name, f in {
                "eigenvalues": lambda a: lax.linalg.eigh(a, symmetrize_input=False)[1],
                "orthogonal factors": lambda a: lax.linalg.qr(a)[1],
                "singular values": lambda a: lax.linalg.svd(a, compute_uv=False)[0],
                "triangular factors": lambda a: lax.linalg.lu(a)[0],
                "solved": lambda a: lax.linalg.triangular_solve(
                    a, jnp.ones_like(a), left_side=True
                ),
            }.items()
        ),
        pytest.param(
            lambda x, y: lax.linalg.triangular_solve(
                jnp.full((4, 1, 1), 0.3), x[:, None, None], left_side=True
            ),
            False, id="solved by a number",
        ),
        pytest.param(convolved(2), True, id="convolution"),
        pytest.param(convolved(1), False, id="convolution with one"),
        pytest.param(
            lambda x, y: by_features(x * y, y[:, None, None]), True, id="convolution of each"
        ),
        *(
            pytest.param(
                lambda x, y, n=n: by_features(x * y, jnp.full((4, 1, n), 0.3)), n > 1,
                id=f"convolution of each by {n} constants",
            )
            for n in (1, 2)
        ),
        *(
            pytest.param(mapped(n, f), n > 1, id=f"{f.__name__} by {n}")
            for n in (1, 2)
            for f in (summed, exchanged)
        ),
        *(
            pytest.param(mapped(2, functools.partial(summed, groups=groups)), among > 1,
                         id=f"summed among {among}")
            for among, groups in ((1, [[0], [1]]), (2, [[0, 1]]))
        ),
        *(
            pytest.param(batched(n, f), n > 1, id=f"{f.__name__} over {n} rows")
            for n in (1, 2)
            for f in (lax.psum, lax.pmax)
        ),
        pytest.param(in_place, False, id="in place"),
        pytest.param(in_a_kernel, True, id="in a compiled kernel"),
        pytest.param(
            lambda x, y: in_a_kernel(x * y, y), True, id="a product in a compiled kernel"
        ),
        pytest.param(
            lambda x, y: lax.custom_linear_solve(lambda v: v / y, x, lambda _, b: b * 0.1),
            False, id="in a solver",
        ),
        *(
            pytest.param(functools.partial(scaled, n, u), is_loop, id=f"loop {n} {u}")
            for n, u, is_loop in (
                (1, 1, False), (2, 1, True), (2, 2, False), (3, 2, False), (4, 2, True),
                (5, 2, False), (2, 0, False),
            )
            if u or jax.__version_info__ >= (0, 8)  # before, loops of no turns are refused
        ),
        *(
            pytest.param(functools.partial(handed_on, n), n < 2, id=f"handed on {n}")
            for n in range(4)
        ),
        *(
            pytest.param(functools.partial(rows_of, f, *given), expected, id=f"rows, {name}")
            for name, f, *given, expected in (
                ("sines", lambda c: (c, jnp.sin(c)), jnp.negative, 2, 2, True),
                ("a last product", lambda c: (c * 0.1, c), jnp.sin, 2, 2, False),
                ("a first product", lambda c: (jnp.sin(c), c), lambda x: x * 0.1, 2, 2, False),
                ("a product left over", lambda c: (jnp.sin(c), c * 0.1), jnp.sin, 5, 2, False),
                ("products in a loop", lambda c: (c * 0.1, c * 0.1), jnp.sin, 4, 2, True),
            )
        ),
        *(
            pytest.param(functools.partial(product_of_rows, *turns), False, id=f"rows by {turns}")
            for turns in ((2, 2), (5, 2))
        ),
        pytest.param(turned(0, lambda c: (jnp.cos(c), c)), False, id="no turn"),
        pytest.param(turned(1, lambda c: (jnp.cos(c), c)), True, id="a turn that ends it"),
        pytest.param(turned(2, lambda c: (jnp.cos(c), c)), True, id="turns that end it"),
        pytest.param(turned(2, lambda c: (jnp.cos(c), c), 1), False, id="of each turn"),
        pytest.param(looping(lambda c: c[0] < 1), False, id="loop once"),
        pytest.param(
            looping(lambda c: (jnp.sum(c[1]), c[0] < 1)[1]), False, id="loop once, and look"
        ),
        pytest.param(
            looping(lambda c: c[0] < 1, lambda y: y), False, id="loop once, by what is there"
        ),
        pytest.param(looping(lambda c: jnp.sum(c[1]) > 9), True, id="loop as numbers are"),
        pytest.param(
            looping(lambda c: (c[0] < 3) & (jnp.sum(c[1]) > 9)), True, id="loop, but not for long"
        ),
        pytest.param(lambda x, y: x + 0.0, True, id="sum with zero"),
        pytest.param(lambda x, y: x * y + 0.0, False, id="product, and zero"),
        pytest.param(lambda x, y: 0.0 + x * y, False, id="zero, and a product"),
        pytest.param(lambda x, y: x * y + jnp.exp(-200.0), False, id="product, and what is zero"),
        pytest.param(lambda x, y: x * 0.1 + y * 0.1, False, id="products by one number"),
        pytest.param(lambda x, y: x * 0.1 + y / 10.0, False, id="product and quotient by one"),
        pytest.param(lambda x, y: x * x[0] + y * x[0], False, id="products by one scalar"),
        pytest.param(
            lambda x, y: x * 0.1 + y * 0.1 + jnp.sin(x) * 0.1, False, id="three of them"
        ),
        pytest.param(
            lambda x, y: x * 0.1 - (y * 0.1 - (jnp.sin(x) * 0.1 + jnp.sin(y) * 0.1)), False,
            id="four, otherwise summed",
        ),
        pytest.param(
            lambda x, y: (x * x[0] + y * x[0]) + jnp.sin(x) * x[0], False, id="three by one scalar"
        ),
        pytest.param(
            lambda x, y: (x * 0.1 + y * 0.1) + jnp.sin(x) * 0.3, True, id="the third by another"
        ),
        pytest.param(
            lambda x, y: (x * 0.1 + y * 0.3) + jnp.sin(x) * 0.1, True, id="the second by another"
        ),
        pytest.param(
            lambda x, y: (x * 0.1 + y * 0.1) * 0.3 + y * 0.3, False, id="a sum of them, times more"
        ),
        pytest.param(
            lambda x, y: lax.cond(x[0] > 0, lambda t: t * 0.1, lambda t: t * 0.1, x) + y * 0.1,
            False, id="one of them in each branch",
        ),
        pytest.param(lambda x, y: x * 0.1 + x * 0.2, False, id="a number, by two constants"),
        pytest.param(lambda x, y: x * y * 0.1 + x * 0.3, True, id="a number, by one array"),
        pytest.param(
            lambda x, y: (0.0 * x + x / 3.0) + y / 3.0, False, id="nothing of it, and a third"
        ),
        pytest.param(
            lambda x, y: x * (jnp.full(4, x[0]) * 0.3) + y * (jnp.full(4, x[0]) * 0.3), False,
            id="products by one spread scalar",
        ),
        pytest.param(lambda x, y: x * 0.1 + y * 0.3, True, id="products by others"),
        pytest.param(lambda x, y: x * y + y * y, True, id="products by one array"),
        pytest.param(lambda x, y: x * 0.5 + y * 0.5, True, id="halves"),
        pytest.param(lambda x, y: jnp.minimum(x * y, x * y), False, id="smaller of one product"),
        pytest.param(lambda x, y: jnp.where(x > 0, x * y, x * y), False, id="product either way"),
        pytest.param(lambda x, y: jnp.where(True, x * y, y), False, id="product for certain"),
        pytest.param(lambda x, y: x + 0.1, False, id="sum with a constant"),
        pytest.param(lambda x, y: 0.3 - x, False, id="difference from a constant"),
        pytest.param(lambda x, y: (-(x + 0.1))[::-1] / 1.0, False, id="such a sum, moved"),
        pytest.param(lambda x, y: (x + 0.1) * 1.0, False, id="such a sum, times one"),
        pytest.param(lambda x, y: -1.0 * (x + 0.1), False, id="minus one times such a sum"),
        pytest.param(lambda x, y: (x + 0.1) * 2.0, True, id="twice such a sum"),
        pytest.param(
            lambda x, y: x + np.arange(4.0, dtype=np.float32), False, id="with a constant array"
        ),
        pytest.param(lambda x, y: x[:0] + np.ones(0, np.float32), False, id="with an empty one"),
        pytest.param(lambda x, y: (x + 0.1) + y, True, id="with more than a constant"),
        pytest.param(lambda x, y: jnp.where(x > 0, x + 0.1, y), True, id="a sum or not"),
        pytest.param(lambda x, y: 1.0 / (x + 0.1), True, id="division by such a sum"),
        pytest.param(lambda x, y: x.astype(jnp.int32) + 1, True, id="count"),
        pytest.param(lambda x, y: (x < y).astype(jnp.int32), True, id="count of flags"),
        *(
            pytest.param(f, name in SUMMED_UP, id=name)
            for name, f in (SUMMED_UP | TAKEN_APART).items()
        ),
    ],
)  # fmt: skip
def test_what_may_be_cut(f, expected):
    assert may_be_cut(last(f, "float32", "float32")) is expected


def test_each_rule_is_asked_for_itself():
    """What is repeated exactly may yet show what is in front of it."""
    negated = last(lambda x: -(x * 0.3), "float32")
    assert is_exact(negated.op)
    assert not may_be_cut(negated)


SEEN_THROUGH = {
    "absolute": jnp.abs,
    "as bits": lambda x: x.view(jnp.int32),
    "behind a barrier": lax.optimization_barrier,
    "complex": lambda x: lax.complex(x, x),
    "complex, its real part": lambda x: lax.real(lax.complex(x, x)),
    "complex, its other part": lambda x: lax.imag(lax.complex(x, x)),
    "converted": lambda x: x.astype(jnp.bfloat16),
    "copied": jnp.copy,
    "exponential": jnp.exp,
    "joined": lambda x: jnp.concatenate([x, x]),
    "logarithm": jnp.log,
    "negated": jnp.negative,
    "padded": lambda x: lax.pad(x, 0.0, [(1, 1, 0)]),
    "reshaped": lambda x: x.reshape(2, 2),
    "reversed": lambda x: x[::-1],
    "rounded": lambda x: lax.reduce_precision(x, 8, 7),
    "sliced": lambda x: lax.slice(x, (0,), (2,)),
    "sliced somewhere": lambda x: lax.dynamic_slice(x, (x[0].astype(jnp.int32),), (2,)),
    "spread": lambda x: lax.broadcast_in_dim(x, (2, 4), (1,)),
    "squeezed": lambda x: lax.squeeze(lax.expand_dims(x, (0,)), (0,)),
    "transposed": lambda x: lax.transpose(lax.expand_dims(x, (0,)), (1, 0)),
    "updated": lambda x: lax.dynamic_update_slice(x, x[:1], (1,)),
    "with no bits": lambda x: x.view(jnp.int32) | 0,
    "with some bits": lambda x: x.view(jnp.int32) ^ 1,
    **{
        f"{f.__name__} of one": lambda x, f=f: f(lax.expand_dims(x, (0,)), 0)
        for f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
    },
}


@pytest.mark.parametrize("name", SEEN_THROUGH)
def test_what_ends_no_chain(name):
    """A factor in front of it may be folded with one behind it, or is erased with it."""
    assert not may_be_cut(last(lambda x, y: SEEN_THROUGH[name](x * y), "float32", "float32"))


COMPUTED = ("absolute", "exponential", "logarithm", "negated", "rounded", "updated", "complex")


@pytest.mark.parametrize("name", [
    name for name in SEEN_THROUGH if not (name.startswith(COMPUTED) or "bits" in name)
])  # fmt: skip
@pytest.mark.parametrize("on_both_sides", [False, True])
def test_products_by_one_number_are_seen_behind_what_moves_them(name, on_both_sides):
    move = SEEN_THROUGH[name]

    def summed(x, y):
        other = move(y * 0.1) if on_both_sides else jnp.broadcast_to(y[0], move(x).shape) * 0.1
        return move(x * 0.1) + other

    assert not may_be_cut(last(summed, "float32", "float32"))


@jax.custom_batching.custom_vmap
def hidden(x):
    return x * 0.1


hidden.def_vmap(lambda size, batched, x: (hidden(x), batched[0]))


@pytest.mark.parametrize("other", [hidden, lambda y: y * 0.1])
def test_sums_of_what_a_body_hides_may_be_products_by_one_number(other):
    assert not may_be_cut(last(lambda x, y: hidden(x) + other(y), "float32", "float32"))
    assert may_be_cut(last(lambda x, y: hidden(x) + y, "float32", "float32"))


def flat(x, y):
    """Four arrays of four elements: of one it is a product by a constant that is of interest."""
    return jnp.concatenate([x, jnp.sin(y) * 0.3, x * 0.1, y])


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (lambda flat: flat[:4], True),
        (lambda flat: flat[4:8], True),
        (lambda flat: flat[7:11], False),
        (lambda flat: flat[8:12], False),
        (lambda flat: flat[11:15], False),
        (lambda flat: flat[12:], True),
        (lambda flat: jnp.split(flat, 4)[1], True),
        (lambda flat: jnp.split(flat, 4)[2], False),
        (lambda flat: jnp.split(flat.reshape(4, 4), 4)[0][0], False),
    ],
)
def test_of_a_flat_vector_a_part_is_what_it_was_joined_of(part, expected):
    """Of others nothing is in it: their factors are of no interest."""
    assert (
        may_be_cut(last(lambda x, y: part(flat(x, y)) + y * 0.1, "float32", "float32")) is expected
    )


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x, y: jnp.sqrt(x) * -jnp.exp(y), True),
        (lambda x, y: jnp.square(jnp.sqrt(x)), True),
        (lambda x, y: jnp.sqrt(x) * y, False),
        (lambda x, y: jnp.tanh(x) * jnp.tanh(y), False),
        (lambda x, y: jnp.sqrt(x) + jnp.sqrt(y), False),
        (lambda x, y: jnp.maximum(jnp.tanh(x), jnp.tanh(y)), True),
        (lambda x, y: jnp.minimum(lax.erf(x), -lax.erf(y)), True),
        (lambda x, y: jnp.maximum(jnp.tanh(x), y), False),
        (lambda x, y: jnp.maximum(jnp.sin(x), jnp.sin(y)), False),
    ],
)
def test_roots_exponentials_and_rising_functions_that_may_become_one(f, expected):
    assert melts(last(f, "float32", "float32").op) is expected


@pytest.mark.parametrize("f", [lax.sqrt, lax.rsqrt, lax.exp, lax.exp2, lambda x: lax.pow(x, 0.3)])
def test_of_the_product_of_two_a_compiler_may_make_one(f):
    assert melts(last(lambda x, y: f(x) * f(y), "float32", "float32").op)


@pytest.mark.parametrize(
    "f",
    [
        *(lax.sqrt, lax.cbrt, lax.exp, lax.exp2, lax.expm1),
        *(lax.log, lax.log1p, lax.tanh, lax.logistic, lax.erf),
    ],
)
def test_of_the_larger_of_two_a_compiler_may_make_one_of_the_larger(f):
    assert melts(last(lambda x, y: lax.max(f(x), f(y)), "float32", "float32").op)


def test_parts_that_are_squared_again_and_again_are_looked_at_once():
    def powers(x, y):
        pair = jnp.stack([x, y])
        for _ in range(60):
            pair = pair * pair
        return jnp.sum(pair, 0)

    is_cut = may_be_cut(last(powers, "float32", "float32"))  # not within `assert`: it is deep
    assert not is_cut


def test_what_is_squared_again_and_again_is_looked_at_once():
    def powers(x, y):
        for _ in range(60):
            x, y = x * x, jnp.maximum(y, y)
        return x * 0.9 + (x * y) * 0.1

    assert not is_exact(last(powers, "float32", "float32").op)


@pytest.mark.parametrize("again", [lambda x: x + 0.0, lambda x: jnp.maximum(x, x)])
def test_a_factor_may_be_anything_for_long(again):
    """What nothing is done to, again and again, is a row that is spread, or is not."""

    def by(q):
        def product(x, y):
            factor = q(x, y)
            for _ in range(1_000):
                factor = again(factor)
            return (x * 0.9) * factor

        return product

    rows = by(lambda x, y: jnp.broadcast_to(jnp.sum(y), x.shape))
    assert not is_exact(last(rows, "float32", "float32").op)
    assert is_exact(last(by(lambda x, y: jnp.sin(y)), "float32", "float32").op)
