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
    found = {i for i, value in enumerate(after) if _may_be(value, before[i])}

    def stays(i: int) -> bool:
        """Whether it becomes what the first turn is given, by itself or by one of those found."""
        if is_known(given[i]) and is_known(after[i]):
            return may_be_equal(after[i], given[i])
        same = (j for j in found if may_be_equal(given[i], given[j]))
        return any(_may_be(after[i], v) for v in (given[i], *(before[j] for j in same)))

    while more := {i for i in range(len(after)) if i not in found and stays(i)}:
        found |= more
    return found


def _may_be(value: Value, wanted: Value) -> bool:
    """Whether a compiler may find that a value is another, from which it is made."""
    stack, seen = [value], set[Value]()
    while stack:
        made = without_walls(stack.pop())
        if made is wanted:
            return may_be_equal(value, wanted)
        if made.op is not None and made not in seen:
            seen.add(made)
            stack.extend(_seen_through(made.op))
    return False


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
