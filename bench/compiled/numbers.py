"""Expressions of a compiled program, worked out with NumPy for all devices that run it.

Elementwise operations and what moves elements are worked out, each rounded by itself as IEEE 754
says. What else a program does (matrix products, reductions, loops, kernels of the vendor's) is not:
its results are drawn at random, the same ones wherever the same is done with the same numbers.
"""

import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from bench.compiled.collectives import COLLECTIVES, exchanged
from bench.compiled.expressions import BITCAST, CHOICE, Expression, Expressions
from bench.compiled.hlo import Shape, numbers
from bench.compiled.zeros import maximum, minimum, sign

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
# Of integers: quotients are cut, not rounded down as NumPy's. By zero it is another number.
_OF_INTEGERS: Mapping[str, Callable[..., Any]] = {
    "divide": lambda x, y: (x - np.fmod(x, y)) // y, "remainder": np.fmod,
}  # fmt: skip
# What only floats have here: powers of integers are others than NumPy's.
_OF_FLOATS: Mapping[str, Callable[..., Any]] = {
    "divide": np.divide, "power": np.power, "sqrt": np.sqrt, "cbrt": np.cbrt,
    "exponential": np.exp, "exponential-minus-one": np.expm1, "log": np.log,
    "log-plus-one": np.log1p, "tanh": np.tanh, "sine": np.sin, "cosine": np.cos,
    "floor": np.floor, "ceil": np.ceil, "round-nearest-even": np.rint, "is-finite": np.isfinite,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "logistic": lambda x: x.dtype.type(1) / (x.dtype.type(1) + np.exp(-x)),
}  # fmt: skip
_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": maximum,
    "minimum": minimum, "negate": np.negative, "abs": np.abs, "sign": sign,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shift-left": np.left_shift, "shift-right-arithmetic": np.right_shift,
    "shift-right-logical": lambda x, n: (
        x.view(_UNSIGNED[x.itemsize]) >> n.view(_UNSIGNED[n.itemsize])
    ).view(x.dtype),
    "select": np.where, "clamp": lambda low, x, high: minimum(maximum(x, low), high),
    CHOICE: lambda index, *branches: branches[
        # Of a predicate the first branch is the true one.
        (not index) if index.dtype == np.bool_ else min(max(int(index), 0), len(branches) - 1)
    ],
}  # fmt: skip


