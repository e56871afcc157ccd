"""Numbers as people write them: `8B` parameters, `80GB`, `25GB/s`."""

import re
from typing import Any

import click

_NUMBER = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(/s)?", re.IGNORECASE)
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BYTES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12} | {
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40
}  # fmt: skip

_MOST = 1e30
"""No model has as many parameters, nor a machine as many bytes; the figures stay finite."""


class Quantity(click.ParamType):  # type: ignore[type-arg]  # Generic from click 8.2 on.
    """A positive number with a unit of a table.

    Args:
      name: What it is called in the usage.
      units: Their factors, in lower case.
      example: A right one, for the error.
      is_rate: Whether `/s` may follow.
    """

    def __init__(self, name: str, units: dict[str, float], example: str, *, is_rate: bool = False):
        self.name = name
        self._units = units
        self._example = example
        self._is_rate = is_rate

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number in its base unit."""
        if isinstance(value, int | float):
            return float(value)
        match = _NUMBER.fullmatch(value.strip())
        unit = match[2].lower() if match else ""
        if match is None or unit not in self._units or (match[3] and not self._is_rate):
            return self._refuse(value, param, ctx)
        try:
            number = float(match[1]) * self._units[unit]
        except ValueError:
            return self._refuse(value, param, ctx)
        if not 0 < number < _MOST:
            self.fail(f"`{value}` must be above 0 and below {_MOST:g}.", param, ctx)
        return number

    def _refuse(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        units = ", ".join(u for u in self._units if u)
        self.fail(f"`{value}` is not understood: expected a number, then {units} or nothing, as in "
                  f"`{self._example}`.", param, ctx)  # fmt: skip


COUNT = Quantity("COUNT", _COUNTS, "8B")
BYTES = Quantity("BYTES", _BYTES, "80GB")
RATE = Quantity("RATE", _BYTES, "25GB/s", is_rate=True)
SECS = Quantity("SECS", {"": 1.0, "s": 1.0, "ms": 1e-3}, "0.8")


def say_count(number: float) -> str:
    """As `COUNT` reads it."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.3g}"


def say_number(number: float) -> str:
    """Three digits, all of them above the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def say_secs(secs: float) -> str:
    """Three digits, down to a millisecond."""
    if secs < 0.0005:
        return "0"
    if secs < 1:
        return f"{secs:.3f}"
    return say_number(secs)


def say_percent(part: float) -> str:
    """Down to a thousandth of a percent."""
    if part < 5e-6:
        return "0%"
    return f"{part * 100:.3f}%" if part < 0.01 else f"{part * 100:.3g}%"
