"""What is known of constants, as a compiler sees them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gockpt_jax.training.values import Value, unspread


def may_be(value: Value, holds: Callable[[Any], bool]) -> bool:
    """Whether something holds for a constant; of a folded one the compiler alone knows that."""
    number = scalar_constant(value)
    return unspread(value).is_folded or (number is not None and holds(number))


def scalar_constant(value: Value) -> Any:
    """The one number of a constant, spread over a shape or not; `None` if it has several."""
    value = unspread(value)
    if not value.is_constant:
        return None
    numbers: np.ndarray = np.asarray(value.constant).reshape(-1)
    return numbers[0] if numbers.size and np.all(numbers == numbers[0]) else None


_WORKED_OUT: Mapping[str, Callable[..., Any]] = {
    "neg": np.negative, "abs": np.abs, "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "max": np.maximum, "min": np.minimum, "div": np.divide, "sqrt": np.sqrt,
}  # fmt: skip


def folded_number(value: Value, levels: int = 8) -> Any:
    """The one number of a constant, or of what is made of constants as IEEE 754 says it.

    Returns:
      It; `None` if it has several, or the compiler alone knows it.
    """
    value = unspread(value)
    if value.is_constant:
        number = scalar_constant(value)
        return None if number is None else np.asarray(number, value.dtype)[()]
    if not (value.is_folded and value.op and levels and value.op.name in _WORKED_OUT):
        return None
    numbers = [folded_number(v, levels - 1) for v in value.op.inputs]
    if any(number is None for number in numbers):
        return None
    with np.errstate(all="ignore"):
        return _WORKED_OUT[value.op.name](*numbers)


def is_infinite(number: Any) -> bool:
    """Whether a number, if it is one, is infinite."""
    return bool(np.isinf(_as_double(number)))


def is_power_of_two(number: Any) -> bool:
    """Whether a number, if it is one, is a power of two, far from where products underflow."""
    mantissa, exponent = np.frexp(np.abs(_as_double(number)))
    return bool(mantissa == 0.5 and abs(exponent) < 120)


def _as_double(number: Any) -> np.float64:
    """A number of any type; NaN for none, or a complex one: nothing is taken for granted of it."""
    return np.float64(np.nan if number is None or np.iscomplexobj(number) else number)
