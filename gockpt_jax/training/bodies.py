"""Equations that run one body as it is: calls, and branches decided while tracing."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex

from gockpt_jax.training.primitives import CALLS


def body_of(eqn: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """What a call runs, and with which of its operands; `None` of what is no call."""
    if (branch := _decided_branch(eqn)) is not None:
        return branch, operands[1:]
    name = CALLS.get(eqn.primitive.name)
    return (eqn.params[name], operands) if name in eqn.params else None


def can_open(eqn: Any) -> bool:
    """Whether a call may be replaced by its body in the armed program without losing anything.

    Others than `jit` carry rules (a derivative, a rematerialisation), which that would drop.
    """
    if eqn.primitive.name != "jit" and _decided_branch(eqn) is None:
        return False
    placed = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return not any(isinstance(s, jax.sharding.Sharding) for s in placed)


def _decided_branch(eqn: Any) -> Any | None:
    """The branch of a `cond` that was decided while tracing; the compiler keeps it alone."""
    if eqn.primitive.name != "cond" or not isinstance(eqn.invars[0], jex.Literal):
        return None
    return eqn.params["branches"][int(eqn.invars[0].val)]  # which JAX has seen to be one of them
