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
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from gockpt_jax.errors import StepMismatchError
from gockpt_jax.options import WindowOptions
from gockpt_jax.training.call import CallForm, NotLookedAtError, Positions, leaf_paths
from gockpt_jax.training.places import identical
from gockpt_jax.training.stand_in import StandIn
from gockpt_jax.training.wrapped import StepObserver, WrappedStep

_MAX_RESULTS = 8
"""Structures of results of which it is known where the state is in them."""


class Missing(NamedTuple):
    """Where the new state is not.

    Attributes:
      why: Why not, in words.
      given: The structure of the states that the call was given: others may come back.
    """

    why: str
    given: Any


class InnerCall:
    """One call of a step around a jitted function; called in the function's place.

    Args:
      inner: The function, wrapped.
      states: As the step was given them.

    Attributes:
      states: The same.
      looked_at: Their leaves, if what the function returns is to be looked at.
      result: What it has returned, if so.
    """

    def __init__(self, inner: Callable[..., Any], states: Any):
        self._inner = inner
        self.states = states
        self.looked_at: Sequence[Any] | None = None
        self.result: Any = None

    def look(self) -> None:
        """What the call returns is to be looked at; before it changes anything in place."""
        self.looked_at = jax.tree.leaves(self.states)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, wrapped."""
        result = self._inner(*args, **kwargs)
        if self.looked_at is not None:
            self.result = result
        return result


class InnerForm(CallForm):
    """How a jitted function inside another object is called.

    Args:
      jitted: The function.
      outer: How the object is called; it knows the settings of the function's `jax.jit` call.
    """

    def __init__(self, jitted: Callable[..., Any], outer: CallForm):
        super().__init__(jitted, 0, outer.settings)
        self._outer = outer
        self._here = threading.local()  # each thread's call that is under way
        # Structures of results, the last few, and where the new state's leaves are in them, or that
        # it is not. Not by their hashes: NNX has equal ones whose hashes differ.
        self._results: list[tuple[Any, Sequence[int | None] | Missing]] = []

    @contextlib.contextmanager
    def during(self, call: InnerCall) -> Iterator[None]:
        """This thread makes a call of the object around it."""
        before = getattr(self._here, "call", None)  # a signal handler may step, too
        try:
            self._here.call = call
            yield
        finally:
            self._here.call = before

    @property
    def _call(self) -> InnerCall:
        call: InnerCall = self._here.call
        return call

    def is_abstract(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """The object around it has looked."""
        del args, kwargs
        return False

    @property
    def told_state(self) -> str:
        """Those of the object around it."""
        return self._outer.told_state

    def state_leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Those that the object around it was given."""
        del args, kwargs
        return jax.tree.leaves(self._call.states)

    def found(self, new: Sequence[Any] | Missing, result: Any) -> None:
        """Takes down where the state is in results like one.

        Args:
          new: Its leaves, or why there are none.
          result: Of the jitted function.
        """
        leaves, structure = jax.tree.flatten(result)
        at = new if isinstance(new, Missing) else identical(new, leaves)
        others = [known for known in self._results if known[0] != structure]
        self._results = [*others, (structure, at)][-_MAX_RESULTS:]

    def locate(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out_tree: Any, before: Any = None
    ) -> Positions:
        """Finds the state's arrays again, by identity.

        Leaves that do not go through the program (functions, numbers, what the step does not
        return) are not part of its state; saves take them as they are.

        Raises:
          NotLookedAtError: if no call of such a state that returns such a structure was looked at;
            this one is.
          StepMismatchError: if none of them does, or the state does not come back.
        """
        del before
        call = self._call
        leaves = jax.tree.leaves(call.states)
        new_positions = next((at for tree, at in self._results if tree == out_tree), ())
        if isinstance(new_positions, Missing):
            if new_positions.given == jax.tree.structure(call.states):
                raise StepMismatchError(new_positions.why)
            new_positions = ()
        if len(leaves) != len(new_positions):
            call.look()
            raise NotLookedAtError
        old_positions = identical(leaves, jax.tree.leaves(self.dynamic(args, kwargs)))
        unique: dict[int, tuple[int, str]] = {}  # leaves that share an array are one here
        for old, new, path in zip(
            old_positions, new_positions, leaf_paths(call.states), strict=True
        ):
            if old is not None and new is not None:
                unique.setdefault(old, (new, path))
        if not unique:
            raise StepMismatchError(
                "no array of the state goes through the wrapped step. Say where the state is with "
                "`wrap(step, state=..., state_out=...)`."
            )
        outputs, paths = zip(*unique.values(), strict=True)
        return Positions(tuple(unique), outputs, paths)


class NestedStep(StandIn):
    """A train step around a jitted function of its own; called in its place.

    Args:
      step: The object that the user made.
      attribute: Where it holds its jitted function.
      observer: Is told of every update.
      form: How the user calls the step, and where the state is.
      options: The user's, of windows.
    """

    def __init__(
        self, step: Callable[..., Any], attribute: str, observer: StepObserver, form: CallForm,
        options: WindowOptions,
    ):  # fmt: skip
        super().__init__(step)
        self._attribute = attribute
        self._form = form
        jitted = jitted_in(step, attribute)
        self._inner_form = InnerForm(jitted, form)
        self._inner = WrappedStep(jitted, observer, self._inner_form, options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one update, exactly as the user's step would."""
        if self._form.is_abstract(args, kwargs):
            return self.step(*args, **kwargs)
        call = InnerCall(self._inner, self._form.state_of(args, kwargs))
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
                new = self._form.new_leaves_of(result, call.states)
        except StepMismatchError as error:  # another such call raises it, before it donates any
            found(Missing(str(error), jax.tree.structure(call.states)), call.result)
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


def jitted_in(step: Any, attribute: str) -> Callable[..., Any]:
    """The jitted function that a step holds, wherever it is being called."""
    with _placing:
        jitted: Callable[..., Any] = getattr(step, attribute)
        return jitted.step if isinstance(jitted, _ByThread) else jitted