class Numbers:
    """What expressions are, of given arguments.

    Args:
      expressions: Of a program, or of several.
      arguments: The parts of arrays that each partition has, by the numbers of the parameters.
      seed: Of what is drawn.

    Attributes:
      met: Opcodes of all expressions that were worked out or drawn.
    """

    def __init__(
        self, expressions: Expressions, arguments: Mapping[int, Sequence[np.ndarray]], seed: int = 0
    ):
        self._expressions, self._seed = expressions, seed
        self._partitions = len(next(iter(arguments.values())))
        self._known = dict(arguments)
        self.met: set[str] = set()

    def __getitem__(self, number: int) -> Sequence[np.ndarray]:
        """The array that an expression is, on each partition."""
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
            self._known[n] = self._result(expression)
        return self._known[number]

    def _result(self, e: Expression) -> Sequence[np.ndarray]:
        operands = [[self._known[o][i] for o in e.operands] for i in range(self._partitions)]
        if isinstance(e.shape, Shape):
            summed = functools.partial(self._summed, e)
            got = exchanged(e.opcode, dict(e.attributes), operands, summed)
            if got is not None:
                return [_checked(x, e) for x in got]
        work_out = _working_out(e, self._expressions)
        if work_out is not None:
            with np.errstate(all="ignore"):
                return [_checked(work_out(*arrays), e) for arrays in operands]
        if any(collective in text for _, text in e.attributes for collective in COLLECTIVES):
            return [self._draw(e, [x for arrays in operands for x in arrays])] * self._partitions
        return [self._draw(e, arrays) for arrays in operands]

    def _draw(self, e: Expression, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Of what all the arrays are."""
        digest = self._digest(e, e.shape)
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        if not isinstance(e.shape, Shape) or e.shape.dtype not in _DTYPES:
            return np.frombuffer(digest.digest(), np.uint8)  # for what is taken out of it
        rng = np.random.default_rng(list(digest.digest()))
        if e.shape.dtype in _FLOATS:
            return rng.standard_normal(e.shape.dims).astype(_DTYPES[e.shape.dtype])
        return rng.integers(0, 2, e.shape.dims).astype(_DTYPES[e.shape.dtype])

    def _summed(self, e: Expression, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Each element of what the arrays have in its place: many sums may travel as one.

        Where all but one have zero it is that one's: so a TPU gathers, now and then.
        """
        elements = np.stack(arrays)
        is_one = np.count_nonzero(elements, axis=0) <= 1
        mixed = np.frombuffer(self._digest(e).digest(), np.uint64)[0]
        with np.errstate(over="ignore"):
            for array in arrays:
                bits = array.view(_UNSIGNED[array.itemsize])
                mixed = (mixed ^ bits.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
                mixed ^= mixed >> np.uint64(29)
        dtype = elements.dtype
        drawn = mixed >> np.uint64(63) if dtype.kind in "biu" else mixed / 2.0**62 - 2.0
        return np.where(is_one, elements.sum(axis=0).astype(dtype), drawn.astype(dtype))

    def _digest(self, e: Expression, *more: Any) -> Any:
        done = repr((self._seed, e.opcode, e.attributes, *more))
        return hashlib.blake2b(done.encode())


def _checked(result: Any, e: Expression) -> np.ndarray:
    array = np.asarray(result)
    assert isinstance(e.shape, Shape)
    assert array.shape == e.shape.dims, e
    return array.astype(_DTYPES[e.shape.dtype], copy=False)


def _working_out(e: Expression, expressions: Expressions) -> Callable[..., Any] | None:
    """How an expression is worked out of its operands; `None` if it is drawn."""
    if not isinstance(e.shape, Shape) or e.shape.dtype not in _DTYPES:
        return None
    shape, attributes = e.shape, dict(e.attributes)
    if e.opcode in _ELEMENTWISE:
        return _ELEMENTWISE[e.opcode]
    if e.opcode in _OF_FLOATS | _OF_INTEGERS:
        given = expressions[e.operands[0]].shape
        is_float = isinstance(given, Shape) and given.dtype in _FLOATS
        return (_OF_FLOATS if is_float else _OF_INTEGERS).get(e.opcode)
    if e.opcode == "compare":
        return _COMPARE[attributes["direction"]]
    if e.opcode == "constant":
        return _constant(attributes["value"], shape)
    if e.opcode == BITCAST:
        return _bitcast(expressions[e.operands[0]].shape, shape, attributes[BITCAST])
    if e.opcode == "reduce":
        given = expressions[e.operands[0]].shape
        is_move = isinstance(given, Shape) and math.prod(given.dims) == math.prod(shape.dims)
        return (lambda x, _: x.reshape(shape.dims)) if is_move else None  # along ones
    move = _MOVES.get(e.opcode)
    return move and move(attributes, shape)


def _constant(text: str, shape: Shape) -> Callable[[], np.ndarray] | None:
    listed = re.findall(r"[^\s{},]+", text)
    if len(listed) != math.prod(shape.dims):
        return None  # of a large one not all elements are shown
    words: Mapping[str, Any] = {"true": True, "false": False}
    read = float if shape.dtype in _FLOATS else int
    values = [words[word] if word in words else read(word) for word in listed]
    return lambda: np.asarray(values, _DTYPES[shape.dtype]).reshape(shape.dims)


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


def _dynamic_slice(_: Mapping[str, str], shape: Shape) -> Callable[..., Any]:
    def part(x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
        return x[_where(x, starts, shape.dims)]

    return part


def _updated_slice(_: Mapping[str, str], __: Shape) -> Callable[..., Any]:
    def updated(x: np.ndarray, part: np.ndarray, *starts: np.ndarray) -> np.ndarray:
        result = x.copy()
        result[_where(x, starts, part.shape)] = part
        return result

    return updated


def _where(x: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Where a part of an array is: as a whole inside it, wherever it was asked to start."""
    begins = (
        min(max(int(start), 0), whole - size)
        for start, whole, size in zip(starts, x.shape, sizes, strict=True)
    )
    return tuple(slice(a, a + size) for a, size in zip(begins, sizes, strict=True))


def _padded(attributes: Mapping[str, str], shape: Shape) -> Callable[..., Any]:
    widths = [[int(n) for n in d.split("_")] for d in attributes["padding"].split("x") if d]

    def padded(x: np.ndarray, value: np.ndarray) -> np.ndarray:
        result = np.full(shape.dims, value, x.dtype)
        into, of = [], []
        for size, whole, (low, _, *between) in zip(x.shape, shape.dims, widths, strict=True):
            step = 1 + (between[0] if between else 0)
            kept = [n for n in range(size) if 0 <= low + step * n < whole]  # it may cut, too
            into.append([low + step * n for n in kept])
            of.append(kept)
        result[np.ix_(*into)] = x[np.ix_(*of)]
        return result

    return padded


_MOVES: Mapping[str, Callable[[Mapping[str, str], Shape], Callable[..., Any]]] = {
    "broadcast": _broadcast,
    "iota": _iota,
    "slice": _slice,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _updated_slice,
    "pad": _padded,
    "reshape": lambda _, shape: lambda x: x.reshape(shape.dims),
    "transpose": lambda attributes, _: lambda x: x.transpose(numbers(attributes["dimensions"])),
    "reverse": lambda attributes, _: lambda x: np.flip(x, numbers(attributes["dimensions"])),
    "convert": lambda _, shape: lambda x: _converted(x, shape),
    "concatenate": lambda attributes, _: (
        lambda *parts: np.concatenate(parts, int(attributes["dimensions"].strip("{}")))
    ),
    "bitcast-convert": lambda _, shape: lambda x: x.view(_DTYPES[shape.dtype]),
}
