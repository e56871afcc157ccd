"""What a compiler scatters straight into the array that it is added to, unless it is returned."""

from typing import Any, NamedTuple

from gockpt_jax.training.merging import ends_sum
from gockpt_jax.training.numbers import may_be_zero
from gockpt_jax.training.primitives import SUMS
from gockpt_jax.training.values import Op, Value, judged_once, through_wall


class Added(NamedTuple):
    """What is added to a sum: its shards in a `shard_map`, the whole outside.

    Attributes:
      dtype: Its elements.
      shape: Where it is looked at from; `None`: nobody knows.
    """

    dtype: Any
    shape: tuple[int, ...] | None

    def may_be(self, value: Value) -> bool:
        """Whether a value looks like it."""
        return value.dtype == self.dtype and self.shape in (value.shape, None)

    def behind(self, value: Value) -> list[tuple[Value, "Added"]]:
        """What a value is made of, and how this looks from there."""
        if (inner := through_wall(value)) is not None:
            if inner.shape == value.shape:
                return [(inner, self)]
            is_whole = value.shape == self.shape
            return [(inner, self._replace(shape=inner.shape if is_whole else None))]
        return [] if value.op is None else [(v, self) for v in value.op.inputs]


@judged_once
def scatters(value: Value, added: Added) -> bool | list[tuple[Value, Added]]:
    """Whether XLA sees a scatter from a value, or from what is made of it and added to a sum.

    `d + scatter(z, g)` becomes `scatter(d + z, g)`, and that likewise with the next. So it does
    where the scatter is divided by one before, or reshaped and back; not where it stays reshaped.
    Of a slice that is set among zeros it adds the slice alone: elsewhere `d` stays, be it -0.0.

    Args:
      value: It.
      added: How what is added looks from there, as `Added.behind` says.
    """
    if value.op is not None and through_wall(value) is None:
        if _is_scatter(value.op) and added.may_be(value.op.inputs[0]):
            return True
        if _ends_scatter(value.op):
            return False
    return added.behind(value)


def _is_scatter(op: Op) -> bool:
    """Whether it writes among what XLA adds something to: a slice only among zeros."""
    is_slice = op.name == "dynamic_update_slice"
    return op.name.startswith("scatter") or (is_slice and may_be_zero(op.inputs[0]))


def _ends_scatter(op: Op) -> bool:
    """Whether XLA adds nothing to a scatter in front of this operation."""
    return op.name == "optimization_barrier" or (op.name not in SUMS and ends_sum(op))
