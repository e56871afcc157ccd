"""What a loop hands on from turn to turn as it was given: a compiler takes it out of the loop.

`lax.fori_loop(0, n, lambda _, c: (c[0] * 1.0, c[1] + x), (zeros, y))` returns the zeros, however
often it turns. XLA finds that, and merges what went in with what follows the loop.
"""

import collections
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gockpt_jax.training.common_factors import ends_factors
from gockpt_jax.training.erased import is_one_product
from gockpt_jax.training.made import value_of
from gockpt_jax.training.numbers import may_be_all_of, may_be_equal
from gockpt_jax.training.primitives import CARRIED, SUMS
from gockpt_jax.training.values import Op, Value, is_known, without_walls


def turns_of(
    loop: Op, avals: Sequence[Any], carry: Sequence[Value],
    turn: Callable[[Sequence[Value]], list[Value]], axes: Collection[str],
) -> tuple[list[Value], set[int]]:  # fmt: skip
    """What any turn of a loop makes, and what of that stays as it was given to the first.

    What stays a constant is one to the turns as well, and may make others stay.

    Args:
      loop: It.
      avals: Of what goes from turn to turn.
      carry: What the first turn is given.
      turn: What one makes of what it is given.
      axes: Of the mesh, over which a `shard_map` around it maps.

    Returns:
      What a turn makes, and the positions of what stays.
    """
    op = Op(CARRIED, loop.inputs, {})
    before = [value_of(aval, op, i, axes) for i, aval in enumerate(avals)]
    stays = set[int]()
    while True:
        after = turn(before)
        stays |= _handed_on(carry, before, after[: len(carry)])
        known = [i for i in stays if is_known(carry[i]) and before[i] is not carry[i]]
        if not known:
            return after, stays
        for i in known:
            before[i] = carry[i]


def handing_on(
    made: list[Value], carry: Sequence[Value], stays: Collection[int], axes: Collection[str]
) -> list[Value]:
    """What a loop returns, seen through it where a compiler may; the host repeats none of it.

    Args:
      made: What it returns.
      carry: What its first turn is given.
      stays: Positions of what every turn hands on as it was given.
      axes: Of the mesh, over which a `shard_map` around it maps.
    """
    for i in stays:
        made[i] = value_of(made[i].aval, Op(lax.optimization_barrier_p, (carry[i],), {}), 0, axes)
    return made


def _handed_on(given: Sequence[Value], before: Sequence[Value], after: Sequence[Value]) -> set[int]:
    """Which of the values that go from turn to turn a compiler may find to stay as they are.

    Args:
      given: What the first turn is given.
      before: What any turn is given.
      after: What it makes of these, for the next.

    Returns:
      Their positions.
    """
    turning = {v.op for v in before if v.op and v.op.primitive is CARRIED}
    reached = [_reached(value) for value in after]

    def may_become(i: int, wanted: Value) -> bool:
        """Whether a compiler may find that a turn makes this value of the one at a position."""
        is_like = is_known(after[i]) or may_be_equal(after[i], wanted)  # of a part nobody knows
        return without_walls(wanted) in reached[i] and is_like

    positions = collections.defaultdict[Value, list[int]](list)
    for j, value in enumerate(before):
        positions[without_walls(value)].append(j)
    found = {i for i, value in enumerate(before[: len(after)]) if may_become(i, value)}

    def stays(i: int) -> bool:
        """Whether it becomes what the first turn is given, by itself or by one of those found."""
        if may_be_equal(after[i], given[i]) and not _is_made_of(after[i], turning):
            return True  # whatever turns
        # What it is made of is few of all: to compare them first would take long.
        near = found.intersection(j for v in reached[i] for j in positions.get(v, ()))
        return may_become(i, given[i]) or any(
            may_become(i, before[j]) and may_be_equal(given[i], given[j]) for j in near
        )

    while more := {i for i in range(len(after)) if i not in found and stays(i)}:
        found |= more
    return found


def _is_made_of(value: Value, ops: Collection[Op]) -> bool:
    """Whether a value is made of what any of these operations gives."""
    stack, seen = [value], set[Value]()
    while stack:
        made = stack.pop()
        if made.op in ops:
            return True
        if made.op is not None and made not in seen:
            seen.add(made)
            stack.extend((*made.op.inputs, *made.op.stands_for))
    return False


def _reached(value: Value) -> set[Value]:
    """What a value may be, as far as the operations tell that it is made by."""
    stack, seen = [value], set[Value]()
    while stack:
        made = without_walls(stack.pop())
        if made not in seen:
            seen.add(made)
            stack.extend(() if made.op is None else _seen_through(made.op))
    return seen


def _seen_through(op: Op) -> Sequence[Value]:
    """Of what an operation may give something that is still the same: of all that ends no chain."""
    if op.name in SUMS:  # of whole numbers one sum may undo another
        is_of_floats = jnp.issubdtype(op.inputs[0].dtype, jnp.inexact)
        return may_be_all_of(op) if is_of_floats else op.inputs
    if op.name == "mul" or is_one_product(op):  # constants may make one together
        return [x for x, y in (op.inputs, op.inputs[::-1]) if is_known(y)]
    if op.name == "div":
        return op.inputs[:1] if is_known(op.inputs[1]) else ()
    is_end = op.primitive is CARRIED or ends_factors(op)
    return () if is_end else op.inputs
