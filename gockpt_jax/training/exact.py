"""Which operations the host repeats bit for bit.

IEEE 754 fixes the result of an addition, a multiplication, a comparison and a conversion. It does
not fix what an accelerator does for a division, a root or a transcendental (an H100 computes Adam's
as `div.full` and `sqrt.approx`), nor how wide arithmetic below fp32 is carried. Only what is fixed
may stand in a recipe; where the walk from a leaf meets anything else, the cut lies after it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.graph import Op, Value

# Select or move bits; exact for every dtype.
_MOVES = frozenset(
    [
        "select_n",
        "copy",
        "copy_p",
        "stop_gradient",
        "max",
        "min",
        "neg",
        "abs",
        "sign",
        "clamp",
        "is_finite",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
        "not",
        "xor",
        "shift_left",
        "shift_right_logical",
        "shift_right_arithmetic",
        "round",
        "floor",
        "ceil",
    ]
)
PRODUCTS = frozenset(["mul", "square", "integer_pow"])
SUMS = frozenset(["add", "sub", "add_any"])


def is_exact(op: Op) -> bool:
    """Whether any IEEE 754 machine gives the same bits for this elementwise operation.

    Args:
      op: A single-output operation.

    Returns:
      False for everything that is not known to be exact, so that an unknown operation can only make
      a leaf late and never wrong.
    """
    if op.name in _MOVES:
        return True
    if op.name in PRODUCTS | SUMS:  # correctly rounded, where the hardware has the type
        return all(_full_width(v.dtype) for v in op.inputs) and op.params.get("y", 0) >= 0
    if op.name == "div":
        return _divides_by_power_of_two(op)
    if op.name == "broadcast_in_dim":
        return op.inputs[0].shape == ()
    return op.name == "convert_element_type" and _convert_is_exact(op)


def _full_width(dtype: jnp.dtype) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return bool(dtype.itemsize >= 4)
    return bool(jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_)


def may_be_cut(value: Value) -> bool:
    """Whether a value is the same number where it is returned and where the step goes on with it.

    A product is not: XLA folds a chain of scalar factors into one, `(x * a) * b` into
    `x * (a * b)`, and a division by a constant is such a factor. (A CPU with FMA moreover contracts
    a product with the addition it feeds.) An addition or a select ends the chain.
    """
    op = value.op
    if op is None:
        return True
    divides_by_constant = op.name == "div" and _constant_divisor(op) is not None
    return op.name not in PRODUCTS and not divides_by_constant


def _constant_divisor(op: Op) -> np.ndarray | None:
    divisor = op.inputs[1]
    if divisor.op is not None and divisor.op.name == "broadcast_in_dim":
        divisor = divisor.op.inputs[0]
    return np.asarray(divisor.constant) if divisor.is_constant else None


def _divides_by_power_of_two(op: Op) -> bool:
    """Such a division is a multiplication by an exact reciprocal (a mean over 8 micro-batches)."""
    divisor = _constant_divisor(op)
    if divisor is None or divisor.ndim or not all(_full_width(v.dtype) for v in op.inputs):
        return False
    mantissa, exponent = np.frexp(np.float64(divisor))
    return bool(abs(mantissa) == 0.5 and abs(exponent) < 120)


def _convert_is_exact(op: Op) -> bool:
    """A conversion rounds to nearest even, once; but XLA may drop a narrowing that is undone.

    With excess precision allowed (the default) `f32 -> bf16 -> f32` becomes nothing. So a value
    narrowed within the step may not be widened again; one that was stored narrow may.
    """
    (operand,) = op.inputs
    if jnp.issubdtype(op.params["new_dtype"], jax.dtypes.extended):
        return False
    stored = operand.op is None or operand.is_constant
    return (
        stored or _full_width(operand.dtype) or operand.dtype.itemsize == 0 or _is_integer(operand)
    )


def _is_integer(value: Value) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.integer) or value.dtype == jnp.bool_)
