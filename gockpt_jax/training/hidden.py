"""Operations of which XLA sees more than we do: a body, parts, an array that changes in place."""

import itertools

from gockpt_jax import _compat
from gockpt_jax.training.apart import computes_apart
from gockpt_jax.training.erased import may_be_erased
from gockpt_jax.training.primitives import ENDS
from gockpt_jax.training.values import Op, judged_once


@judged_once
def hides_a_body(op: Op) -> bool:
    """Whether XLA may find a product or a sum in an operation, where we see none.

    It erases the walls of an interpreted Pallas kernel, a `custom_vmap`, a `custom_partitioning`,
    and makes of `jax.new_ref` the numbers that are written there.
    """
    if any(_compat.is_mutable(v.aval) for v in op.inputs) or computes_apart(op):
        return True
    if (op.name in ENDS and not may_be_erased(op)) or is_compiled_kernel(op):
        return False
    params = (p if isinstance(p, tuple | list) else (p,) for p in op.params.values())
    return any(map(_compat.is_jaxpr, itertools.chain.from_iterable(params)))


def is_compiled_kernel(op: Op) -> bool:
    """Whether it is a Pallas kernel that is not interpreted."""
    return op.name == "pallas_call" and not op.params.get("interpret")
