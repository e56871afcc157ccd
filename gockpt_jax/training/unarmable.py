"""What cannot be armed: why, and what would help."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from gockpt_jax import _compat
from gockpt_jax.errors import StepMismatchError


class CannotArmError(Exception):
    """A step's program cannot be armed: why, and what would help."""


def why_unarmable(step: Any) -> str | None:
    """Why a step cannot be armed; `None` if it can, as far as is known before it has run."""
    if callable(getattr(step, "trace", None)):
        if _compat.jit_settings(step) is None:
            return (
                f"this version of JAX, {jax.__version__}, does not tell static arguments apart; "
                "please report it"
            )
        return None
    kind = type(step).__name__
    if hasattr(step, "as_text"):
        remedy = "pass the function that `jax.jit` returned, before `.lower().compile()`"
    elif isinstance(step, functools.partial):
        remedy = "wrap the jitted function, and bind arguments to the wrapped one"
    elif kind == "PmapFunction" or (kind == "function" and hasattr(step, "lower")):  # jax 0.7; 0.8
        kind = "jax.pmap"
        remedy = "use `jax.jit` of `jax.shard_map(..., check_vma=False)` over a mesh"
    elif kind == "function":
        remedy = "wrap the function in `jax.jit` first, or the jitted one that it calls"
    else:
        remedy = "jit the function inside with `gockpt_jax.jit`"
    return f"a `{kind}` has no program to trace; {remedy}"


def refuse_hidden_arguments(traced: Any, flat: Sequence[Any]) -> None:
    """Refuses a program of more than its call shows.

    Raises:
      CannotArmError: if it takes other arguments.
    """
    if len(_compat.open_jaxpr(traced.jaxpr)[0].invars) != len(flat):
        raise CannotArmError(
            "its program takes arguments that the call does not show; pass what it closes over as "
            "arguments"
        )


def refuse_state_in_place(leaves: Sequence[Any]) -> None:
    """Refuses a state that is not passed on from call to call.

    Raises:
      CannotArmError: if a leaf changes in place.
    """
    if any(_compat.is_mutable(getattr(x, "aval", None)) for x in leaves):
        raise CannotArmError(
            "its state changes in place (`jax.new_ref`); give it arrays, and return the new ones"
        )


def refuse_no_state(
    specs: Sequence[tuple[Any, Any]], paths: Sequence[str], told_state: str
) -> None:
    """What comes out as something else in every leaf is a batch, say, and a loss of its structure.

    Args:
      specs: What each leaf goes in as, and comes out as.
      paths: Theirs.
      told_state: Which arguments they are of, in words.

    Raises:
      StepMismatchError: if no leaf keeps its shape and dtype.
    """
    if specs and all(old != new for old, new in specs):
        (old, new), path = specs[0], paths[0]
        raise StepMismatchError(
            f"the wrapped step does not update {told_state}, taken for its state (`state=` names "
            f"it, by default the first argument): {path} goes in as {old} and comes out as {new}, "
            "and no other leaf stays what it was. Say where the state is with `wrap(step, "
            "state=..., state_out=...)`."
        )
