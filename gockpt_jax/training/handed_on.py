"""What a loop hands on from turn to turn as it was given: a compiler takes it out of the loop.

`lax.fori_loop(0, n, lambda _, c: (c[0] * 1.0, c[1] + x), (zeros, y))` returns the zeros, however
often it turns. XLA finds that, and merges what went in with what follows the loop.
"""

from collections.abc import Sequence

from gockpt_jax.training.numbers import may_be_all_of, may_be_equal, may_be_one
from gockpt_jax.training.primitives import SAME_NUMBERS
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
    known = [i for i, value in enumerate(given) if is_known(value)]

    def stays(i: int) -> bool:
        """Whether it becomes the constant that it was, or one of those found that is the same."""
        if is_known(after[i]):
            return may_be_equal(after[i], given[i])
        same = (j for j in known if j in found and may_be_equal(given[i], given[j]))
        return any(_may_be(after[i], before[j]) for j in same)

    while more := {i for i in known if i not in found and stays(i)}:
        found |= more
    return found


def _may_be(value: Value, wanted: Value) -> bool:
    """Whether a compiler may find that a value is another, from which it is made."""
    stack, seen = [value], set[Value]()
    while stack:
        value = without_walls(stack.pop())
        if value is wanted:
            return True
        if (op := value.op) is not None and value not in seen:
            seen.add(value)
            stack.extend(_seen_through(op, value))
    return False


def _seen_through(op: Op, value: Value) -> Sequence[Value]:
    if op.name in SAME_NUMBERS:
        return (op.inputs[min(value.index, len(op.inputs) - 1)],)
    if op.name == "mul":
        return [x for x, y in (op.inputs, op.inputs[::-1]) if may_be_one(y)]
    if op.name == "div":
        return op.inputs[:1] if may_be_one(op.inputs[1]) else ()
    return may_be_all_of(op)
