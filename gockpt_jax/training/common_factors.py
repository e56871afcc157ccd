"""Sums whose terms are all multiplied by one number: XLA makes one product of them.

It writes `x * a + y * a` as `(x + y) * a`, and folds `a` with what the sum is multiplied by behind
it, where `a` is a constant, or spread. So it does with sums of such sums, and with products that it
sees only when it has erased, or moved, what is in front of them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.apart import is_apart, summed
from gockpt_jax.training.erased import is_one_product, may_be_erased
from gockpt_jax.training.factors import may_be_spread
from gockpt_jax.training.hidden import hides_a_body, is_compiled_kernel
from gockpt_jax.training.numbers import (
    is_power_of_two,
    may_be_all_of,
    may_be_equal,
    may_hold,
    reciprocal,
)
from gockpt_jax.training.parts import FEW, sliced
from gockpt_jax.training.primitives import (
    CHOICE,
    ENDS,
    IDENTITIES,
    JOINS,
    LAYOUTS,
    PARTS,
    PRODUCTS,
    SPREADS,
    SUMS,
)
from gockpt_jax.training.values import (
    Op,
    Ratio,
    Value,
    is_known,
    judged_once,
    unspread_through_walls,
)

# They move elements: what is a product in front of them is one behind them.
_MOVE = IDENTITIES | LAYOUTS | PARTS | SPREADS

_ANY = Value(None)
"""A number that nobody but the compiler knows."""


class _Factors(NamedTuple):
    """Of a product: how many elements are beside each what is one beside the product.

    Attributes:
      alone: What it multiplies that is no product.
      products: What products it multiplies, and it itself.
    """

    alone: dict[Value, Ratio]
    products: dict[Value, Ratio]

    @property
    def all(self) -> dict[Value, Ratio]:
        """Both; nothing of what is no product."""
        return self.alone | self.products if self.products else {}


@judged_once
def shares_a_factor(op: Op) -> bool:
    """Whether an operation is a sum of products by one number."""
    return bool(_common_factors(op))


@judged_once
def shares_a_spread(op: Op) -> bool:
    """Whether they share what is spread, or a constant: one that folds with what follows."""
    return any(may_be_spread(a) for a, _ in _common_factors(op))


def ends_factors(op: Op) -> bool:
    """Whether XLA cannot fold a factor in front of what is no sum with one behind it."""
    if op.name in ("select_n", "max", "min"):
        return not may_be_all_of(op)
    if op.name == "clamp":
        return not any(may_hold(v, np.isinf) for v in op.inputs)
    if op.name == "convert_element_type":  # what is behind the point is cut off
        is_of_floats = jnp.issubdtype(op.inputs[0].dtype, jnp.inexact)
        return bool(is_of_floats and jnp.issubdtype(op.params["new_dtype"], jnp.integer))
    if op.name in ENDS:
        return not (may_be_erased(op) or is_apart(op))
    return (summed(op) > 1 and not is_apart(op)) or is_compiled_kernel(op)


def _common_factors(op: Op) -> Sequence[tuple[Value, Ratio]]:
    """What all terms of a sum of floats are multiplied by; of another operation nothing.

    Returns:
      Each, with how many elements are beside it what is one beside the sum.
    """
    if not _is_sum(op):
        return ()
    stack = [op]  # without recursion: sums of sums can be long
    while stack:
        outer = stack[-1]
        if outer.common_factors is None:
            unknown: list[Op] = []
            one, other = (_factors(v, unknown) for v in outer.inputs)
            if unknown:
                stack += unknown
                continue
            outer.common_factors = tuple(_common(one, other))
        stack.pop()
    return op.common_factors or ()


def _common(one: _Factors, other: _Factors) -> Iterator[tuple[Value, Ratio]]:
    """The factors that two terms share, and what a compiler may make of the others."""
    shared = set[Value]()
    for a, per_a in one.all.items():
        if not is_power_of_two(a):
            found = [b for b, per_b in other.all.items() if _may_be_one(a, b, per_a, per_b)]
            if found:
                shared |= {a, *found}
                yield a, per_a
    others = ([v for v in term.alone if v not in shared] for term in (one, other))
    if shared and all(rest and all(map(may_be_spread, rest)) for rest in others):
        yield _ANY, 1  # of `x * 0.1 + x * 0.2` it makes `x * (0.1 + 0.2)`


def _is_sum(op: Op) -> bool:
    return op.name in SUMS and bool(jnp.issubdtype(op.inputs[0].dtype, jnp.inexact))


def _factors(value: Value, unknown: list[Op]) -> _Factors:
    """What a product multiplies, and what products among that do.

    A division by a constant is a product with its reciprocal.

    Args:
      value: A term of a sum.
      unknown: Is given the sums among what is multiplied of which nobody has asked yet.
    """
    alone, products = dict[Value, Ratio](), dict[Value, Ratio]()
    stack: list[tuple[Value, Ratio]] = [(value, 1)]
    while stack:
        value, per = unspread_through_walls(*stack.pop())
        op = value.op
        if value in alone or value in products:  # a product may be of one with itself, and again
            continue
        behind: Sequence[tuple[Value, Ratio]] = ()
        if op is None:
            alone[value] = per
        elif hides_a_body(op):
            products[value] = alone[_ANY] = per
        elif op.name in PRODUCTS or is_one_product(op) or _divides_by_constant(op):
            products[value] = per
            inputs = (op.inputs[0], reciprocal(op.inputs[1])) if op.name == "div" else op.inputs
            behind = [(v, per) for v in inputs]
        elif _is_sum(op):
            alone[value] = per
            behind = [(v, per) for v in may_be_all_of(op)]
            if op.common_factors is None:
                unknown.append(op)
            elif op.common_factors:
                products[value] = per
                behind += [(v, per * more) for v, more in op.common_factors]
        else:
            alone[value] = per
            behind = [(v, per) for v in (_moved(value, op) or may_be_all_of(op))]
        stack.extend(behind)
    return _Factors(alone, products)


def _moved(value: Value, op: Op) -> Sequence[Value]:
    """What an operation puts elsewhere, if that is all that it does, or one of what it chooses."""
    if op.name == CHOICE.name:
        return op.inputs[1:]
    if op.name in ("slice", "split"):
        return sliced(value, op)
    is_of_few = op.name in JOINS and len(op.inputs) <= FEW
    return op.inputs if op.name in _MOVE or is_of_few or may_be_erased(op) else ()


def _divides_by_constant(op: Op) -> bool:
    return op.name == "div" and is_known(op.inputs[1])


def _may_be_one(a: Value, b: Value, per_a: Ratio, per_b: Ratio) -> bool:
    return _ANY in (a, b) or may_be_equal(a, b, per_a, per_b)
