"""Steps whose `jax.jit` lies inside another object: `nnx.jit`, `eqx.filter_jit`, our own `jit`.

Such an object turns the user's arguments into a tree of arrays, calls its jitted function and turns
the result back (or updates the arguments in place). During a call of ours that jitted function is
replaced by a `WrappedStep` around it. Where the state went is not read from the object's private
layout: the arrays themselves are found again, by identity.

The object is the user's: other threads may be calling it meanwhile, as it is, wrapped, or wrapped
by another manager. What stands in the jitted function's place asks which thread is calling, and
what is known of a call is that thread's.
"""

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax

from gockpt_jax import _compat
from gockpt_jax.errors import StepMismatchError, WrapError
from gockpt_jax.options import WindowOptions
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.inner import InnerCall, InnerForm
from gockpt_jax.training.places import Place, Places, as_places
from gockpt_jax.training.stand_in import StandIn
from gockpt_jax.training.wrap import StepObserver, WrappedStep

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
    jitted = step if attribute is None else _jitted_in(step, attribute)
    settings = _compat.jit_settings(jitted) or _compat.JitSettings()
    form = CallForm(step, state, settings, state_out)
    if attribute is None:
        return WrappedStep(step, observer, form, options)
    inside = InnerForm(jitted, settings, form)
    inner = WrappedStep(jitted, observer, inside, options)
    return NestedStep(step, attribute, inner, outer_form=form, inner_form=inside)


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
    settings = _compat.jit_settings(method.__func__)
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


class NestedStep(StandIn):
    """A train step around a jitted function of its own; called in its place.

    Args:
      step: The object that the user made.
      attribute: Where it holds its jitted function.
      inner: That function, wrapped.
      outer_form: How the user calls the step, and where the state is.
      inner_form: How the step calls the function.
    """

    def __init__(
        self, step: Callable[..., Any], attribute: str, inner: WrappedStep, *,
        outer_form: CallForm, inner_form: InnerForm,
    ):  # fmt: skip
        super().__init__(step)
        self._attribute = attribute
        self._inner = inner
        self._outer_form = outer_form
        self._inner_form = inner_form

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one update, exactly as the user's step would."""
        if self._outer_form.is_abstract(args, kwargs):
            return self.step(*args, **kwargs)
        call = InnerCall(self._inner, self._outer_form.state_of(args, kwargs))
        if self._inner.program is None and self._inner.why_not is None:
            call.look()  # else it may ask for that itself
        behind = self._inner.losing_no_state()
        with self._inner_form.during(call), self._wrapped_inside(call):
            result = self.step(*args, **kwargs)
        with behind:
            self._look(call, result)
        return result

    def _look(self, call: InnerCall, result: Any) -> None:
        """Notes where the state's arrays have come out of the jitted function, if it is asked."""
        old, found = call.looked_at, self._inner_form.found
        if old is None or call.result is None:
            return
        new = jax.tree.leaves(call.states)
        try:
            if all(a is b for a, b in zip(new, old, strict=False)):  # none changed in place
                new = self._outer_form.new_leaves_of(result, call.states)
        except StepMismatchError as error:  # another such call raises it, before it donates any
            found(str(error), call.result)
        else:
            found(new, call.result)

    @contextlib.contextmanager
    def _wrapped_inside(self, call: InnerCall) -> Iterator[None]:
        """The step's own object, since it may know itself by identity, for one call."""
        with _placing:
            inside = getattr(self.step, self._attribute)
            if not isinstance(inside, _ByThread):
                inside = _ByThread(inside)
                object.__setattr__(self.step, self._attribute, inside)  # Equinox's are frozen
            inside.num_calls += 1
        try:
            with inside.called_as(call):
                yield
        finally:
            with _placing:
                inside.num_calls -= 1
                if not inside.num_calls:
                    object.__setattr__(self.step, self._attribute, inside.step)


_placing = threading.RLock()  # a signal handler may come while it is held, and call the step


class _ByThread(StandIn):
    """In the place of a jitted function, while wrapped steps around it are being called.

    Args:
      step: The function; threads that call no wrapped step call it itself.

    Attributes:
      num_calls: Of wrapped steps, under way.
    """

    def __init__(self, step: Callable[..., Any]):
        super().__init__(step)
        self.num_calls = 0
        self._here = threading.local()

    @contextlib.contextmanager
    def called_as(self, inner: Callable[..., Any]) -> Iterator[None]:
        """This thread calls a wrapped step in the function's place."""
        before = getattr(self._here, "inner", self.step)
        try:
            self._here.inner = inner
            yield
        finally:
            self._here.inner = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what this thread calls here."""
        return getattr(self._here, "inner", self.step)(*args, **kwargs)


def _jitted_in(step: Any, attribute: str) -> Callable[..., Any]:
    """The jitted function that a step holds, wherever it is being called."""
    with _placing:
        jitted: Callable[..., Any] = getattr(step, attribute)
        return jitted.step if isinstance(jitted, _ByThread) else jitted
