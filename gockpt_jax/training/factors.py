"""What a compiler may see a factor to be: something smaller that is spread, or flags."""

from collections.abc import Sequence

import jax.numpy as jnp

from gockpt_jax.training.numbers import may_be_all_of, may_be_one
from gockpt_jax.training.primitives import IDENTITIES
from gockpt_jax.training.values import (
    Op,
    Ratio,
    Value,
    in_order,
    is_known,
    unspread,
    unspread_through_walls,
)


def may_be_spread(value: Value) -> bool:
    """Whether a compiler sees a number that is spread, or a row: be it after what makes it.

    With that it folds a constant in front, as with another constant.
    """
    for source in in_order(unspread(value), _not_judged):
        if source.is_spread is None:
            source.is_spread = _is_spread(source)
    return _is_smaller_or_spread(value)


def _not_judged(source: Value) -> Sequence[Value]:
    op = source.op
    if source.is_spread is not None or op is None or _not_judged in op.verdicts:
        return ()
    sources = map(unspread, (*op.inputs, *may_be_all_of(op)))
    if not (todo := [v for v in sources if v.is_spread is None]):
        op.verdicts[_not_judged] = False  # of none of its results, be there a thousand
    return todo


def _is_smaller_or_spread(value: Value) -> bool:
    source, per = unspread_through_walls(value)
    if source.size < value.size * per:
        return True
    assert source.is_spread is not None, "what it is made of is asked first"
    return source.is_spread


def _is_spread(source: Value) -> bool:
    """As what it is made of says, of which that is known."""
    op = source.op
    if source.size == 1 or is_known(source):
        return True
    if op is None or not op.inputs:
        return False
    if any(map(_is_smaller_or_spread, may_be_all_of(op))):
        return True
    return all(_is_spread_by(op, v, source) or _is_smaller_or_spread(v) for v in op.inputs)


def _is_spread_by(op: Op, value: Value, result: Value) -> bool:
    """Whether an operation goes by elements, and spreads one of its operands."""
    shapes = [v.shape for v in op.inputs]
    is_elementwise = all(len(shape) in (0, len(result.shape)) for shape in shapes) and all(
        set(sizes) <= {1, size}
        for size, *sizes in zip(result.shape, *filter(None, shapes), strict=True)
    )
    return is_elementwise and value.size < result.size


def may_be_flags(factor: Value) -> bool:
    """Whether a compiler may find that numbers are flags that the step has made."""
    stack: list[tuple[Value, Ratio]] = [(factor, 1)]
    seen = set[Value]()
    while stack:
        value, per = unspread_through_walls(*stack.pop())
        op = value.op
        if value.dtype == jnp.bool_ and value.shape:
            is_given = op is None and value.size == factor.size * per
            if not is_given:
                return True
        if op is None or value in seen:
            continue
        seen.add(value)
        if op.name in ("mul", "div"):
            pairs = (op.inputs, op.inputs[::-1]) if op.name == "mul" else (op.inputs,)
            stack.extend((x, per) for x, y in pairs if may_be_one(y))
        else:
            is_seen_through = op.name in IDENTITIES or op.name == "neg"
            behind = op.inputs if is_seen_through else may_be_all_of(op)
            stack.extend((v, per) for v in behind)
    return False
