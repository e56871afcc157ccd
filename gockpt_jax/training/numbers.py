"""What number a value is to a compiler, and which values may be one.

A compiler finds that two values are one once it has rewritten both, by rules that are many, and
others in its next version: it turns `x - 0.1` into `x + -0.1`, orders operands, drops a `max` that
is taken twice. None of them changes what is computed. So values are worked out here, of arguments
drawn at random: those that a compiler may take for one are one number, however they are written
and however deep that is. What is not elementwise gives any numbers, the same wherever it is made of
the same arguments: a sum of sums is the sum of all, and a product with itself a sum of squares.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.values import (
    IDENTITIES,
    SUMS,
    Op,
    Value,
    is_known,
    names,
    unspread,
    without_walls,
)

_PRECISION = 1e-6
_ANY = np.full(32, np.nan)
"""The numbers of what may be one with anything."""
# Of one array, the same numbers: elsewhere, or in another type.
_MOVES = IDENTITIES | names(
    """broadcast_in_dim convert_element_type reduce_precision optimization_barrier reshape
    transpose squeeze expand_dims rev tile reshard"""
)
# Of one array some numbers, and maybe others: as the parameters are, all and no others.
_PICKS = names("bitcast_convert_type pad slice split unstack dynamic_slice gather")
# Of several arrays. What is picked out of those is one of them, and the compiler finds which.
_JOINS = names("concatenate stack dynamic_update_slice scatter")
_REDUCTIONS = names("reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or")


def _chosen(which: Any, *cases: Any) -> Any:
    chosen = cases[0]
    for n, case in enumerate(cases):
        chosen = np.where(which >= n, case, chosen)
    return chosen


# Of constants every compiler works these out on the host, rounded as IEEE 754 says.
_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "max": np.maximum, "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high), "square": np.square,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
    "select_n": _chosen, "choice": _chosen,
}  # fmt: skip
# Rounded by each machine in its own way, or of flags; what is made of bits may be one.
_OTHERS: Mapping[str, Callable[..., Any]] = {
    "sqrt": np.sqrt, "rsqrt": lambda x: 1.0 / np.sqrt(x), "cbrt": np.cbrt, "pow": np.power,
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p,
    "tanh": np.tanh, "logistic": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
}  # fmt: skip


def may_be_one(a: Value, b: Value) -> bool:
    """Whether a compiler may find that two values are one."""
    one, other = number_of(a), number_of(b)
    if _is_secret(one) or _is_secret(other):
        return is_known(unspread(a)) and is_known(unspread(b))
    with np.errstate(all="ignore"):  # of what is no number nothing is known: it may be any
        is_other = np.abs(one * 1.0 - other) > _PRECISION * np.abs(other * 1.0)
    return not np.any(is_other)


def may_be(value: Value, holds: Callable[[Any], Any]) -> bool:
    """Whether something holds for a constant; of some folded ones the compiler alone knows that."""
    if not is_known(unspread(value)):
        return False
    number = number_of(value)
    return _is_secret(number) or bool(np.all(holds(number)))


def is_power_of_two(value: Value) -> bool:
    """Whether a value is a constant power of two, far from where products underflow."""
    if not is_known(unspread(value)):
        return False
    mantissa, exponent = np.frexp(np.abs(number_of(value)))
    return bool(np.all((mantissa == 0.5) & (np.abs(exponent) < 120)))


def reciprocal(divisor: Value) -> Value:
    """What a compiler multiplies by, where it is told to divide by a constant."""
    with np.errstate(all="ignore"):
        return Value(divisor.aval, is_folded=True, number=1.0 / number_of(divisor))


def may_be_all_of(op: Op) -> Sequence[Value]:
    """Values of which one may be all that an operation gives, so that a compiler erases it."""
    inputs = op.inputs
    if op.name in SUMS:  # what is taken off zero is only negated
        pairs = (inputs, inputs[::-1])
        return [x for x, y in pairs if may_be(y, lambda number: number == 0)]
    if op.name in ("max", "min"):
        is_one = may_be_one(*inputs) or any(may_be(v, np.isinf) for v in inputs)
        return inputs if is_one else ()
    if op.name == "select_n":
        cases = inputs[1:]
        is_one = all(may_be_one(cases[0], case) for case in cases)
        return cases if is_one or may_be(inputs[0], lambda _: True) else ()
    inner = inputs[0].op if op.name == "neg" else None
    return inner.inputs if inner is not None and inner.name == "neg" else ()


def number_of(value: Value) -> Any:
    """What a value is: of arguments drawn at random, but of constants the number that they are.

    Returns:
      Some numbers; one for a constant, NaN if the compiler alone knows it.
    """
    value = without_walls(value)
    stack = [value]
    while stack:
        made = stack[-1]
        inputs = [without_walls(v) for v in (made.op.inputs if made.op else ())]
        if todo := [v for v in inputs if v.number is None]:
            stack.extend(todo)
            continue
        if made.number is None:
            with np.errstate(all="ignore"):
                made.number = _worked_out(made, [v.number for v in inputs])
        stack.pop()
    return value.number


def _worked_out(value: Value, given: Sequence[Any]) -> Any:
    op = value.op
    if value.is_constant:
        return _of_constant(value)
    if op is None:
        return _drawn(value, value.index)
    if value.is_folded:
        return _folded(value, op, given)
    moved, work_out = _moved(value, op), _elementwise(op)
    if moved is not None:
        number = _ANY if op.name in _PICKS and _is_joined(moved) else 1.0 * number_of(moved)
        return number != 0 if value.dtype == jnp.bool_ and not _is_any(number) else number
    if work_out and any(map(_is_any, given)):
        return _ANY
    if work_out and np.any(np.isfinite(number := work_out(*given))):  # else nobody can compare it
        return number
    return _drawn(value, "of", value.arguments)


def _moved(value: Value, op: Op) -> Value | None:
    """The array of which a value has the same numbers, if that is known."""
    is_reduced = op.name in _REDUCTIONS
    if is_reduced and all(op.inputs[0].shape[axis] == 1 for axis in op.params["axes"]):
        return op.inputs[0]
    is_moved = op.name in _MOVES | _PICKS
    return op.inputs[min(value.index, len(op.inputs) - 1)] if is_moved else None


def _is_joined(value: Value) -> bool:
    """Whether a value is an array that was put together of others, or a part of one."""
    value = without_walls(value)
    while (op := value.op) is not None and op.name not in _JOINS:
        if (moved := _moved(value, op)) is None:
            return False
        value = without_walls(moved)
    return op is not None


def _elementwise(op: Op) -> Callable[..., Any] | None:
    if op.name == "integer_pow":
        return lambda x: x ** op.params["y"]
    return _ELEMENTWISE.get(op.name) or _OTHERS.get(op.name)


def _folded(value: Value, op: Op, given: Sequence[Any]) -> Any:
    """What is made of constants, rounded after each operation as the compiler does."""
    work_out = np.sqrt if op.name == "sqrt" else _ELEMENTWISE.get(op.name)
    is_told = (work_out or op.name in _MOVES) and _is_numeric(value)
    if not is_told or any(np.ndim(x) or np.float32(x) != x for x in given):
        return np.nan
    typed = [np.asarray(x, v.dtype) for x, v in zip(given, op.inputs, strict=True)]
    number = np.asarray(work_out(*typed) if work_out else typed[0])
    return np.float64(number.astype(value.dtype))


def _of_constant(value: Value) -> Any:
    """The number of a constant, if it is one; some that are drawn, if it has several."""
    if not _is_numeric(value):
        return np.nan
    numbers = np.asarray(value.constant, value.dtype)
    if not np.iscomplexobj(numbers) and numbers.size and np.all(numbers == numbers.flat[0]):
        return np.float64(numbers.flat[0])
    return _drawn(value, numbers.tobytes())


def _is_numeric(value: Value) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.number) or value.dtype == jnp.bool_)


def _is_secret(number: Any) -> bool:
    return not np.ndim(number) and bool(np.isnan(number))


def _is_any(number: Any) -> bool:
    return bool(np.ndim(number) and np.all(np.isnan(number)))


def _drawn(value: Value, *what: Any) -> Any:
    """Many numbers of either sign, large and small, the same of the same in every process."""
    digest = hashlib.blake2b(repr(what).encode()).digest()
    bits = np.frombuffer(digest, "<u2")
    numbers = np.where(bits & 1, 1, -1) * 10.0 ** (bits / 2.0**14 - 2.0)
    return numbers > 0 if value.dtype == jnp.bool_ else numbers
