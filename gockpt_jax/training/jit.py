"""`jit`: `jax.jit` for functions of more than arrays, with a program that `wrap` can see."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gockpt_jax.checks import told

_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct)


def jit(fn: Callable[..., Any], **options: Any) -> "JittedFunction":
    """Jits a function whose arguments and results may hold leaves that are not arrays.

    For steps that some framework's own decorator would jit, hiding their program from `wrap`: give
    it the Python function instead. Leaves that are neither arrays nor numbers (functions, strings,
    configurations) are static: equal ones share a compilation. For functions of arrays alone this
    is `jax.jit`.

    Args:
      fn: The function; its arguments and results are trees.
      **options: Those of `jax.jit`: `donate_argnums`, `in_shardings`, `static_argnames`, ...

    Returns:
      A function to call in its place, with `trace`, `lower` and `eval_shape` as `jax.jit` has them.

    Raises:
      TypeError: if `fn` cannot be called; when called, if a leaf that is no array cannot be hashed.

    Example:
      >>> import jax.numpy as jnp
      >>> step = jit(lambda state, x: {**state, "w": state["activation"](state["w"] * x)})
      >>> step({"w": jnp.float32(0.0), "activation": jnp.cos}, 2.0)["w"].item()
      1.0
    """
    if not callable(fn):
        raise TypeError(
            f"`jit` needs a function, got {told(fn)}. As a decorator with options write "
            "`@functools.partial(gockpt_jax.jit, donate_argnums=0)`."
        )
    return JittedFunction(fn, options)


class JittedFunction:
    """What `jit` returns.

    Args:
      fn: The user's function.
      options: Those of `jax.jit`.
    """

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]):
        @functools.wraps(fn)
        def of_arrays(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _shown((args, kwargs))
            return _hidden(fn(*args, **kwargs))

        functools.update_wrapper(self, fn)  # first: it copies what `fn` has of its own
        self.jitted_fn = jax.jit(of_arrays, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the jitted function."""
        args, kwargs = _hidden((args, kwargs))
        return _shown(self.jitted_fn(*args, **kwargs))

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """As a method of its class, as functions are."""
        return self if owner is None else types.MethodType(self, owner)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`; static leaves show as nodes without leaves."""
        args, kwargs = _hidden((args, kwargs))
        return self.jitted_fn.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`."""
        args, kwargs = _hidden((args, kwargs))
        return self.jitted_fn.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`."""
        args, kwargs = _hidden((args, kwargs))
        return _shown(self.jitted_fn.eval_shape(*args, **kwargs))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A leaf that is no array, as part of the tree's structure."""

    value: Any

    def __post_init__(self) -> None:
        """Refuses what no program can be kept for."""
        try:
            hash(self.value)
        except TypeError as error:
            raise TypeError(
                f"`jit` got a leaf of type `{type(self.value).__name__}`, which is neither an "
                "array nor hashable, so no program can be kept for it. Make it an array, or give "
                "its type `__hash__` and `__eq__`."
            ) from error


def _hidden(tree: Any) -> Any:
    def is_array(x: Any) -> bool:
        return isinstance(x, _NUMBERS) or hasattr(x, "__jax_array__")

    return jax.tree.map(lambda x: x if is_array(x) else _Static(x), tree)


def _shown(tree: Any) -> Any:
    def is_static(x: Any) -> bool:
        return isinstance(x, _Static)

    return jax.tree.map(lambda x: x.value if is_static(x) else x, tree, is_leaf=is_static)
