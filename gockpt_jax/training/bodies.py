"""Equations that run one body as it is: calls, and branches decided while tracing."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex

# Calls whose body is the function itself. Only `jit` may also be opened in the armed program; the
# others carry rules (a derivative, a rematerialisation) that opening would drop. A gradient often
# comes straight out of a rematerialised block: what made it must be seen.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
_OPENABLE = frozenset({"jit", "pjit"})


def body_of(eqn: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """What a call runs, and with which of its operands; `None` of what is no call."""
    if (branch := _decided_branch(eqn)) is not None:
        return branch, operands[1:]
    name = _CALLS.get(eqn.primitive.name)
    return (eqn.params[name], operands) if name in eqn.params else None


def can_open(eqn: Any) -> bool:
    """Whether a call may be replaced by its body in the armed program without losing anything."""
    if eqn.primitive.name not in _OPENABLE and _decided_branch(eqn) is None:
        return False
    placed = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return not any(isinstance(s, jax.sharding.Sharding) for s in placed)


def _decided_branch(eqn: Any) -> Any | None:
    """The branch of a `cond` that was decided while tracing; the compiler keeps it alone."""
    if eqn.primitive.name != "cond" or not isinstance(eqn.invars[0], jex.Literal):
        return None
    return eqn.params["branches"][int(eqn.invars[0].val)]  # which JAX has seen to be one of them
