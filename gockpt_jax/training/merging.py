"""What a compiler may merge, across a value that a program also returns or behind it.

Across it, the step goes on with another number than the one returned (docs/decisions/0001). So a
cut lies only where nothing in front of the value can be merged with what follows. Behind it, one
compiler merges what another leaves, so the host does not repeat it.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from gockpt_jax.training.apart import computes_apart
from gockpt_jax.training.common_factors import ends_factors, shares_a_factor, shares_a_spread
from gockpt_jax.training.erased import is_one_product, may_be_erased
from gockpt_jax.training.factors import may_be_flags, may_be_spread
from gockpt_jax.training.hidden import hides_a_body
from gockpt_jax.training.numbers import (
    is_power_of_two,
    may_be_all_of,
    may_be_one,
    may_be_zero,
    may_hold,
)
from gockpt_jax.training.primitives import MELTING, PRODUCTS, RISING, SUMS
from gockpt_jax.training.values import (
    Op,
    Value,
    is_known,
    judged_once,
    without_walls,
)


@judged_once
def may_be_cut(value: Value) -> bool:
    """Whether a value is the same number where it is returned and where the step goes on with it.

    A product is not: XLA folds a chain of scalar factors into one, `(x * a) * b` into
    `x * (a * b)`, and a division by a constant is such a factor. (A CPU with FMA moreover contracts
    a product with the addition it feeds.) Nor is the sum of a value and a constant: `(x + a) + b`
    becomes `x + (a + b)`. XLA sees through whatever it erases: names, copies, layouts, `x + 0`, the
    walls of a `shard_map`. Powers of two fold without rounding. So the walk back from the value
    must come to an end of the chain before it comes to a factor, to such a sum, or to an operation
    that may hide one.
    """
    return not (
        _shows(value, _is_rounding_factor, _ends_chain)
        or _shows(value, _hides, _ends_chain)
        or _shows_constant_added(value, _ends_sum_to_cut)
    )


def merges(op: Op) -> bool:
    """Whether a compiler may make something else of a sum or product, and of those in front of it.

    Some make `x * (a * b)` of `(x * a) * b` where `a` is a constant, and `(a + b) * c` of
    `ac + bc`; others leave them. So neither is repeated. By a power of two it is the same number.
    Nor is a product by flags, of which a choice is made where they are seen to be such, nor a sum
    with what some find to be zero: erased, it leaves -0.0 as it is.
    """
    return shares_a_factor(op) or _folds(op) or is_by_flags(op) or _may_add_nothing(op)


def melts(op: Op) -> bool:
    """Whether XLA may make one of the roots or exponentials that an operation is given.

    `sqrt(x) * sqrt(x)` becomes `x`, `exp(a) * exp(b)` becomes `exp(a + b)`, and the larger of
    `erf(a)` and `erf(b)` becomes `erf` of the larger.
    """
    if op.name in PRODUCTS:
        return all(_shows(v, _is_melting, _ends_chain) for v in op.inputs)
    return op.name in ("max", "min") and all(_shows(v, _is_rising, _ends_chain) for v in op.inputs)


def may_melt(value: Value) -> bool:
    """Whether a value is one that `melts` may find."""
    return any(_shows(value, finds, _ends_chain) for finds in (_is_melting, _is_rising))


def _is_melting(op: Op) -> bool:
    return op.name in MELTING


def _is_rising(op: Op) -> bool:
    return op.name in RISING


def is_rounded(value: Value) -> bool:
    """Whether XLA sees a conversion that rounds, which it drops where another follows."""
    return _shows(value, _rounds, ends_sum)


def _rounds(op: Op) -> bool:
    """Whether an operation makes a float of numbers of which not all are such floats."""
    if op.name != "convert_element_type" or not jnp.issubdtype(
        op.params["new_dtype"], jnp.floating
    ):
        return False
    old, new = op.inputs[0].dtype, jnp.finfo(op.params["new_dtype"])
    if jnp.issubdtype(old, jnp.integer):
        return bool(jnp.iinfo(old).bits > new.nmant + 1)
    return bool(old != new.dtype and old.itemsize * 8 >= new.bits)  # fp16 holds not all of bf16


def _shows(value: Value, finds: Callable[[Op], bool], ends: Callable[[Op], bool]) -> bool:
    """Whether XLA sees such an operation from a value: up to one, included, that ends the chain."""
    op = without_walls(value).op
    return op is not None and _leads_to(op, finds, ends)


@judged_once
def _leads_to(
    op: Op, finds: Callable[[Op], bool], ends: Callable[[Op], bool]
) -> bool | list[tuple[Any, ...]]:
    if finds(op):
        return True
    behind = () if ends(op) else (without_walls(v).op for v in op.inputs)
    return [(inner, finds, ends) for inner in behind if inner is not None]


def _folds(op: Op) -> bool:
    """Whether a constant in front of a product may be made one with its factor; so of sums."""
    if len(op.inputs) == 1 or (op.name == "sub" and is_known(op.inputs[0])):
        return False  # what is taken off a constant stays as it is: `1 - (1 - t**-0.8)`
    both = (op.inputs, op.inputs[::-1])
    pairs = [(v, other) for v, other in both if not is_known(v)]
    if op.name == "mul":
        return any(
            _shows(v, _multiplies_by_constant, _ends_chain)
            for v, factor in pairs
            if may_be_spread(factor) and not is_power_of_two(factor)
        )
    return _adds_constant(op) and any(_shows_constant_added(v, ends_sum) for v, _ in pairs)


def _shows_constant_added(value: Value, ends: Callable[[Op], bool]) -> bool:
    """Whether XLA sees a sum with a constant; also where two factors behind it make one together.

    It erases both of `x * 2 * 0.5`.
    """
    return _shows(value, _adds_constant, ends) or (
        _shows(value, _scales_again, _ends_chain) and _shows(value, _adds_constant, _ends_chain)
    )


def _scales(op: Op) -> bool:
    """Whether an operation multiplies or divides by a constant."""
    factors = {"mul": op.inputs, "div": op.inputs[1:]}.get(op.name, ())
    return any(map(is_known, factors))


def _scales_again(op: Op) -> bool:
    return _scales(op) and any(_shows(v, _scales, _ends_chain) for v in op.inputs)


def _may_add_nothing(op: Op) -> bool:
    """Whether one compiler finds that a float is added to zero, and another does not.

    `lax.cond(p, lambda: 0.0, lambda: 0.0)` is no constant to XLA's CPU backend, but once it is a
    choice. A zero that is written as such every compiler erases.
    """
    return (
        op.name in SUMS
        and jnp.issubdtype(op.inputs[0].dtype, jnp.inexact)
        and any(may_be_zero(v) and not _is_written(v) for v in op.inputs)
    )


def _is_written(value: Value) -> bool:
    """Whether it is a constant to the host as well: not one that comes out of a loop, say."""
    while value.op is not None and value.op.name in ("broadcast_in_dim", "convert_element_type"):
        (value,) = value.op.inputs
    return value.is_constant


def is_by_flags(op: Op) -> bool:
    """Whether a product may be made a choice: `select(flag, x, 0)`, which has no zero below zero.

    XLA does so where it sees that a factor is made of flags: behind a transposition, say, or where
    a row of them was spread before, it sees that on one side only. Of flags that the step is given
    it does on both.
    """
    is_product = op.name == "mul" and jnp.issubdtype(op.inputs[0].dtype, jnp.inexact)
    return is_product and any(map(may_be_flags, op.inputs))


def _multiplies_by_constant(op: Op) -> bool:
    factors = op.inputs if op.name in ("mul", "div") or is_one_product(op) else ()
    is_constant = any(is_known(v) and not is_power_of_two(v) for v in factors)
    return is_constant or computes_apart(op)


def _hides(op: Op) -> bool:
    """Whether XLA sees more of an operation than we do.

    Of flags that are made numbers it still knows what they are (`is_by_flags`).
    """
    if op.name == "convert_element_type" and op.inputs[0].dtype == jnp.bool_:
        return bool(jnp.issubdtype(op.params["new_dtype"], jnp.inexact))
    return hides_a_body(op)


def _is_power(op: Op) -> bool:
    return op.name in ("pow", "exp2")


@judged_once
def _is_rounding_factor(op: Op) -> bool:
    if op.name == "mul":
        return not any(map(is_power_of_two, op.inputs))
    if op.name == "integer_pow":
        return bool(op.params["y"] != 1)
    if op.name == "div":
        return is_known(op.inputs[1]) and not is_power_of_two(op.inputs[1])
    if op.name == "log":  # of a power it is a product
        return _shows(op.inputs[0], _is_power, _ends_chain)
    if op.name == "pow":  # by a constant: erased, or made such a product
        return may_be_erased(op) and may_hold(op.inputs[1], lambda power: power != 1)
    return op.name == "square" or is_one_product(op)


@judged_once
def _ends_chain(op: Op) -> bool:
    """Whether XLA cannot fold a factor in front of this operation with one behind it."""
    if op.name in SUMS:
        is_of_floats = jnp.issubdtype(op.inputs[0].dtype, jnp.inexact)  # bits it puts back as is
        return bool(is_of_floats and not (may_be_all_of(op) or shares_a_spread(op)))
    return ends_factors(op)


@judged_once
def _adds_constant(op: Op) -> bool:
    """Whether an operation adds a constant to a number that rounds."""
    return computes_apart(op) or (
        op.name in SUMS
        and any(may_hold(v, lambda number: number != 0) for v in op.inputs)
        and jnp.issubdtype(op.inputs[0].dtype, jnp.inexact)
    )


@judged_once
def ends_sum(op: Op) -> bool:
    """Whether XLA cannot fold a constant added in front of this operation with one behind it."""
    if op.name == "mul" or op.name == "div":  # but by one, which is erased
        factors = op.inputs if op.name == "mul" else op.inputs[1:]
        return not any(map(may_be_one, factors))
    if op.name in PRODUCTS:
        return not may_be_all_of(op)
    return _ends_chain(op)


def _ends_sum_to_cut(op: Op) -> bool:
    """Likewise, where a value is cut: a schedule's `(1 - count / n) ** 1` may be.

    The power is erased; a constant that is added behind it is not repeated (`_folds`).
    """
    return op.name in PRODUCTS - {"mul"} or ends_sum(op)
