"""What `wrap` makes of a step: what is called in its place, or why there is no such thing."""

import inspect
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from gockpt_jax import _compat
from gockpt_jax.errors import WrapError
from gockpt_jax.options import WindowOptions
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.nested import NestedStep, jitted_in
from gockpt_jax.training.places import Place, Places, as_places
from gockpt_jax.training.wrapped import StepObserver, WrappedStep

Wrapped: TypeAlias = "WrappedStep | NestedStep | types.MethodType"
"""What the user calls in place of the step; of a bound method, a bound method."""


def wrap_step(
    step: Callable[..., Any], observer: StepObserver, options: WindowOptions, *,
    state: Places, state_out: Places | None,
) -> Wrapped:  # fmt: skip
    """Wraps a jitted train step, wherever its `jax.jit` lies.

    Args:
      step: What `jax.jit`, `nnx.jit`, `eqx.filter_jit` or `gockpt_jax.jit` returned; a method too.
      observer: Is told of every update.
      options: The user's, of windows.
      state: Positions or names of the state among the arguments.
      state_out: Positions or names of the new state in the result; found if `None`.

    Raises:
      WrapError: if `step` is not callable, is wrapped already, or a place is not one.

    Warns:
      SnapshotOnlyWarning: if the step cannot be armed.
    """
    _refuse_no_step(step)
    if isinstance(step, types.MethodType):
        _refuse_bound_state(step)
        wrapped = wrap_step(
            step.__func__, observer, options,
            state=_behind_self(as_places("state", state)), state_out=state_out,
        )  # fmt: skip
        return types.MethodType(wrapped, step.__self__)
    if isinstance(step, WrappedStep | NestedStep):
        raise WrapError(
            "`wrap` was given a step that is wrapped already; wrap it once. Of two managers one "
            "wraps it, and both save the state that it returns. In a notebook's cell, give the "
            "wrapped one a name of its own, as in `step = manager.wrap(train_step)`, or wrap the "
            "one inside: `train_step.step`."
        )
    attribute = _compat.inner_jit(step)
    settings = _compat.jit_settings(_jitted(step)) or _compat.JitSettings()
    form = CallForm(step, state, settings, state_out)
    if attribute is None:
        return WrappedStep(step, observer, form, options)
    return NestedStep(step, attribute, observer, form, options)


def _jitted(step: Any) -> Any:
    """What runs in it: itself, or the jitted function that it holds."""
    attribute = _compat.inner_jit(step)
    return step if attribute is None else jitted_in(step, attribute)


def _refuse_no_step(step: Any) -> None:
    """Refuses what cannot return a state when it is called.

    Raises:
      WrapError: if it is one of these; says what to give instead.
    """
    if not callable(step) or isinstance(step, type):
        raise WrapError(
            f"`wrap` needs a jitted train step, got a `{type(step).__name__}`. Give it the function"
            " that `jax.jit` returned, as in `manager.wrap(train_step)`."
        )
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_one(step) for is_one in kinds):
        raise WrapError(
            f"`wrap` needs a jitted train step, got `{step.__name__}`, a coroutine or a generator: "
            "what it returns is no state. Wrap the jitted function that it calls."
        )


def _behind_self(places: tuple[Place, ...]) -> tuple[Place, ...]:
    """Where the arguments of a bound method are among those of its function."""
    return tuple(p + 1 if isinstance(p, int) and p >= 0 else p for p in places)


def _refuse_bound_state(method: types.MethodType) -> None:
    """Refuses a method of the state itself: the bound one would go in again and again.

    Raises:
      WrapError: if the method's object goes into the program, and holds arrays.
    """
    settings = _compat.jit_settings(_jitted(method.__func__))
    if settings is None or 0 in settings.static_argnums:
        return
    owner = type(method.__self__).__name__
    name = f"{owner}.{method.__name__}"
    if any(isinstance(x, jax.Array) for x in jax.tree.leaves(method.__self__)):
        raise WrapError(
            f"`wrap` was given `{name}` bound to one `{owner}`, which holds arrays: each call "
            f"would start from these. Wrap the function: `{name} = manager.wrap({name}, "
            f"state=...)`, where position 0 is the `{owner}`."
        )
