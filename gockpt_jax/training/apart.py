"""Sums that a compiler takes apart, because the program itself has put together what they are of.

A sum over two stacked arrays is a sum of two, a product over a number and a constant has one factor
more, and a sum over what was spread is a multiple of it: XLA writes them so, and merges them with
what stands on both sides. What there are many elements of for each sum is summed up all the same.
"""

import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.numbers import may_hold
from gockpt_jax.training.parts import half_of
from gockpt_jax.training.primitives import CUMULATIVE, JOINS, LAYOUTS, MEETINGS, PARTS, SPREADS
from gockpt_jax.training.values import Op, Ratio, Value, contracted, is_known, through_walls

# What these put into an array: all operands, or one of them.
_PUTS: Mapping[str, slice] = dict.fromkeys(JOINS, slice(None)) | {
    "dynamic_update_slice": slice(1, 2), "scatter": slice(2, 3), "scatter-add": slice(2, 3),
}  # fmt: skip
# They choose one of the elements: nothing is computed that might be merged.
_CHOOSE = ("max", "min", "and", "or")


def summed(op: Op) -> int:
    """How many elements an operation makes one of: a sum, or what else it does with them."""
    if op.name.startswith("reduce_window"):
        return math.prod(op.params["window_dimensions"])
    if op.name == "dot_general":
        return math.prod(contracted(op))
    along: Sequence[int] = ()
    if op.name.startswith("reduce_") or op.name in MEETINGS:  # which `vmap` makes such sums of
        along = [
            int(axis) for axis in op.params.get("axes", ()) if isinstance(axis, int | np.integer)
        ]
    if op.name in CUMULATIVE:
        along = (op.params["axis"],)
    return math.prod(op.inputs[0].shape[axis] for axis in along)


def is_apart(op: Op) -> bool:
    """Whether a compiler may see the parts of what an operation sums up.

    In a matrix product it does only if the other operand is constant.
    """
    count = summed(op)
    if op.name != "dot_general":
        return count > 1 and _is_put_together(op.inputs[0], op.inputs[0].size // count)
    both = zip(op.inputs, op.inputs[::-1], strict=True)
    return count > 1 and any(
        is_known(other) and _is_put_together(v, v.size // count) for v, other in both
    )


def computes_apart(op: Op) -> bool:
    """Whether it is then sums or products, maybe with constants, that nothing else shows."""
    is_of_floats = bool(op.inputs) and jnp.issubdtype(op.inputs[0].dtype, jnp.inexact)
    return bool(is_of_floats and not op.name.endswith(_CHOOSE) and is_apart(op))


def _is_put_together(value: Value, largest: Ratio) -> bool:
    """Whether an array has parts no larger than that, or constants, which a program has put there.

    So it may be seen after what is computed, element by element, of such arrays and of numbers.
    """
    found, seen = False, set[Value]()
    stack: list[tuple[Value, Ratio]] = [(value, largest)]
    while stack:
        value, largest = through_walls(*stack.pop())
        if value in seen or value.size <= 1 or is_known(value):
            continue
        seen.add(value)
        op = value.op
        if op is None:
            return False
        if op.name in SPREADS and op.inputs[0].size <= largest:
            found = True
        elif op.name in _PUTS and any(_is_part(v, largest) for v in op.inputs[_PUTS[op.name]]):
            found = True
            stack.extend(() if op.name in JOINS else [(op.inputs[0], largest)])
        elif op.name in ("real", "imag") and (half := half_of(op)) is not None:
            stack.append((half, largest))
        elif op.name in LAYOUTS | PARTS | SPREADS or _is_of_one(op):
            stack.append((op.inputs[min(value.index, len(op.inputs) - 1)], largest))
        elif all(v.shape in (value.shape, ()) for v in op.inputs):
            stack.extend((v, largest) for v in op.inputs)
        else:
            return False
    return found


def _is_of_one(op: Op) -> bool:
    """Whether it sums up one element alone: itself."""
    return op.name.startswith("reduce_") and "axes" in op.params and summed(op) == 1


def _is_part(value: Value, largest: Ratio) -> bool:
    """Whether a compiler may take out what was put into an array: it does not take out nothing."""
    if is_known(value):
        return may_hold(value, lambda number: number != 0)
    return value.size <= largest or _is_put_together(value, largest)
