"""How a jitted function is called that lies inside another object (`nested.py`).

What is known of a call is its thread's: others may be calling the object meanwhile.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from gockpt_jax import _compat
from gockpt_jax.errors import StepMismatchError
from gockpt_jax.training.call import CallForm, NotLookedAtError, Positions, leaf_paths
from gockpt_jax.training.places import identical

_MAX_RESULTS = 8
"""Structures of results of which it is known where the state is in them."""


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
      settings: What is known of its `jax.jit` call.
      outer: How the object is called.
    """

    def __init__(
        self, jitted: Callable[..., Any], settings: _compat.JitSettings, outer: CallForm
    ):  # fmt: skip
        super().__init__(jitted, 0, settings)
        self._outer = outer
        self._here = threading.local()  # each thread's call that is under way
        # Structures of results, the last few, and where the new state's leaves are in them, or that
        # it is not. Not by their hashes: NNX has equal ones whose hashes differ.
        self._results: list[tuple[Any, Sequence[int | None] | str]] = []

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

    def found(self, new: Sequence[Any] | str, result: Any) -> None:
        """Takes down where the state is in results like one.

        Args:
          new: Its leaves, or why there are none.
          result: Of the jitted function.
        """
        leaves, structure = jax.tree.flatten(result)
        at = new if isinstance(new, str) else identical(new, leaves)
        others = [known for known in self._results if known[0] != structure]
        self._results = [*others, (structure, at)][-_MAX_RESULTS:]

    def locate(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out_tree: Any, before: Any = None
    ) -> Positions:
        """Finds the state's arrays again, by identity.

        Leaves that do not go through the program (functions, numbers, what the step does not
        return) are not part of its state; saves take them as they are.

        Raises:
          NotLookedAtError: if no call that returns such a structure was looked at; this one is.
          StepMismatchError: if none of them does, or the state does not come back.
        """
        del before
        call = self._call
        leaves = jax.tree.leaves(call.states)
        new_positions = next((at for tree, at in self._results if tree == out_tree), ())
        if isinstance(new_positions, str):
            raise StepMismatchError(new_positions)
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
