"""What `jax.jit` tells programs apart by, where a compiled one would take the call."""

import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gockpt_jax import _compat


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """Of one call. Shapes and dtypes of the state are not in it: executables compare these.

    Attributes:
      static: The static arguments, with their types.
      weak_types: Of each array that goes in, whether its dtype gives way to another's.
      committed: Likewise, whether it stays where it is, and nobody told `jax.jit` where that is.
        Executables move those that do not; for them `jax.jit` lets the compiler choose the place,
        and with it the order of sums.
      settings: Of JAX, as programs depend on them.
      beside: Shape, dtype, weak type and, if it is committed to one, the sharding of each array
        beside the state. Executables compare these too; they tell one kind of call from another.
    """

    static: tuple[Any, ...]
    weak_types: tuple[bool, ...]
    committed: tuple[bool, ...]
    settings: Any
    beside: tuple[Any, ...]

    @classmethod
    def of(
        cls, static: tuple[Any, ...], flat: Sequence[Any], in_shardings: Sequence[Any],
        beside: Sequence[int],
    ) -> "Signature":  # fmt: skip
        """Looks at a call, under the settings of now.

        In one loop without calls: it runs over all leaves at every armed step.

        Args:
          static: The static arguments, with their types.
          flat: All others, flat.
          in_shardings: What the user told `jax.jit` of these.
          beside: Positions of those that are no state.
        """
        weak_types: list[bool] = []
        committed: list[bool] = []
        for x, told in zip(flat, in_shardings, strict=True):
            try:
                is_weak, stays = x.aval.weak_type, x.committed
            except AttributeError:  # an array of NumPy's, or a number
                is_weak, stays = jax.typeof(x).weak_type, False
            weak_types.append(is_weak)
            committed.append(stays and told is None)
        others = tuple((weak_types[i], *_kind(flat[i])) for i in beside)
        return cls(static, tuple(weak_types), tuple(committed), _compat.trace_context(), others)

    def is_like(self, other: "Signature") -> bool:
        """Whether two calls are of one kind: but for how the state lies, which settles."""
        mine, its = ((x.static, x.settings, x.beside) for x in (self, other))
        return bool(mine == its)

    def refuse_other(self, now: "Signature", name_of: Callable[[int], str]) -> None:
        """Compares with those of another call.

        Args:
          now: Of that call.
          name_of: What the user calls an array that goes in.

        Raises:
          TypeError: if `jax.jit` would run another program for it.
        """
        if self.static != now.static:
            raise TypeError(_changed(self.static, now.static))
        if self.weak_types != now.weak_types:
            name = name_of(_first_other(self.weak_types, now.weak_types))
            raise TypeError(f"the weak type of {name} changed (a Python number has one)")
        if self.committed != now.committed:
            i = _first_other(self.committed, now.committed)
            was, is_now = ("was", "is not") if self.committed[i] else ("was not", "is")
            raise TypeError(
                f"{name_of(i)} {was} committed to its devices and {is_now}: place it at every call "
                "as the step returns it (`jax.device_put` with a sharding)"
            )
        if self.settings != now.settings:
            raise TypeError(_changed_setting(self.settings, now.settings))

    def is_of_these_settings(self) -> bool:
        """Whether what is lowered now would be lowered as it was then."""
        return bool(self.settings == _compat.trace_context())


def committed_sharding(leaf: Any) -> Any:
    """Where a leaf stays; `None` if it may be moved, or is no array."""
    if isinstance(leaf, jax.Array) and getattr(leaf, "committed", True):
        return leaf.sharding
    return None


def committed_format(leaf: Any) -> Any:
    """The sharding and, but for typed keys, how the elements lie: both as `jax.jit` takes them."""
    return committed_sharding(leaf) and getattr(leaf, "format", leaf.sharding)


def _kind(x: Any) -> tuple[Any, ...]:
    sharding = x.sharding if getattr(x, "committed", False) else None
    return getattr(x, "shape", ()), getattr(x, "dtype", type(x)), sharding


def _changed(static: Sequence[Any], now: Sequence[Any]) -> str:
    """Which static argument did, of `(type, value)`, or `(name, type, value)` by keyword."""
    if len(static) != len(now):
        return "a static argument was given in another way"
    was, other = next((a, b) for a, b in zip(static, now, strict=True) if a != b)
    name = f"`{was[0]}`" if len(was) == 3 else "a static argument"
    return f"{name} changed from {reprlib.repr(was[-1])} to {reprlib.repr(other[-1])}"


def _changed_setting(was: Any, now: Any) -> str:
    """Of what JAX holds no name is known, but a value."""
    are_alike = isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now)
    both = zip(was, now, strict=True) if are_alike else ()
    told = [f" from {reprlib.repr(a)} to {reprlib.repr(b)}" for a, b in both if a != b][:1]
    return f"a setting of JAX changed{''.join(told)}: set it once, before the first step"


def _first_other(mine: Sequence[bool], others: Sequence[bool]) -> int:
    return next(i for i, (a, b) in enumerate(zip(mine, others, strict=True)) if a != b)
