"""Parts of arrays that a program has put together itself: a compiler takes them as they were put.

Of `concatenate([x, zeros])[n:]` it makes the zeros, of the imaginary part of `complex(x, 0)` zero.
"""

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy as np
from jax import lax

from gockpt_jax.training.erased import may_be_erased
from gockpt_jax.training.numbers import may_be_all_of, may_be_one, number_of
from gockpt_jax.training.primitives import IDENTITIES, JOINS, LAYOUTS, PARTS
from gockpt_jax.training.values import Op, Value, is_known, unspread, without_walls

FEW = 8
"""Arrays that are put together, and maybe taken apart again, which are looked at each by itself. Of
more, as of all leaves of a flat vector, each sum of two parts would look at all."""

_KEEP = ("slice", "split", "pad")
"""Some elements, of which it is known by their parameters where they are."""
_Region = Sequence[tuple[float, float]]
"""Where in an array: from where to where along each dimension."""


def sliced(value: Value, op: Op) -> Sequence[Value]:
    """What a slice is of, where it is of arrays that were joined: of the others it has nothing."""
    joined = without_walls(op.inputs[0]).op
    if joined is None or joined.name != "concatenate" or "dimension" not in joined.params:
        return op.inputs  # or the turns of a loop, written out
    if not op.params:
        return op.inputs  # some turn's
    along = joined.params["dimension"]
    start, end = _kept(value, op)[along]
    ends = _ends(joined, [v.shape[along] for v in joined.inputs] if joined.ends is None else ())
    parts = joined.inputs[bisect.bisect_right(ends, start) : bisect.bisect_left(ends, end) + 1]
    return parts if len(parts) <= FEW else ()


def _ends(op: Op, sizes: Sequence[int]) -> Sequence[int]:
    """Where each array ends of those that are joined, or that one is taken apart into."""
    if op.ends is None:
        op.ends = list(itertools.accumulate(sizes))
    return op.ends


def is_known_part(value: Value) -> bool:
    """Whether a compiler may find that a value is a constant which was put into a larger one."""
    op = value.op
    if op is None:
        return False
    if op.name in ("real", "imag"):
        half = half_of(op)
        return half is not None and is_known(half)
    if not (_is_part(op) and op.params) or not all(map(is_known, op.inputs[1:])):
        return False  # or nobody knows where it lies: in some turn of a loop
    if op.name in _KEEP and (parts := sliced(value, op)) is not op.inputs:
        return bool(parts) and all(map(is_known, parts))
    joined = _put_together(op)
    if joined is None:
        return False
    if joined.name in JOINS - {"pad"}:
        return any(map(is_known, joined.inputs))
    rest = joined.inputs[1 if joined.name == "pad" else 0]
    written = _written(joined) if is_known(rest) else None
    if written is None:
        return False
    taken = _taken(value, op) if joined is without_walls(op.inputs[0]).op else None
    return taken is None or any(
        end <= start or stop <= begin
        for (begin, end), (start, stop) in zip(taken, written, strict=True)
    )


def _is_part(op: Op) -> bool:
    """Whether it is of some elements of an array: less than nothing is padded where some go."""
    is_cropped = op.name == "pad" and any(min(low, high) < 0 for low, high, _ in _padding(op))
    return is_cropped or op.name in PARTS


def _padding(op: Op) -> Sequence[tuple[int, int, int]]:
    return op.params["padding_config"]  # type: ignore[no-any-return]


def _put_together(op: Op) -> Op | None:
    """What put together the array of which a part is taken, in front of what moves its elements."""
    while (inner := unspread(op.inputs[0]).op) is not None:
        is_part = _is_part(inner)
        if not is_part and inner.name in JOINS | {"dynamic_update_slice", "scatter", "scatter-add"}:
            return inner
        if not is_part and inner.name not in IDENTITIES | LAYOUTS:
            erased = inner.inputs if may_be_erased(inner) else may_be_all_of(inner)
            if inner.name == "mul":
                erased = [x for x, y in (inner.inputs, inner.inputs[::-1]) if may_be_one(y)]
            if not erased:
                return None
            inner = Op(lax.optimization_barrier_p, tuple(erased[:1]), {})
        op = inner
    return None


def _taken(value: Value, op: Op) -> _Region | None:
    """Where a part is of what it is taken from; `None` where that is not looked up."""
    if op.name in _KEEP:
        return _kept(value, op)
    return _at(op.inputs[1:], op.params["slice_sizes"]) if op.name == "dynamic_slice" else None


def _kept(value: Value, op: Op) -> _Region:
    """Where what these keep is of what they are given."""
    if op.name == "slice":
        return list(zip(op.params["start_indices"], op.params["limit_indices"], strict=True))
    if op.name == "pad":
        config = zip(op.inputs[0].shape, _padding(op), strict=True)
        return [(max(0, -low), n + min(0, high)) for n, (low, high, _) in config]
    along, end = op.params["axis"], _ends(op, op.params["sizes"])[value.index]
    starts = [end - n if d == along else 0 for d, n in enumerate(value.shape)]
    return [(start, start + n) for start, n in zip(starts, value.shape, strict=True)]


def _written(op: Op) -> _Region | None:
    """Where something is padded, or written; `None` where the compiler does not know."""
    if op.name == "pad":
        config = zip(op.inputs[0].shape, _padding(op), strict=True)
        return [(low, low + n + max(0, n - 1) * between) for n, (low, _, between) in config]
    if op.name == "dynamic_update_slice":
        return _at(op.inputs[2:], op.inputs[1].shape)
    numbers, (whole, indices, updates) = op.params["dimension_numbers"], op.inputs
    along = numbers.scatter_dims_to_operand_dims
    if indices.size != 1 or len(along) != 1 or numbers.operand_batching_dims:
        return None  # of several slices it makes no one, and of more dimensions this is rare
    dims = [d for d in range(len(whole.shape)) if d not in numbers.inserted_window_dims]
    sizes = dict(zip(dims, (updates.shape[d] for d in numbers.update_window_dims), strict=True))
    nowhere = Value(indices.aval, constant=0, is_folded=True)
    starts = [indices if d in along else nowhere for d in range(len(whole.shape))]
    return _at(starts, [sizes.get(d, 1) for d in range(len(whole.shape))])


def _at(starts: Sequence[Value], sizes: Sequence[int]) -> _Region | None:
    """Where what has such sizes lies from there on."""
    places = [number_of(start) if is_known(start) else math.nan for start in starts]
    if any(np.ndim(place) or math.isnan(place) for place in places):
        return None
    return [(place, place + size) for place, size in zip(places, sizes, strict=True)]


def half_of(op: Op) -> Value | None:
    """What a complex number was made of, of which this is the real or the imaginary part."""
    half, inner = (0 if op.name == "real" else 1), without_walls(op.inputs[0]).op
    while inner is not None and inner.name in IDENTITIES | LAYOUTS | {"neg", "conj"}:
        inner = without_walls(inner.inputs[0]).op
    return inner.inputs[half] if inner is not None and inner.name == "complex" else None
