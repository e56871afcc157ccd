"""Flags and whole numbers that are the same whatever the step is given, as a compiler finds.

It erases a choice by such a flag, and then sees what is in front of it together with what is
behind: `step % 1 == 0` of an interval that happens to be one, `ids >= 0` of unsigned numbers,
`late | True`. Comparisons of floats it leaves alone, which may be no numbers (NaN). To take a flag
for settled that is not only makes leaves late.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.numbers import may_hold, number_of
from gockpt_jax.training.primitives import COMPARISONS
from gockpt_jax.training.values import Op, Value, unspread


def is_settled(aval: Any, op: Op) -> bool:
    """Whether a compiler may know what an operation gives, though not all that it is given.

    Args:
      aval: Of what it gives.
      op: The operation.
    """
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not op.inputs:
        return False
    if dtype == jnp.bool_:
        return _is_settled_flag(aval, op)
    return bool(jnp.issubdtype(dtype, jnp.integer)) and _is_settled_integer(op)


def _is_settled_flag(aval: Any, op: Op) -> bool:
    if op.name in ("and", "or"):
        ends = op.name == "or"
        return any(may_hold(v, lambda flag: (flag != 0) == ends) for v in op.inputs)
    if op.name not in COMPARISONS or jnp.issubdtype(op.inputs[0].dtype, jnp.inexact):
        return False
    drawn = np.asarray(number_of(Value(aval, op)))
    if op.name in ("eq", "ne"):  # what is drawn is no constant by chance, which it may be
        return bool(np.all(drawn == (op.name == "eq")))
    return bool(np.all(drawn == drawn.flat[0]))


def _is_settled_integer(op: Op) -> bool:
    if op.name == "mul":
        return any(may_hold(v, lambda number: number == 0) for v in op.inputs)
    if op.name == "sub":
        return unspread(op.inputs[0]) is unspread(op.inputs[1])
    return op.name == "rem" and may_hold(op.inputs[1], lambda number: abs(number) == 1)
