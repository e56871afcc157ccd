"""Which numbers a compiler knows, and which it may find to be one: by what they are (`drawn`)."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.drawn import Number, is_secret, worked_out
from gockpt_jax.training.primitives import COMPARISONS, SCALES, SUMS
from gockpt_jax.training.values import (
    Op,
    Ratio,
    Value,
    is_known,
    num_devices,
    unspread,
    unspread_through_walls,
)

_PRECISION = 1e-6


def may_be_equal(a: Value, b: Value, per_a: Ratio = 1, per_b: Ratio = 1) -> bool:
    """Whether a compiler may find that two values are equal.

    Args:
      a: The first.
      b: The second.
      per_a: How many elements are beside the first what is one where both are used.
      per_b: Likewise, beside the second.
    """
    first, second = worked_out(a), worked_out(b)
    one, other = first.drawn, second.drawn
    if is_secret(one) or is_secret(other):
        return is_known(a) and is_known(b)
    alike = (first.far or second.far) and _size(a, per_a) == _size(b, per_b)
    may_be_other = alike and (first.may_equal(second) or second.may_equal(first))
    if may_be_other and not (_is_multiple(a, b) or _is_multiple(b, a)):
        return True
    x, y = (float(numbers[0] if np.ndim(numbers) else numbers) for numbers in (one, other))
    if abs(x - y) > _PRECISION * abs(y):  # as a rule, and quickly
        return False
    with np.errstate(all="ignore"):  # of what is no number nothing is known: it may be any
        is_other = np.abs(one * 1.0 - other) > _PRECISION * np.abs(other * 1.0)
    return not np.any(is_other)


def _size(value: Value, per: Ratio) -> Ratio:
    """How many elements it is, where it is used, that a value was spread from."""
    value, per = unspread_through_walls(value, per)
    return Fraction(value.size) / per if per else 0


def _is_multiple(value: Value, other: Value) -> bool:
    """Whether a value is another, times or over something: whether that is one, its numbers tell.

    So is a gradient that is clipped, whose norm is of all that it is itself made of.
    """
    wanted, stack, seen = unspread(other), [value], set[Value]()
    while stack:
        value = unspread(stack.pop())
        if value is wanted:
            return True
        if (op := value.op) is not None and value not in seen and op.name in SCALES:
            seen.add(value)
            stack.extend(op.inputs[:1] if op.name == "div" else op.inputs)
    return False


def may_hold(value: Value, holds: Callable[[Any], Any]) -> bool:
    """Whether something holds for a constant; of some folded ones the compiler alone knows that."""
    if not is_known(value):
        return False
    number = number_of(value)
    return is_secret(number) or bool(np.all(holds(number)))


def may_be_zero(value: Value) -> bool:
    """Whether it may be a constant zero."""
    return may_hold(value, lambda number: number == 0)


def may_be_one(value: Value) -> bool:
    """Whether it may be a constant one, of either sign."""
    return may_hold(value, lambda number: abs(number) == 1)


def is_power_of_two(value: Value) -> bool:
    """Whether a value is a constant power of two, far from where products underflow."""
    if not is_known(value):
        return False
    mantissa, exponent = np.frexp(np.abs(number_of(value)))
    return bool(np.all((mantissa == 0.5) & (np.abs(exponent) < 120)))


def reciprocal(divisor: Value) -> Value:
    """What a compiler multiplies by, where it is told to divide by a constant."""
    with np.errstate(all="ignore"):
        return Value(divisor.aval, is_folded=True, number=Number(1.0 / number_of(divisor)))


def may_be_all_of(op: Op) -> Sequence[Value]:
    """Values of which one may be all that an operation gives, so that a compiler erases it."""
    inputs = op.inputs
    if op.name in SUMS:  # what is taken off zero is only negated
        pairs = (inputs, inputs[::-1])
        return [x for x, y in pairs if may_be_zero(y)]
    if op.name in ("max", "min"):
        is_either = may_be_equal(inputs[0], inputs[1]) or any(may_hold(v, np.isinf) for v in inputs)
        return inputs if is_either else ()
    if op.name == "integer_pow":
        return inputs if op.params["y"] == 1 else ()
    if op.name == "select_n":
        is_open = not _are_equal(inputs[1:]) and not may_hold(inputs[0], lambda _: True)
        return () if is_open else inputs[1:]
    inner = inputs[0].op if op.name == "neg" else None
    return inner.inputs if inner is not None and inner.name == "neg" else ()


def _are_equal(cases: Sequence[Value]) -> bool:
    return all(may_be_equal(cases[0], case) for case in cases)


def number_of(value: Value) -> Any:
    """What a value is: of arguments drawn at random, but of constants the number that they are.

    Returns:
      Some numbers; one for a constant, NaN if the compiler alone knows it.
    """
    return worked_out(value).drawn


def is_settled(aval: Any, op: Op) -> bool:
    """Whether a compiler may know what an operation gives, though not all that it is given.

    It erases a choice by such a flag, and then sees what is in front of it together with what is
    behind: `step % 1 == 0` of an interval that happens to be one, `ids >= 0` of unsigned numbers,
    `late | True`, `stage == 0` of one stage. Comparisons of floats it leaves alone, which may be no
    numbers (NaN), but for those of an exponential, say, with zero. To take a flag for settled that
    is not only makes leaves late.

    Args:
      aval: Of what it gives.
      op: The operation.
    """
    dtype = getattr(aval, "dtype", None)
    if op.name == "axis_index":
        return num_devices(aval, op.params["axis_name"]) in (1, None)
    if op.name in ("dynamic_slice", "gather"):  # of a table whose rows are all the same
        return is_known(op.inputs[0]) and not np.ndim(number_of(op.inputs[0]))
    if dtype is None or not op.inputs:
        return False
    if op.name in ("pow", "integer_pow"):  # to the power of nothing all is one
        return op.params.get("y") == 0 or any(map(may_be_zero, op.inputs[1:]))
    if op.name in ("dynamic_update_slice", "scatter"):  # over all that was there
        update = op.inputs[1 if op.name == "dynamic_update_slice" else 2]
        return update.size == op.inputs[0].size and is_known(update)
    if not any(v.size for v in op.inputs):  # the sum of nothing
        return True
    if op.name in ("select_n", "choice"):
        return _is_known_choice(*op.inputs)
    if op.name in COMPARISONS:
        return _is_settled_comparison(aval, op)
    is_whole = dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)
    return bool(is_whole) and op.name in _OF_WHOLE and _OF_WHOLE[op.name](op)


def may_end_turns(flag: Value) -> bool:
    """Whether a loop's first condition may tell a compiler that it does not turn, or only once.

    One that is made of arguments and always holds may hold behind any turn.
    """
    as_drawn = number_of(Value(flag.aval, flag.op, flag.index)) if flag.arguments else 0
    return flag.is_folded and not np.all(as_drawn == 1)


def _is_known_choice(which: Value, *cases: Value) -> bool:
    """Whether it is among constants that are one, or a compiler may know that it takes such a one.

    Flags made of constants, of which some may be set and others not, choose none.
    """
    if all(map(is_known, cases)) and _are_equal(cases):
        return True
    which = unspread(which)
    if not which.is_folded or (which.shape and not which.arguments):
        return False
    number = number_of(which)
    return any(is_known(v) for n, v in enumerate(cases) if is_secret(number) or n == number)


def _is_settled_comparison(aval: Any, op: Op) -> bool:
    if jnp.issubdtype(op.inputs[0].dtype, jnp.inexact):
        return _is_never_below_zero(op)
    if _is_never_below_zero(op):
        return True
    drawn = np.asarray(number_of(Value(aval, op)))
    if op.name in ("eq", "ne"):  # what is drawn is no constant by chance, which it may be
        return bool(np.all(drawn == (op.name == "eq")))
    return bool(np.all(drawn == drawn.flat[0]))


def _is_never_below_zero(op: Op) -> bool:
    """Whether it compares with zero what XLA may find to be no less: a square, unsigned numbers.

    Of the last that is by their type: they may be drawn for what they are made of.
    """
    if op.name not in ("lt", "ge", "gt", "le"):
        return False
    number, zero = op.inputs if op.name in ("lt", "ge") else op.inputs[::-1]
    is_unsigned = jnp.issubdtype(number.dtype, jnp.unsignedinteger)
    return may_be_zero(zero) and (is_unsigned or bool(np.all(number_of(number) >= 0)))


def _is_all_bits(op: Op) -> bool:
    """Whether an operand has all bits, so that nothing is left of the other."""
    dtype = op.inputs[0].dtype
    bits = -1.0 if jnp.issubdtype(dtype, jnp.signedinteger) else 1.0
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        bits = float(jnp.iinfo(dtype).max)
    return any(may_hold(v, lambda number: number == bits) for v in op.inputs)


def _is_of_one_number(op: Op) -> bool:
    """Whether its operands are one number: of flags, drawn alike by chance, one value."""
    a, b = op.inputs
    return unspread(a) is unspread(b) if a.dtype == jnp.bool_ else may_be_equal(a, b)


def _is_of_one_place(op: Op) -> bool:
    """Whether it tells which element of one is the largest, say, or in what order one is sorted."""
    along = op.params.get("axes", [op.params.get("dimension", op.params.get("axis", -1))])
    is_one = all(op.inputs[0].shape[axis] == 1 for axis in along)
    return is_one and (op.name != "sort" or any(map(is_known, op.inputs)))


_OF_WHOLE: Mapping[str, Callable[[Op], bool]] = {
    **dict.fromkeys(("mul", "and"), lambda op: any(map(may_be_zero, op.inputs))),
    "or": _is_all_bits,
    **dict.fromkeys(("sub", "xor"), _is_of_one_number),
    "rem": lambda op: may_be_one(op.inputs[1]),
    # A sort is of the places that it is given.
    **dict.fromkeys(("argmax", "argmin", "top_k", "sort"), _is_of_one_place),
}
"""Of flags and whole numbers."""
