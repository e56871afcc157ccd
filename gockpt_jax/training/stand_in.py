"""What is called in place of a function."""

import functools
import types
from collections.abc import Callable
from typing import Any


class StandIn:
    """Called in place of a function, whose name and attributes it has, as a method of a class too.

    Everything that a subclass does not have (`lower`, `trace`, `__wrapped__`, ...) is the
    function's own.

    Args:
      step: The function.
    """

    def __init__(self, step: Callable[..., Any]):
        # Whoever wraps this one in turn (`functools.wraps`, `nnx.cached_partial`) asks for nothing
        # but `__dict__`, and has the function's attributes from there.
        kept = getattr(step, "__dict__", {}).items()
        self.__dict__.update({name: x for name, x in kept if not hasattr(type(self), name)})
        self.step = step
        functools.update_wrapper(self, step, updated=())
        self.__wrapped__ = getattr(step, "__wrapped__", step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; a subclass does more."""
        return self.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "step":  # not yet set: unpickling or a failed constructor
            raise AttributeError(name)
        return getattr(self.step, name)

    def __copy__(self) -> "StandIn":
        """Itself, as of a function."""
        return self

    def __deepcopy__(self, memo: Any) -> "StandIn":
        """Itself, as of a function."""
        return self

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """As a method of its class, as functions are."""
        return self if owner is None else types.MethodType(self, owner)
