"""Expressions of a compiled program, worked out with NumPy.

Elementwise operations and what moves elements are worked out, each rounded by itself as IEEE 754
says. What else a program does (matrix products, reductions, loops, kernels of the vendor's) is not:
its results are drawn at random, the same ones wherever the same is done with the same numbers.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from bench.compiled.expressions import BITCAST, CHOICE, Expression, Expressions
from bench.compiled.hlo import Shape, numbers

_DTYPES: Mapping[str, Any] = {
    "pred": np.bool_, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32,
    "f64": np.float64, **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"u{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
}  # fmt: skip
_FLOATS = ("bf16", "f16", "f32", "f64")
_COMPARE: Mapping[str, Callable[..., Any]] = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater,
    "GE": np.greater_equal,
}  # fmt: skip
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# What only floats have here: quotients and powers of integers round otherwise than NumPy's.
_OF_FLOATS: Mapping[str, Callable[..., Any]] = {
    "divide": np.divide, "power": np.power, "sqrt": np.sqrt, "cbrt": np.cbrt,
    "exponential": np.exp, "exponential-minus-one": np.expm1, "log": np.log,
    "log-plus-one": np.log1p, "tanh": np.tanh, "sine": np.sin, "cosine": np.cos,
    "floor": np.floor, "ceil": np.ceil, "round-nearest-even": np.rint, "is-finite": np.isfinite,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "logistic": lambda x: x.dtype.type(1) / (x.dtype.type(1) + np.exp(-x)),
}  # fmt: skip
_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "negate": np.negative, "abs": np.abs, "sign": np.sign,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shift-left": np.left_shift, "shift-right-arithmetic": np.right_shift,
    "shift-right-logical": lambda x, n: (
        x.view(_UNSIGNED[x.itemsize]) >> n.view(_UNSIGNED[n.itemsize])
    ).view(x.dtype),
    "select": np.where, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    CHOICE: lambda index, *branches: branches[
        # Of a predicate the first branch is the true one.
        (not index) if index.dtype == np.bool_ else min(max(int(index), 0), len(branches) - 1)
    ],
}  # fmt: skip


class Numbers:
    """What expressions are, of given arguments.

    Args:
      expressions: Of a program, or of several.
      arguments: Arrays, by the numbers of the parameters.
      seed: Of what is drawn.

    Attributes:
      met: Opcodes of all expressions that were worked out or drawn.
    """

    def __init__(
        self, expressions: Expressions, arguments: Mapping[int, np.ndarray], seed: int = 0
    ):
        self._expressions, self._seed = expressions, seed
        self._known = dict(arguments)
        self.met: set[str] = set()

    def __getitem__(self, number: int) -> np.ndarray:
        """The array that an expression is."""
        stack = [number]
        while stack:
            n = stack[-1]
            if n in self._known:
                stack.pop()
                continue
            expression = self._expressions[n]
            if todo := [o for o in expression.operands if o not in self._known]:
                stack.extend(todo)
                continue
            self.met.add(expression.opcode)
            work_out = _working_out(expression, self._expressions)
            result = self._result(expression, work_out) if work_out else self._draw(expression)
            self._known[n] = result
        return self._known[number]

    def _result(self, expression: Expression, work_out: Callable[..., Any]) -> np.ndarray:
        with np.errstate(all="ignore"):
            result = np.asarray(work_out(*(self._known[o] for o in expression.operands)))
        assert isinstance(expression.shape, Shape)
        assert result.shape == expression.shape.dims, expression
        return result.astype(_DTYPES[expression.shape.dtype], copy=False)

    def _draw(self, expression: Expression) -> np.ndarray:
        shape = expression.shape
        done = repr((self._seed, expression.opcode, shape, expression.attributes))
        digest = hashlib.blake2b(done.encode())
        for operand in expression.operands:
            digest.update(np.ascontiguousarray(self._known[operand]).tobytes())
        if not isinstance(shape, Shape) or shape.dtype not in _DTYPES:
            return np.frombuffer(digest.digest(), np.uint8)  # for what is taken out of it
        rng = np.random.default_rng(list(digest.digest()))
        if shape.dtype in _FLOATS:
            return rng.standard_normal(shape.dims).astype(_DTYPES[shape.dtype])
        return rng.integers(0, 2, shape.dims).astype(_DTYPES[shape.dtype])


def _working_out(e: Expression, expressions: Expressions) -> Callable[..., Any] | None:
    """How an expression is worked out of its operands; `None` if it is drawn."""
    if not isinstance(e.shape, Shape) or e.shape.dtype not in _DTYPES:
        return None
    shape, attributes = e.shape, dict(e.attributes)
    if e.opcode in _ELEMENTWISE:
        return _ELEMENTWISE[e.opcode]
    if e.opcode in _OF_FLOATS:
        given = expressions[e.operands[0]].shape
        is_float = isinstance(given, Shape) and given.dtype in _FLOATS
        return _OF_FLOATS[e.opcode] if is_float else None
    if e.opcode == "compare":
        return _COMPARE[attributes["direction"]]
    if e.opcode == "constant":
        return _constant(attributes["value"], shape)
    if e.opcode == BITCAST:
        return _bitcast(expressions[e.operands[0]].shape, shape, attributes[BITCAST])
    move = _MOVES.get(e.opcode)
    return move and move(attributes, shape)


def _constant(text: str, shape: Shape) -> Callable[[], np.ndarray] | None:
    if shape.dims:
        return None
    words: Mapping[str, Any] = {"true": True, "false": False}
    read = float if shape.dtype in _FLOATS else int
    value = words[text] if text in words else read(text)
    return lambda: np.asarray(value, _DTYPES[shape.dtype])


def _bitcast(old: Any, new: Shape, orders: str) -> Callable[..., Any] | None:
    if not isinstance(old, Shape) or old.dtype != new.dtype:
        return None
    if math.prod(old.dims) != math.prod(new.dims):
        return None  # of tiles, on a TPU
    was, becomes = (numbers(order)[::-1] for order in orders.split(" "))  # outermost first
    sizes = [new.dims[d] for d in becomes]
    back = tuple(becomes.index(d) for d in range(len(becomes)))
    return lambda x: x.transpose(was).reshape(sizes).transpose(back)


def _converted(x: np.ndarray, shape: Shape) -> np.ndarray:
    """In another type; what does not fit into an integer is the nearest, and NaN is zero."""
    dtype = np.dtype(_DTYPES[shape.dtype])
    if dtype.kind not in "iu" or x.dtype.kind in "iub":
        return x.astype(dtype)
    limits = np.iinfo(dtype)
    wide = np.nan_to_num(x.astype(np.float64), posinf=np.inf, neginf=-np.inf)
    fits = (wide > limits.min) & (wide < limits.max)
    edge = np.where(wide > 0, limits.max, limits.min).astype(dtype)
    return np.where(fits, np.where(fits, wide, 0).astype(dtype), edge)


def _broadcast(attributes: Mapping[str, str], shape: Shape) -> Callable[..., Any]:
    kept = numbers(attributes["dimensions"])

    def spread(x: np.ndarray) -> np.ndarray:
        sizes = [1] * len(shape.dims)
        for size, d in zip(x.shape, kept, strict=True):
            sizes[d] = size
        return np.broadcast_to(x.reshape(sizes), shape.dims)

    return spread


def _iota(attributes: Mapping[str, str], shape: Shape) -> Callable[[], np.ndarray]:
    along = int(attributes["iota_dimension"])
    sizes = [n if d == along else 1 for d, n in enumerate(shape.dims)]
    return lambda: np.broadcast_to(np.arange(shape.dims[along]).reshape(sizes), shape.dims)


def _slice(attributes: Mapping[str, str], shape: Shape) -> Callable[..., Any]:
    ranges: Iterable[Any] = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", attributes["slice"])
    parts = tuple(slice(int(a), int(b), int(step or 1)) for a, b, step in ranges)
    return lambda x: x[parts]


_MOVES: Mapping[str, Callable[[Mapping[str, str], Shape], Callable[..., Any]]] = {
    "broadcast": _broadcast,
    "iota": _iota,
    "slice": _slice,
    "reshape": lambda _, shape: lambda x: x.reshape(shape.dims),
    "transpose": lambda attributes, _: lambda x: x.transpose(numbers(attributes["dimensions"])),
    "reverse": lambda attributes, _: lambda x: np.flip(x, numbers(attributes["dimensions"])),
    "convert": lambda _, shape: lambda x: _converted(x, shape),
    "concatenate": lambda attributes, _: (
        lambda *parts: np.concatenate(parts, int(attributes["dimensions"].strip("{}")))
    ),
    "bitcast-convert": lambda _, shape: lambda x: x.view(_DTYPES[shape.dtype]),
}
