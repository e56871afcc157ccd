"""Which operations the host repeats bit for bit.

IEEE 754 fixes the result of an addition, a multiplication, a comparison and a conversion. It does
not fix what an accelerator does for a division, a root or a transcendental (an H100 computes Adam's
as `div.full` and `sqrt.approx`), nor how wide arithmetic below fp32 is carried. Only what is fixed
may stand in a recipe; where the walk from a leaf meets anything else, the cut lies after it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.merging import is_rounded, merges
from gockpt_jax.training.numbers import is_power_of_two, may_be_zero, number_of
from gockpt_jax.training.primitives import (
    CHOICE,
    EXACT,
    LOOKS,
    PRODUCTS,
    ROUNDED,
    SUMS,
    TELL_ZERO,
    WORKED_OUT,
)
from gockpt_jax.training.values import (
    Op,
    Value,
    is_known,
    judged_once,
    unspread,
    without_walls,
)


@judged_once
def is_exact(op: Op) -> bool:
    """Whether any IEEE 754 machine gives the same bits for this elementwise operation.

    Args:
      op: A single-output operation.

    Returns:
      False for everything that is not known to be exact, so that an unknown operation can only make
      a leaf late and never wrong.
    """
    if _is_emulated(op) or any(map(_is_denormal, op.inputs)):
        return False
    if op.name in ("abs", "sign") and jnp.issubdtype(op.inputs[0].dtype, jnp.complexfloating):
        return False  # they are made of a root
    if op.name in LOOKS:
        is_other = _is_found_true(op) or _may_tell_zero_otherwise(op)
        return not is_other and all(map(_is_as_it_is_stored, op.inputs))
    if op.name in EXACT:
        return True
    if op.name in PRODUCTS | SUMS:  # correctly rounded, where the hardware has the type
        is_whole = _full_width(op.inputs[0].dtype) and op.params.get("y", 0) >= 0
        return is_whole and not merges(op)
    if op.name in WORKED_OUT and all(unspread(v).is_constant for v in op.inputs):
        return _full_width(op.inputs[0].dtype)
    if op.name == "div":
        return _divides_by_power_of_two(op)
    if op.name == "rem":
        return _is_remainder_of_known(op)
    if op.name == "broadcast_in_dim":
        return op.inputs[0].shape == ()
    if op.name != "convert_element_type":
        return False
    return _convert_is_exact(op) and not _may_tell_zero_otherwise(op)


def why_inexact(op: Op) -> str:
    """An operation that `is_exact` refuses, and why, in words."""
    if op.primitive is CHOICE:
        return "a choice between branches out of which a compiler may take a factor or a constant"
    if op.name in PRODUCTS | SUMS and _full_width(op.inputs[0].dtype) and merges(op):
        return f"`{op.name}`, which a compiler may make one with what is before it"
    dtypes = sorted({str(v.dtype) for v in op.inputs})
    return f"`{op.name}` on {', '.join(dtypes)}, which the host does not repeat exactly"


def is_close(op: Op) -> bool:
    """Whether any IEEE 754 machine gives nearly the same number: `is_exact`, or rounded otherwise.

    Arithmetic below fp32 and narrowings that are undone are not: there a difference is as large as
    the narrow type's own last place.
    """
    is_wide = op.name in ROUNDED and _full_width(op.inputs[0].dtype)
    return is_exact(op) or (is_wide and not _is_emulated(op))


def _is_found_true(op: Op) -> bool:
    """Whether XLA may find that a number is never below zero: of `exp(x)` or `x * x`, say.

    To it `x >= 0` is then true, also where `x` is no number (NaN); to whom is given `x`, not.
    """
    if op.name not in ("ge", "le") or not jnp.issubdtype(op.inputs[0].dtype, jnp.floating):
        return False
    return may_be_zero(op.inputs[1 if op.name == "ge" else 0])


def _may_tell_zero_otherwise(op: Op) -> bool:
    """Whether a GPU may find that a number is not zero, where the host takes it for zero.

    XLA's CPU backend flushes denormals, which a moment decays to where no gradient comes; a TPU
    does, too, and a GPU's kernels do not. A number that is known to be larger is told from both.
    """
    tells = op.name in TELL_ZERO or op.params.get("new_dtype") == jnp.bool_
    if not tells or jax.default_backend() != "gpu":
        return False
    numbers = [v for v in op.inputs if jnp.issubdtype(v.dtype, jnp.inexact)]
    narrow = all(v.dtype == jnp.float16 for v in numbers)  # whose denormals are none of fp32
    return not narrow and not any(map(_is_far_from_zero, numbers))


def _is_far_from_zero(value: Value) -> bool:
    """Whether all its numbers are known, and none is zero or next to it."""
    numbers = _known_numbers(value)
    if numbers is None:
        return False
    return bool(np.all(np.abs(numbers).astype(np.float64) > float(jnp.finfo(jnp.float32).tiny)))


def _known_numbers(value: Value) -> Any | None:
    """Those that it is made of, in NumPy's words; `None` if nobody knows them."""
    known = unspread(value)
    if not is_known(known):
        return None
    return np.asarray(known.constant if known.is_constant else number_of(known))


