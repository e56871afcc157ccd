"""Which operations the host repeats bit for bit.

IEEE 754 fixes the result of an addition, a multiplication, a comparison and a conversion. It does
not fix what an accelerator does for a division, a root or a transcendental (an H100 computes Adam's
as `div.full` and `sqrt.approx`), nor how wide arithmetic below fp32 is carried. Only what is fixed
may stand in a recipe; where the walk from a leaf meets anything else, the cut lies after it.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gockpt_jax import _compat
from gockpt_jax.training.erased import is_one_product, may_be_erased
from gockpt_jax.training.values import Op, Value, is_known, unspread, without_walls


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Select or move bits; exact for every dtype.
_MOVES = _names(
    """select_n copy copy_p stop_gradient max min neg abs sign clamp is_finite eq ne lt le gt ge
    and or not xor shift_left shift_right_logical shift_right_arithmetic round floor ceil"""
)
PRODUCTS = _names("mul square integer_pow")
SUMS = _names("add sub add_any")
IDENTITIES = _names("name copy copy_p sharding_constraint")
# Within a few ULPs on every machine, though not the same bits.
_ROUNDED = _names(
    """div sqrt rsqrt cbrt exp exp2 expm1 log log1p pow integer_pow tanh logistic sin cos tan asin
    acos atan atan2 sinh cosh asinh acosh atanh erf erfc"""
)
# Two of these, multiplied, are one of them or none.
_MELTING = _names("sqrt rsqrt exp exp2 pow")
# The larger of two of these is one of the larger operand.
_RISING = _names("sqrt cbrt exp exp2 expm1 log log1p tanh logistic erf")
# Of constants every compiler works these out on the host, rounded as IEEE 754 says. Not of what is
# made of constants: there it may first make another expression of all.
_WORKED_OUT = _names("div sqrt")
# Where a chain of factors ends for certain. Whatever is not named here XLA may move, drop or merge:
# an operation that we do not know can only make a leaf late. Of `log(exp(x))` it makes `x`; what
# else ends none at some sizes, `may_be_erased` tells.
_ENDS = _names(
    """dot_general ragged_dot conv_general_dilated scan while cond gather sort custom_call ffi_call
    scatter scatter-add scatter-mul scatter-min scatter-max scatter_add scatter_mul scatter_min
    scatter_max cumsum cumprod cummax cummin cumlogsumexp sqrt rsqrt cbrt exp2 expm1 log1p pow tanh
    sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh logistic erf erfc erf_inv lgamma
    digamma sign round floor ceil rem nextafter eq ne lt le gt ge and or not xor is_finite
    random_bits random_wrap random_unwrap threefry2x32 iota argmax argmin top_k psum psum2
    psum_invariant all_gather reduce_scatter all_to_all ppermute eigh qr cholesky svd lu
    triangular_solve"""
)


def is_exact(op: Op) -> bool:
    """Whether any IEEE 754 machine gives the same bits for this elementwise operation.

    Args:
      op: A single-output operation.

    Returns:
      False for everything that is not known to be exact, so that an unknown operation can only make
      a leaf late and never wrong.
    """
    if op.name in _MOVES | IDENTITIES:
        return True
    if op.name in PRODUCTS | SUMS:  # correctly rounded, where the hardware has the type
        return _full_width(op.inputs[0].dtype) and op.params.get("y", 0) >= 0
    if op.name in _WORKED_OUT and all(unspread(v).is_constant for v in op.inputs):
        return _full_width(op.inputs[0].dtype)
    if op.name == "div":
        return _divides_by_power_of_two(op)
    if op.name == "broadcast_in_dim":
        return op.inputs[0].shape == ()
    return op.name == "convert_element_type" and _convert_is_exact(op)


def is_close(op: Op) -> bool:
    """Whether any IEEE 754 machine gives nearly the same number: `is_exact`, or rounded otherwise.

    Arithmetic below fp32 and narrowings that are undone are not: there a difference is as large as
    the narrow type's own last place.
    """
    return is_exact(op) or (op.name in _ROUNDED and _full_width(op.inputs[0].dtype))


def _full_width(dtype: jnp.dtype) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return bool(dtype.itemsize >= 4)
    return bool(jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_)


def is_identity(op: Op) -> bool:
    """Whether an operation only says something about its operand."""
    return op.name in IDENTITIES


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
        any(_is_rounding_factor(op) or _hides(op) for op in _chain(value, _ends_chain))
        or any(map(_adds_constant, _chain(value, _ends_sum)))
    )


def melts(op: Op) -> bool:
    """Whether XLA may make one of the roots or exponentials that an operation is given.

    `sqrt(x) * sqrt(x)` becomes `x`, `exp(a) * exp(b)` becomes `exp(a + b)`, and the larger of
    `erf(a)` and `erf(b)` becomes `erf` of the larger.
    """
    merged = _MELTING if op.name in PRODUCTS else _RISING if op.name in ("max", "min") else ()
    return bool(merged) and all(_shows(v, merged) for v in op.inputs)


def may_melt(value: Value) -> bool:
    """Whether a value is one that `melts` may find."""
    return _shows(value, _MELTING | _RISING)


def _shows(value: Value, names: Collection[str]) -> bool:
    return any(op.name in names for op in _chain(value, _ends_chain))


def scatters(value: Value) -> bool:
    """Whether XLA sees a scatter, which it makes one with what is added, and again with the next.

    `d + scatter(z, g)` becomes `scatter(d + z, g)`.
    """
    ops = _chain(value, lambda op, _: op.name not in SUMS | IDENTITIES)
    return any(op.name.startswith("scatter") for op in ops)


def _chain(value: Value, ends: Callable[[Op, Value], bool]) -> Iterator[Op]:
    """The operations that XLA sees from a value: up to those, included, that end the chain."""
    stack, seen = [value], set[Value]()
    while stack:
        value = without_walls(stack.pop())
        op = value.op
        if op is None or value in seen:
            continue
        seen.add(value)
        yield op
        if not ends(op, value):
            stack.extend(op.inputs)


def _hides(op: Op) -> bool:
    """Whether XLA sees more of an operation than we do: a body, or an array changed in place.

    It erases the walls of an interpreted Pallas kernel, a `custom_vmap`, a `custom_partitioning`,
    and makes of `jax.new_ref` the numbers that are written there.
    """
    if any(_compat.is_mutable(v.aval) for v in op.inputs):
        return True
    if (op.name in _ENDS and not may_be_erased(op)) or _is_compiled_kernel(op):
        return False
    params = (p if isinstance(p, tuple | list) else (p,) for p in op.params.values())
    return any(map(_compat.is_jaxpr, itertools.chain.from_iterable(params)))


def _is_compiled_kernel(op: Op) -> bool:
    return op.name == "pallas_call" and not op.params.get("interpret")


def _is_rounding_factor(op: Op) -> bool:
    if op.name == "mul":
        return not any(_is_power_of_two(_scalar_constant(v)) for v in op.inputs)
    if op.name == "integer_pow":
        return bool(op.params["y"] != 1)
    if op.name == "div":
        return _may_be(op.inputs[1], lambda divisor: not _is_power_of_two(divisor))
    if op.name == "pow":  # by a constant: erased, or made such a product
        return may_be_erased(op) and _scalar_constant(op.inputs[1]) != 1
    return op.name == "square" or is_one_product(op)


def _ends_chain(op: Op, value: Value) -> bool:
    """Whether XLA cannot fold a factor in front of this operation with one behind it."""
    if op.name in SUMS:
        return not any(_may_be(v, lambda number: number == 0) for v in op.inputs)
    if op.name == "select_n":
        return not _may_be(op.inputs[0], lambda _: True)  # else it is decided while compiling
    if op.name in ("max", "min", "clamp"):
        return not any(_may_be(v, _is_infinite) for v in op.inputs)
    if op.name.startswith("reduce_"):
        return math.prod(op.inputs[0].shape) > math.prod(value.shape)
    if op.name in _ENDS:
        return not may_be_erased(op)
    return _is_compiled_kernel(op)


def _adds_constant(op: Op) -> bool:
    """Whether an operation adds a constant to a number that rounds."""
    return (
        op.name in SUMS
        and any(is_known(unspread(v)) and _scalar_constant(v) != 0 for v in op.inputs)
        and jnp.issubdtype(op.inputs[0].dtype, jnp.inexact)
    )


def _ends_sum(op: Op, value: Value) -> bool:
    """Whether XLA cannot fold a constant added in front of this operation with one behind it."""
    if op.name == "mul" or op.name == "div":  # but by one, which is erased
        factors = op.inputs if op.name == "mul" else op.inputs[1:]
        return not any(_may_be(v, lambda number: number in (1, -1)) for v in factors)
    return op.name in PRODUCTS or _ends_chain(op, value)


def _may_be(value: Value, holds: Callable[[Any], bool]) -> bool:
    """Whether something holds for a constant; of a folded one the compiler alone knows that."""
    number = _scalar_constant(value)
    return unspread(value).is_folded or (number is not None and holds(number))


def _scalar_constant(value: Value) -> Any:
    """The one number of a constant, spread over a shape or not; `None` if it has several."""
    value = unspread(value)
    if not value.is_constant:
        return None
    numbers: np.ndarray = np.asarray(value.constant).reshape(-1)
    return numbers[0] if numbers.size and np.all(numbers == numbers[0]) else None


def _is_infinite(number: Any) -> bool:
    return bool(np.isinf(_as_double(number)))


def _is_power_of_two(number: Any) -> bool:
    mantissa, exponent = np.frexp(np.abs(_as_double(number)))
    return bool(mantissa == 0.5 and abs(exponent) < 120)


def _as_double(number: Any) -> np.float64:
    """A number of any type; NaN for none, or a complex one: nothing is taken for granted of it."""
    return np.float64(np.nan if number is None or np.iscomplexobj(number) else number)


def _divides_by_power_of_two(op: Op) -> bool:
    """Such a division is a multiplication by an exact reciprocal (a mean over 8 micro-batches)."""
    number, divisor = op.inputs
    return _full_width(number.dtype) and _is_power_of_two(_scalar_constant(divisor))


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
