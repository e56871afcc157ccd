"""Which operations the host repeats bit for bit.

IEEE 754 fixes the result of an addition, a multiplication, a comparison and a conversion. It does
not fix what an accelerator does for a division, a root or a transcendental (an H100 computes Adam's
as `div.full` and `sqrt.approx`), nor how wide arithmetic below fp32 is carried. Only what is fixed
may stand in a recipe; where the walk from a leaf meets anything else, the cut lies after it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.constants import (
    folded_number,
    is_infinite,
    is_power_of_two,
    may_be,
    scalar_constant,
)
from gockpt_jax.training.values import Op, Value, is_known, unspread, without_walls


def names(text: str) -> frozenset[str]:
    """Of primitives, out of a text of them."""
    return frozenset(text.split())


# Select or move bits; exact for every dtype.
_MOVES = names(
    """select_n max min neg abs sign clamp is_finite eq ne lt le gt ge
    and or not xor shift_left shift_right_logical shift_right_arithmetic round floor ceil"""
)
PRODUCTS = names("mul square integer_pow")
SUMS = names("add sub add_any")
_BY_ONE = names("mul div")
IDENTITIES = names("name copy copy_p sharding_constraint stop_gradient")
# Within a few ULPs on every machine, though not the same bits.
_ROUNDED = names(
    """div sqrt rsqrt cbrt exp exp2 expm1 log log1p pow integer_pow tanh logistic sin cos tan asin
    acos atan atan2 sinh cosh asinh acosh atanh erf erfc"""
)
# Of constants every compiler works these out on the host, rounded as IEEE 754 says. Not of what is
# made of constants: there it may first make another expression of all.
_WORKED_OUT = names("div sqrt")


def is_exact(op: Op) -> bool:
    """Whether any IEEE 754 machine gives the same bits for this elementwise operation.

    Args:
      op: A single-output operation.

    Returns:
      False for everything that is not known to be exact, so that an unknown operation can only make
      a leaf late and never wrong.
    """
    if is_identity(op):
        return True
    if _is_erased(op):  # then compilers merge what stands on both sides, each when it finds that
        return False
    if op.name in _MOVES:
        return True
    if op.name in PRODUCTS | SUMS:  # correctly rounded, where the hardware has the type
        is_whole = _full_width(op.inputs[0].dtype) and op.params.get("y", 0) >= 0
        return is_whole and not shares_a_factor(op)
    if op.name in _WORKED_OUT and all(unspread(v).is_constant for v in op.inputs):
        return _full_width(op.inputs[0].dtype)
    if op.name == "div":
        return _divides_by_power_of_two(op)
    if op.name == "broadcast_in_dim":
        return op.inputs[0].shape == ()
    return op.name == "convert_element_type" and _convert_is_exact(op)


def shares_a_factor(op: Op) -> bool:
    """Whether a sum is of two products with one factor: a TPU makes `(a + b) * c` of `ac + bc`.

    By a power of two that is the same number, and every compiler does it.
    """
    return any(True for _ in _shared_factors(op))


def shares_a_scalar(op: Op) -> bool:
    """Whether they share a number, or a constant: one that folds with what follows."""
    return any(v.shape == () or is_known(v) for v in _shared_factors(op))


def _shared_factors(op: Op) -> Iterator[Value]:
    if op.name in SUMS and jnp.issubdtype(op.inputs[0].dtype, jnp.inexact):
        one, other = (_factors(v) for v in op.inputs)
        yield from (a for a in one if any(_is_same_factor(a, b) for b in other))


def _factors(value: Value) -> list[Value]:
    """What a product multiplies, with what products among that do; nothing if it is none.

    A division by a constant is a product with its reciprocal.
    """
    found = dict[Value, None]()  # each once: a product may be of one with itself, again and again
    stack, products = [value], set[Value]()
    while stack:
        for value in _seen_as(stack.pop()):
            op = value.op
            if op is None or not (op.name in PRODUCTS or _divides_by_constant(op)):
                found[value] = None
            elif value not in products:
                products.add(value)
                stack.extend(op.inputs)
    return list(found) if products else []


def _divides_by_constant(op: Op) -> bool:
    return op.name == "div" and is_known(unspread(op.inputs[1]))


def _is_same_factor(a: Value, b: Value) -> bool:
    if not (is_known(a) and is_known(b)):
        return _is_same(a, b)
    number, other = folded_number(a), folded_number(b)
    if number is None or other is None:
        return a.is_folded or b.is_folded or _is_same(a, b)
    return bool(number == other) and not is_power_of_two(number)


def _is_same(a: Value, b: Value) -> bool:
    """Whether two values may be one to a compiler."""
    return any(_is_alike(v, w) for v in _seen_as(a) for w in _seen_as(b))


def _is_alike(a: Value, b: Value, levels: int = 4) -> bool:
    """Whether the same is done with the same, as far as this looks."""
    a, b = without_walls(a), without_walls(b)
    if a.is_constant and b.is_constant:
        return np.array_equal(a.constant, b.constant)
    if a is b or a.op is None or b.op is None:
        return a is b
    inputs = a.op.inputs, b.op.inputs
    is_alike = a.op.name == b.op.name and a.shape == b.shape and a.index == b.index
    if not is_alike or len(inputs[0]) != len(inputs[1]):
        return False
    pairs = zip(*inputs, strict=True)
    return not levels or all(_is_alike(v, w, levels - 1) for v, w in pairs)


def _are_alike(values: Sequence[Value]) -> bool:
    first, *others = map(_plain, values)
    return all(_is_alike(first, other) for other in others)


def _plain(value: Value) -> Value:
    """A value without the names, sums with zero and products by one that stand before it."""
    while (op := (value := without_walls(value)).op) is not None:
        is_term = is_identity(op) or op.name in SUMS | _BY_ONE
        operands = (op.inputs if is_identity(op) else may_be_all_of(op)) if is_term else ()
        if not operands:
            break
        value = operands[0]
    return value


def _seen_as(value: Value) -> list[Value]:
    """A value, and those that it may be to a compiler, which erases what changes no number."""
    found, stack = dict[Value, None](), [value]
    while stack:
        value = unspread(stack.pop())
        if value not in found and value.op is not None:
            stack.extend(value.op.inputs if is_identity(value.op) else may_be_all_of(value.op))
        found[value] = None
    return list(found)


def _is_erased(op: Op) -> bool:
    """Whether an operation may give one of its operands.

    A sum with zero and a product by one do to every compiler, which does away with them at once.
    """
    if op.name in SUMS and any(unspread(v).is_folded for v in op.inputs):
        return True
    return op.name not in SUMS | _BY_ONE and bool(may_be_all_of(op))


def may_be_all_of(op: Op) -> Sequence[Value]:
    """Values of which one may be all that an operation gives, so that a compiler erases it."""
    inputs = op.inputs
    if op.name in SUMS | _BY_ONE:
        pairs = [(inputs[0], inputs[1]), (inputs[1], inputs[0])]
        if op.name == "div":
            pairs.pop()
        erased = 0 if op.name in SUMS else 1  # and what is taken off zero is only negated
        return [x for x, y in pairs if may_be(y, lambda number: number == erased)]
    if op.name in ("max", "min"):
        is_one = _are_alike(inputs) or any(may_be(v, is_infinite) for v in inputs)
        return inputs if is_one else ()
    if op.name == "select_n":
        cases = inputs[1:]
        return cases if may_be(inputs[0], lambda _: True) or _are_alike(cases) else ()
    if op.name in ("neg", "abs"):
        inner = inputs[0].op
        if inner is not None and inner.name == op.name:
            return inner.inputs if op.name == "neg" else inputs
    return ()


def is_close(op: Op) -> bool:
    """Whether any IEEE 754 machine gives nearly the same number: `is_exact`, or rounded otherwise.

    Arithmetic below fp32 and narrowings that are undone are not: there a difference is as large as
    the narrow type's own last place.
    """
    repeats = _ROUNDED | PRODUCTS | SUMS
    is_wide = op.name in repeats and _full_width(op.inputs[0].dtype)
    return is_exact(op) or op.name in _MOVES or is_wide


def _full_width(dtype: jnp.dtype) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return bool(dtype.itemsize >= 4)
    return bool(jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_)


def is_identity(op: Op) -> bool:
    """Whether an operation only says something about its operand."""
    return op.name in IDENTITIES


def _divides_by_power_of_two(op: Op) -> bool:
    """Such a division is a multiplication by an exact reciprocal (a mean over 8 micro-batches)."""
    number, divisor = op.inputs
    return _full_width(number.dtype) and is_power_of_two(scalar_constant(divisor))


def _convert_is_exact(op: Op) -> bool:
    """A conversion rounds to nearest even, once; but XLA may drop a narrowing that is undone.

    With excess precision allowed (the default) `f32 -> bf16 -> f32` becomes nothing. So a value
    narrowed within the step may not be widened again; one that was stored narrow may.
    """
    (operand,) = op.inputs
    new = op.params["new_dtype"]
    if jnp.issubdtype(new, jax.dtypes.extended):
        return False
    if jnp.issubdtype(new, jnp.floating) and not _rounds_once(operand.dtype, new):
        return False
    return without_walls(operand).op is None or _full_width(operand.dtype)


def _rounds_once(old: Any, new: Any) -> bool:
    """Whether every machine goes there directly, and by a rule of IEEE 754.

    The CPU backend takes fp64 to fp16 by way of fp32, rounding twice. Of types of 8 bits and less
    overflow is the machine's affair: NaN, infinity or the largest number.
    """
    return bool(
        new.itemsize >= 4 or (new.itemsize == 2 and (old.itemsize == 1 or old == jnp.float32))
    )