def _is_remainder_of_known(op: Op) -> bool:
    """Whether it divides whole numbers by a known one; what zero gives is each machine's own."""
    number, divisor = op.inputs
    is_whole = jnp.issubdtype(number.dtype, jnp.integer) and is_known(divisor)
    return is_whole and bool(np.all(abs(number_of(divisor)) > 0))


def _is_emulated(op: Op) -> bool:
    """Whether a TPU makes several operations of it: each fp64 is two fp32 there."""
    dtypes = [v.dtype for v in op.inputs] + [v for k, v in op.params.items() if k == "new_dtype"]
    return jnp.float64 in dtypes and jax.default_backend() == "tpu"


def _is_denormal(value: Value) -> bool:
    """Whether it is a number that compilers and machines may take for zero.

    XLA's own simplifications compare constants so on the CPU: one for another, if both are.
    """
    numbers = _known_numbers(value) if jnp.issubdtype(value.dtype, jnp.inexact) else None
    if numbers is None:
        return False
    size = np.abs([numbers.real, numbers.imag]).astype(np.float64)
    is_wide = value.dtype in (jnp.float64, jnp.complex128)
    tiny = jnp.finfo(jnp.float64 if is_wide else jnp.float32).tiny  # of 16 bits it is as of 32
    return bool(np.any((size > 0) & (size < tiny)))


def _full_width(dtype: jnp.dtype) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return bool(dtype.itemsize >= 4)
    return bool(jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_)


def _divides_by_power_of_two(op: Op) -> bool:
    """Such a division is a multiplication by an exact reciprocal (a mean over 8 micro-batches)."""
    number, divisor = op.inputs
    return _full_width(number.dtype) and is_power_of_two(divisor)


def _convert_is_exact(op: Op) -> bool:
    """A conversion rounds to nearest even, once; but XLA may drop one that another follows.

    With excess precision allowed (the default) `f32 -> bf16 -> f32` becomes nothing, and
    `s32 -> f32 -> bf16` one conversion, which rounds once. So a value that was narrowed or rounded
    within the step may not be converted again; one that was stored narrow may.
    """
    (operand,) = op.inputs
    new = op.params["new_dtype"]
    if jnp.issubdtype(new, jnp.integer) and jnp.issubdtype(operand.dtype, jnp.inexact):
        return False  # what is too large for it, or no number, each machine makes another of
    if jnp.issubdtype(new, jnp.floating) and not _rounds_once(operand.dtype, new):
        return False
    is_stored = without_walls(operand).op is None
    return is_stored or (_full_width(operand.dtype) and not is_rounded(operand))


def _is_as_it_is_stored(value: Value) -> bool:
    """Whether a value is in memory, or of a type that no machine computes in a wider one.

    Below fp32 it may be computed in fp32, and XLA then drops the rounding where what follows is
    computed so as well: an H100's compiler makes `floor(x)` of `floor(x.astype(bf16))`.
    """
    while value.op is not None and value.op.name == "broadcast_in_dim":
        (value,) = value.op.inputs
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return not is_float or _full_width(value.dtype) or without_walls(value).op is None


def _rounds_once(old: Any, new: Any) -> bool:
    """Whether every machine goes there directly, and by a rule of IEEE 754.

    The CPU backend takes fp64 to fp16 by way of fp32, rounding twice. Of types of 8 bits and less
    overflow is the machine's affair: NaN, infinity or the largest number.
    """
    return bool(
        new.itemsize >= 4 or (new.itemsize == 2 and (old.itemsize == 1 or old == jnp.float32))
    )
