"""Checks of what users give, with errors that name it and say what to do; and words for these."""

import operator
import reprlib
from typing import Any

_short = reprlib.Repr()
_short.maxlong, _short.maxstring, _short.maxother = 500, 80, 80


def told(value: Any) -> str:
    """What came, in an error: not all of a state's arrays."""
    return _short.repr(value)


def counted(number: int, one: str, more: str = "") -> str:
    """So many of something, for a reader.

    Args:
      number: How many.
      one: What one of them is called, or does.
      more: Several of them; "": the same with an s.

    Example:
      >>> counted(1, "step"), counted(2, "step"), counted(1, "leaf is late", "leaves are late")
      ('1 step', '2 steps', '1 leaf is late')
    """
    return f"{number} {one if number == 1 else more or one + 's'}"


def describe_bytes(num_bytes: float) -> str:
    """Bytes for a reader: three digits and a decimal unit.

    Example:
      >>> describe_bytes(1_234_000_000), describe_bytes(950)
      ('1.23 GB', '950 B')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def as_count(
    name: str, value: Any, advice: str, *, least: int = 1, most: int | None = None,
    no_integer: type[Exception] = ValueError,
) -> int:  # fmt: skip
    """An integer as Python has them; NumPy's and JAX's are as good.

    Args:
      name: What the user calls it.
      value: What came.
      advice: What to do instead, a sentence.
      least: The smallest that can be meant.
      most: The largest.
      no_integer: Raised where it is none.

    Raises:
      ValueError: if it is less than `least`, or more than `most`.
    """
    try:
        count = None if is_flag(value) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < least or (most is not None and count > most):
        wrong = no_integer if count is None else ValueError
        upto = "" if most is None else f" and at most {most}"
        raise wrong(
            f"`{name}` must be an integer of at least {least}{upto}, got {told(value)}. {advice}"
        )
    return count


def of_kind(name: str, value: Any, kind: type, advice: str) -> Any:
    """What a user gave, if it is of a kind.

    Raises:
      TypeError: if it is of another.
    """
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be a `{kind.__name__}`, got {told(value)}. {advice}")
    return value


def is_flag(value: Any) -> bool:
    """Whether it is a truth value, which Python takes for a number, too."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
