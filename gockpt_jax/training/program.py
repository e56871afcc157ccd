"""One traced step: its state, its cut, and the armed executable that returns the cut."""

import concurrent.futures
import copy
import functools
import re
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from gockpt_jax import _compat
from gockpt_jax.training.armed import ArmedResult, with_outputs
from gockpt_jax.training.call import CallForm, Positions, argument_name
from gockpt_jax.training.last_result import LastResult
from gockpt_jax.training.returned import StateInResult
from gockpt_jax.training.signature import Signature, committed_format
from gockpt_jax.training.step_cut import ArraySpec, StepCut, cut_step
from gockpt_jax.training.unarmable import (
    CannotArmError,
    refuse_hidden_arguments,
    refuse_no_state,
    refuse_state_in_place,
)

_FLAT_NAME = re.compile(r"'?\bflat\[(\d+)\]'?")
"""What JAX calls an argument of the armed step (`armed.py`)."""
_OF_RUNTIME = re.compile(r"[A-Z_]+: ")
"""Begins what is no check of arguments, such as a device that is full for once: a `ValueError` too,
where JAX has called the program before."""


class StepProgram:
    """One traced step: how it is called, where it may be cut, and how it runs armed.

    Args:
      traced: The user's jitted function, traced for a call.
      form: How it is called.
      args: Positional arguments of that call, alive.
      kwargs: Keyword arguments of it.
      even_for_nothing: Whether leaves may leave early that gain no bytes.
      before: Leaves of the result of the call before, if there was one.

    Attributes:
      positions: Of the state's leaves.
      cut: What may leave early, and what is retained for it.
      out_tree: Structure of the result.
      returned: Finds the new state in results.
      has_served: Whether it has run armed in a window.

    Raises:
      CannotArmError: if its program takes arguments that the call does not show.
      StepMismatchError: if the state is not found in the result.
    """

    def __init__(
        self, traced: Any, form: CallForm, args: tuple[Any, ...], kwargs: dict[str, Any],
        *, even_for_nothing: bool, before: Any = None,
    ):  # fmt: skip
        self._form = form
        self._jaxpr = traced.jaxpr  # alone: jax 0.7's trace holds the arguments, a whole state
        self._remembered = weakref.ref(traced.jaxpr)
        flat, self._in_tree = _flatten(form.dynamic(args, kwargs))
        refuse_hidden_arguments(traced, flat)
        refuse_state_in_place(form.state_leaves(args, kwargs))
        given = _compat.specified_shardings(traced, "in_shardings")
        self._in_shardings: tuple[Any, ...] = given or (None,) * len(flat)
        # Now: a donated array forgets how it lay.
        self._given_specs, self._in_formats = _specs(flat), self._formats(flat)
        self._in_specs = self._input_specs(flat)
        self.out_tree: Any = _compat.result_structure(traced)
        self.positions: Positions = form.locate(args, kwargs, self.out_tree, before)
        self._beside = sorted(set(range(len(flat))).difference(self.positions.inputs))
        self._traced_for = self._signature(flat, args, kwargs)
        specs = _state_specs(traced.jaxpr, self.positions)
        refuse_no_state(specs, self.positions.paths, form.told_state)
        news = [new for _, new in specs]
        self.returned = StateInResult(self.out_tree, self.positions.outputs, news)
        self._even_for_nothing = even_for_nothing
        self._donated = _compat.donated(traced)
        self._out_shardings: tuple[Any, ...] = (
            _compat.specified_shardings(traced, "out_shardings") or ()
        )
        self._executable: concurrent.futures.Future[Any] | None = None  # until it is armed
        self.has_served = False
        self.cut: StepCut = self._cut(exact=True)

    def _cut(self, *, exact: bool) -> StepCut:
        for_nothing = self._even_for_nothing
        return cut_step(self._jaxpr, self.positions, even_for_nothing=for_nothing, exact=exact)

    def rounded(self) -> "StepProgram":
        """The same trace with a cut that accepts rounding, so that more leaves leave early.

        Only before the program is armed.
        """
        assert not self.is_armed, "the trace is dropped when a program is armed"
        other = copy.copy(self)
        other.cut = self._cut(exact=False)
        return other

    def returns_at(self, result: Sequence[Any]) -> None:
        """The armed step is to put its results where the user's own executable did.

        Without it, where the user told `jax.jit`.

        Args:
          result: Leaves of what the call that was traced has returned, alive. That of another call
            may lie elsewhere, and the armed step would move the state there.
        """
        self._out_shardings = tuple(map(committed_format, result))

    def arm(self) -> None:
        """Lowers the armed step on this thread and compiles it on another.

        Matmul precision, dtype promotion and `set_mesh` are thread-local, so lowering stays on the
        trainer's thread.
        """
        settings = self._form.settings
        armed = jax.jit(
            with_outputs(self._jaxpr, self.cut.sites),
            donate_argnums=self._donated,
            keep_unused=settings.keep_unused,
            **self._placements(),
        )
        with warnings.catch_warnings():  # the user's own step tells of it, if it is so
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            lowered = armed.lower(*self._in_specs)
        thread = concurrent.futures.ThreadPoolExecutor(1, "gockpt-compile-step")
        compiling = thread.submit(lowered.compile, compiler_options=settings.compiler_options)
        thread.shutdown(wait=False)  # it ends when that is done
        self._executable = compiling
        del self._jaxpr, self._in_specs  # they hold constants, and what the user may change

    @property
    def is_armed(self) -> bool:
        """Whether the armed step has been compiled, or is being so."""
        return self._executable is not None

    @property
    def _compiling(self) -> concurrent.futures.Future[Any]:
        assert self._executable is not None, "nobody has asked for the armed step to be compiled"
        return self._executable

    def wait_until_ready(self) -> None:
        """Returns when the armed step has been compiled, or has failed to."""
        concurrent.futures.wait([self._compiling])

    def why_not_ready(self) -> str | None:
        """Why the armed step cannot run yet, or ever; `None` if it can."""
        if self._executable is None or not self._executable.done():
            return "the armed step was still compiling"
        failure = self._executable.exception()
        return None if failure is None else f"the armed step did not compile: {failure}"

    def give_up(self, error: CannotArmError) -> None:
        """The armed step cannot run after all, and says so as if it did not compile."""
        self._executable = concurrent.futures.Future()
        self._executable.set_exception(error)

    @property
    def is_given_up(self) -> bool:
        """Whether the armed step has turned out to be one that cannot run."""
        return self.is_armed and self._compiling.done() and self._compiling.exception() is not None

    @property
    def cut_shardings(self) -> Sequence[jax.sharding.Sharding] | None:
        """Where the armed step returns each of `cut.arrays`; waits for its compilation.

        `None` for a step that changes an argument in place: JAX counts what that returns, too, and
        then does not tell.
        """
        try:
            placed: Sequence[jax.sharding.Sharding] = self._compiling.result().output_shardings
        except ValueError:
            return None
        return placed[self.out_tree.num_leaves :]

    def executable(self) -> Any:
        """The armed step as JAX compiled it; waits for its compilation, and raises its error."""
        return self._compiling.result()

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[Any] | None = None
    ) -> ArmedResult:
        """Runs the armed step; waits for its compilation.

        Args:
          args: Positional arguments.
          kwargs: Keyword arguments.
          flat: What `flat_call` makes of them, if that is known.

        Raises:
          TypeError: before anything is dispatched, if the user's own function would run another
            program for this call.
          ValueError: likewise, for shardings.
          CannotArmError: likewise, if JAX refuses every such call (int4 that was placed, jax 0.10).
        """
        flat = self.flat_call(args, kwargs) if flat is None else flat
        name_of = functools.partial(argument_name, self._form.dynamic(args, kwargs))
        self._traced_for.refuse_other(self._signature(flat, args, kwargs), name_of)
        try:
            results = self.executable()(*flat)
        except (TypeError, ValueError) as error:
            error.args = (_FLAT_NAME.sub(lambda found: name_of(int(found[1])), str(error)),)
            if not _OF_RUNTIME.match(str(error)) and self._lies_as_lowered_for(flat):
                raise CannotArmError("JAX refuses the very call it was compiled for") from error
            raise
        new, cut = results[: self.out_tree.num_leaves], results[self.out_tree.num_leaves :]
        state = [new[i] for i in self.positions.outputs]
        return ArmedResult(jax.tree.unflatten(self.out_tree, new), state, cut)

    def _lies_as_lowered_for(self, flat: Sequence[Any]) -> bool:
        """Whether arrays are alive, and lie as the armed step was told that they would."""
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in flat):
            return False
        return _specs(flat) == self._given_specs and self._formats(flat) == self._in_formats

    def _formats(self, flat: Sequence[Any]) -> list[Any]:
        """How arguments lie: as they do where they stay, else as the user has told `jax.jit`."""
        return [committed_format(x) or s for x, s in zip(flat, self._in_shardings, strict=True)]

    def is_of_these_settings(self) -> bool:
        """Whether `arm` would lower the program as the user's function would be lowered now."""
        return self._traced_for.is_of_these_settings()

    def is_forgotten(self) -> bool:
        """Whether JAX has dropped the trace: the user's function, traced anew, may be another.

        So it is after `jax.clear_caches()`, as of a loop that changes a global that its step reads.
        """
        return self._remembered() is None

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it was made for such a call, as far as that can be seen without running it."""
        if self.is_forgotten():
            return False
        try:
            signature = self._signature(self.flat_call(args, kwargs), args, kwargs)
        except (TypeError, ValueError):  # nor does JAX, maybe
            return False
        return signature == self._traced_for

    def has_such_a_state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the state of a call that it takes has the shapes and dtypes that it was made for.

        `takes` does not look, for executables do before they run.
        """
        return self.cut.leaf_specs == _specs(self.state_leaves(self.flat_call(args, kwargs)))

    def is_like(self, other: "StepProgram") -> bool:
        """Whether another takes the calls that this one takes, or took before the state settled."""
        is_same = self._in_tree == other._in_tree
        return bool(is_same and self._traced_for.is_like(other._traced_for))

    def flat_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of a call that are not static, flat.

        Raises:
          TypeError: if the call has another structure than the one that was traced.
        """
        flat, tree = _flatten(self._form.dynamic(args, kwargs))
        if tree != self._in_tree:
            was, now = self._in_tree.num_leaves, tree.num_leaves
            what = f"{now} leaves, where there were {was}"
            if was == now:
                what = "other containers, or other data in them that is no array (an NNX attribute)"
            raise TypeError(f"its arguments are not those it was traced for: {what}")
        return flat

    def state_leaves(self, flat: Sequence[Any]) -> list[Any]:
        """The state's leaves among a call's flat arguments."""
        return [flat[i] for i in self.positions.inputs]

    def same_state(self, flat: Sequence[Any]) -> list[Any]:
        """The state's leaves likewise, if they are such as it was made for.

        Raises:
          TypeError: if one has another shape or dtype.
        """
        leaves = self.state_leaves(flat)
        for path, was, leaf in zip(self.cut.paths, self.cut.leaf_specs, leaves, strict=True):
            # Asked of every leaf at every step of a window; `jax.typeof` takes longer.
            is_same = getattr(leaf, "shape", None) == was.shape and leaf.dtype == was.dtype
            if not is_same and (now := ArraySpec.of(jax.typeof(leaf))) != was:
                raise TypeError(f"{path} of its state is {now}, where it was {was}")
        return leaves

    def state_in(self, last: LastResult) -> list[jax.Array] | None:
        """The state's leaves in what its step has returned last; `None` if another program has."""
        return self.returned.leaves(last.new_state)

    def _signature(
        self, flat: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Signature:
        static = self._form.static(args, kwargs)
        return Signature.of(static, flat, self._in_shardings, self._beside)

    def _input_specs(self, flat: Sequence[Any]) -> list[Any]:
        """What to lower the armed step for; of an array that changes in place, itself."""
        avals = [v.aval for v in _compat.open_jaxpr(self._jaxpr)[0].invars]
        return [
            leaf
            if _compat.is_mutable(aval)
            else jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, sharding=place, weak_type=aval.weak_type
            )
            for aval, place, leaf in zip(avals, self._in_formats, flat, strict=True)
        ]

    def _placements(self) -> dict[str, Any]:
        if all(s is None for s in self._out_shardings):
            return {}
        # The compiler places the cut values: asking for another place could change the step.
        return {"out_shardings": [*self._out_shardings, *(None,) * len(self.cut.sites)]}


def _specs(flat: Sequence[Any]) -> tuple[ArraySpec, ...]:
    return tuple(ArraySpec.of(jax.typeof(x)) for x in flat)


def _state_specs(jaxpr: Any, positions: Positions) -> list[tuple[ArraySpec, ArraySpec]]:
    """What each leaf of the state goes in as, and comes out as."""
    opened, _ = _compat.open_jaxpr(jaxpr)
    return [
        (ArraySpec.of(opened.invars[i].aval), ArraySpec.of(opened.outvars[o].aval))
        for i, o in zip(positions.inputs, positions.outputs, strict=True)
    ]


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree)  # whose tree JAX does not type
