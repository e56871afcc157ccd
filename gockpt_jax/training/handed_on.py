"""What a loop hands on from turn to turn as it was given: a compiler takes it out of the loop.

`lax.fori_loop(0, n, lambda _, c: (c[0] * 1.0, c[1] + x), (zeros, y))` returns the zeros, however
often it turns. XLA finds that, and merges what went in with what follows the loop.
"""

from collections.abc import Sequence

from gockpt_jax.training.common_factors import ends_factors
from gockpt_jax.training.numbers import may_be_all_of, may_be_equal
from gockpt_jax.training.primitives import CARRIED, SUMS
from gockpt_jax.training.values import Op, Value, is_known, without_walls


def handed_on(given: Sequence[Value], before: Sequence[Value], after: Sequence[Value]) -> set[int]:
    """Which of the values that go from turn to turn a compiler may find to stay as they are.

    Args:
      given: What the first turn is given.
      before: What any turn is given.
      after: What it makes of these, for the next.

    Returns:
      Their positions.
    """
    reached = [_reached(value) for value in after]

    def may_become(i: int, wanted: Value) -> bool:
        """Whether a compiler may find that a turn makes this value of the one at a position."""
        return without_walls(wanted) in reached[i] and may_be_equal(after[i], wanted)

    position = {value: j for j, value in enumerate(before)}
    found = {i for value, i in position.items() if may_become(i, value)}

    def stays(i: int) -> bool:
        """Whether it becomes what the first turn is given, by itself or by one of those found."""
        if is_known(given[i]) and is_known(after[i]):
            return may_be_equal(after[i], given[i])
        # What it is made of is few of all: to compare them first would take long.
        near = found.intersection(position[v] for v in reached[i] if v in position)
        return may_become(i, given[i]) or any(
            may_become(i, before[j]) and may_be_equal(given[i], given[j]) for j in near
        )

    while more := {i for i in range(len(after)) if i not in found and stays(i)}:
        found |= more
    return found


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
    if op.name in SUMS:
        return may_be_all_of(op)
    if op.name == "mul":  # constants may make one together
        return [x for x, y in (op.inputs, op.inputs[::-1]) if is_known(y)]
    if op.name == "div":
        return op.inputs[:1] if is_known(op.inputs[1]) else ()
    is_end = op.primitive is CARRIED or ends_factors(op)
    return () if is_end else op.inputs
