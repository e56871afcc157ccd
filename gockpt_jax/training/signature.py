"""What `jax.jit` tells programs apart by, where a compiled one would take the call."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from gockpt_jax import _compat


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """Of one call. Shapes, dtypes and shardings are not in it: executables compare these.

    Attributes:
      static: The static arguments, with their types.
      weak_types: Of each array that goes in, whether its dtype gives way to another's.
      committed: Likewise, whether it stays where it is, and nobody told `jax.jit` where that is.
        Executables move those that do not; for them `jax.jit` lets the compiler choose the place,
        and with it the order of sums.
      settings: Of JAX, as programs depend on them.
    """

    static: tuple[Any, ...]
    weak_types: tuple[bool, ...]
    committed: tuple[bool, ...]
    settings: Any

    @classmethod
    def of(
        cls, static: tuple[Any, ...], flat: Sequence[Any], in_shardings: Sequence[Any]
    ) -> "Signature":
        """Looks at a call, under the settings of now."""
        committed = tuple(
            told is None and getattr(x, "committed", False)
            for x, told in zip(flat, in_shardings, strict=True)
        )
        return cls(static, tuple(map(_is_weak, flat)), committed, _compat.trace_context())

    def refuse_other(self, now: "Signature") -> None:
        """Compares with those of another call.

        Raises:
          TypeError: if `jax.jit` would run another program for it.
        """
        if self.static != now.static:
            raise TypeError("a static argument changed")
        if self.weak_types != now.weak_types:
            raise TypeError("the weak type of an argument changed")
        if self.committed != now.committed:
            raise TypeError("an argument that was committed to its devices is not, or is now")
        if self.settings != now.settings:
            raise TypeError("a setting of JAX changed")

    def is_of_these_settings(self) -> bool:
        """Whether what is lowered now would be lowered as it was then."""
        return bool(self.settings == _compat.trace_context())


def _is_weak(x: Any) -> bool:
    weak: bool | None = getattr(x, "weak_type", None)  # of arrays fast, of others by JAX's rule
    return jax.typeof(x).weak_type if weak is None else weak
