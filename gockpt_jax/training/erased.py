"""Operations of which the compiler makes nothing, or something simpler, as their sizes are.

A sort along one element, a sum over a mesh of one device, a scatter that overwrites all: XLA does
away with them, and then sees what is in front of them together with what is behind. So it does
where a matrix product is a multiplication, and where what is gathered or scattered is a slice.
"""

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.primitives import CUMULATIVE, LOGICAL, OF_MATRICES
from gockpt_jax.training.values import (
    Op,
    Value,
    contracted,
    is_known,
    num_devices,
    unspread,
)


def may_be_erased(op: Op) -> bool:
    """Whether XLA may see through an operation that otherwise hides what is in front of it."""
    names = op.params.get("axis_name", op.params.get("axes"))
    if names is not None:
        return num_devices(op.inputs[0].aval, names) == 1 or _keeps_to_itself(op)
    look = _BY_NAME.get("scatter" if op.name.startswith("scatter") else op.name)
    return look is not None and look(op)


def is_one_product(op: Op) -> bool:
    """Whether a matrix product, or what is like it, multiplies by a number, and adds nothing.

    An outer product of others does not: XLA moves no factor from behind it to the smaller arrays in
    front. But one by a constant row is a product by a constant: by one number, if all are that.
    """
    if op.name == "triangular_solve":  # over the number, on a TPU
        return _is_of_numbers(op)
    if op.name == "ragged_dot_general":
        return math.prod(contracted(op)) == 1
    if op.name == "dot_general":
        own = [
            math.prod(n for d, n in enumerate(v.shape) if d not in (*dims, *batch))
            for v, dims, batch in zip(op.inputs, *op.params["dimension_numbers"], strict=True)
        ]
        return math.prod(contracted(op)) == 1 and (min(own) == 1 or _has_a_constant(op))
    if op.name != "conv_general_dilated":
        return False
    filters = op.inputs[1]
    features = op.params["dimension_numbers"].rhs_spec[0]
    of_each = math.prod(n for d, n in enumerate(filters.shape) if d != features)
    return of_each == 1 and (filters.size == 1 or _has_a_constant(op))


def _keeps_to_itself(op: Op) -> bool:
    """Whether each device takes part in a collective alone, however many there are."""
    groups = op.params.get("axis_index_groups")
    pairs = op.params.get("perm", [(0, 1)])
    return (groups is not None and max(map(len, groups)) == 1) or all(a == b for a, b in pairs)


def _along(parameter: str) -> Callable[[Op], bool]:
    return lambda op: op.inputs[0].shape[op.params.get(parameter, -1)] == 1


def _is_of_numbers(op: Op) -> bool:
    """Whether matrices have one element each: a TPU's compiler factorizes none of these."""
    return op.inputs[0].shape[-2:] == (1, 1)


def _is_one_place(indices: Value) -> bool:
    """Whether there is one slice that is read, or written."""
    return math.prod(indices.shape[:-1]) == 1


def _gathers_slices(op: Op) -> bool:
    indices = op.inputs[1]
    if _is_one_place(indices) or is_known(indices):
        return True
    sizes = op.params["slice_sizes"]
    dims = op.params["dimension_numbers"].start_index_map
    return all(op.inputs[0].shape[d] == sizes[d] for d in dims)


def _scatters_slices(op: Op) -> bool:
    operand, indices, updates = op.inputs
    if _is_one_place(indices):
        return True
    numbers = op.params["dimension_numbers"]
    skipped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = (d for d in range(len(operand.shape)) if d not in skipped)
    sizes = dict(zip(window, (updates.shape[d] for d in numbers.update_window_dims), strict=True))
    dims = numbers.scatter_dims_to_operand_dims
    return all(operand.shape[d] == sizes.get(d, 1) for d in dims)


def _is_a_whole_power(op: Op) -> bool:
    exponent = unspread(op.inputs[1])
    if not exponent.is_constant:
        return exponent.is_folded
    return bool(np.all(exponent.constant == np.round(exponent.constant)))


def _has_a_constant(op: Op) -> bool:
    return any(map(is_known, op.inputs))


def _may_keep_bits(op: Op) -> bool:
    """Whether it is no flag's, of which comparisons make others: `~~bits` are those of a number."""
    return op.inputs[0].dtype != jnp.bool_ or _has_a_constant(op)


_BY_NAME: Mapping[str, Callable[[Op], bool]] = {
    "gather": _gathers_slices,
    "scatter": _scatters_slices,
    "pow": _is_a_whole_power,
    "while": lambda op: op.ends_at_known_turn,
    "sort": _along("dimension"),
    "top_k": _along("axis"),
    **dict.fromkeys(CUMULATIVE, _along("axis")),
    **dict.fromkeys(OF_MATRICES, _is_of_numbers),
    **dict.fromkeys(LOGICAL, _may_keep_bits),
}
