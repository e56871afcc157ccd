"""What operations give, and whether a compiler knows it at once."""

from collections.abc import Collection
from typing import Any

from gockpt_jax import _compat
from gockpt_jax.training.erased import may_be_erased
from gockpt_jax.training.numbers import is_settled
from gockpt_jax.training.parts import is_known_part
from gockpt_jax.training.primitives import KNOWN
from gockpt_jax.training.values import Op, Value, is_everywhere, is_known


def value_of(aval: Any, op: Op, index: int, axes: Collection[str]) -> Value:
    """What an operation gives at a position.

    Args:
      aval: Its abstract value.
      op: The operation.
      index: The position among its results.
      axes: Of the mesh, over which a `shard_map` around it maps.
    """
    certain = is_everywhere(op, index, axes) and not _compat.varies(aval)
    folded = op.is_of_folded and bool(op.inputs or op.name in KNOWN)
    folded = folded or is_settled(aval, op) or is_known_part(Value(aval, op, index))
    folded = folded or (op.name == "sort" and may_be_erased(op) and is_known(op.inputs[index]))
    folded = folded or bool(op.stands_for and op.stands_for[index].is_folded)
    return Value(aval, op, index, is_everywhere=certain, is_folded=folded, arguments=op.arguments)
