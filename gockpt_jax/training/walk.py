"""From a leaf's new value back to what the host cannot repeat."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gockpt_jax import _compat
from gockpt_jax.training.exact import is_exact
from gockpt_jax.training.merging import may_be_cut, may_melt, melts
from gockpt_jax.training.primitives import IDENTITIES, SUMS
from gockpt_jax.training.scattered import Added, scatters
from gockpt_jax.training.values import Op, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the state: its value going into the step and coming out.

    Attributes:
      path: Its name.
      old: Going in; if a `shard_map` updates it, one shard of it, as seen from inside.
      new: Coming out, likewise.
      spec: How its shards lie in that `shard_map`; `None` without one.
    """

    path: str
    old: Value
    new: Value
    spec: Any = None

    @classmethod
    def of(cls, path: str, old: Value, new: Value) -> "Leaf":
        """Looks for what updates the leaf: the step itself, or a `shard_map` in it."""
        op = new.op
        if op is not None and op.entered:
            spec = op.params["out_specs"][new.index]
            for spec_in, inside in op.entered.get(old, ()):
                if _trimmed(spec_in) == _trimmed(spec):
                    return cls(path, inside, op.stands_for[new.index], spec)
        return cls(path, old, new)


def _trimmed(spec: Sequence[Any]) -> tuple[Any, ...]:
    """A `PartitionSpec` without the last dimensions if they are whole."""
    parts = tuple(spec)
    while parts and parts[-1] is None:
        parts = parts[:-1]
    return parts


@dataclasses.dataclass(slots=True)
class Walk:
    """What lies between new values and what the host cannot repeat.

    Attributes:
      sources: Values that the host cannot compute from other values: it is sent them, or something
        that is computed from them.
      uses: Pairs of a value and another that is computed from it.
      reads: Old values of leaves, which the host has if these leaves have left.
      between: Every value it meets but `reads`, sources included.
    """

    sources: dict[Value, None] = dataclasses.field(default_factory=dict)
    uses: dict[tuple[Value, Value], None] = dataclasses.field(default_factory=dict)
    reads: dict[Value, None] = dataclasses.field(default_factory=dict)
    between: dict[Value, None] = dataclasses.field(default_factory=dict)

    def add(self, other: "Walk") -> None:
        """Takes in what another walk has met."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).update(getattr(other, field.name))

    def cuttable(self) -> set[Value]:
        """The values that can be returned by the armed step and are then the numbers it uses."""
        # Folded into a sum, unless it is returned: the step would go on with other numbers.
        folded, seen = set[Value](), set[tuple[Value, Added]]()
        for operand, user in self.uses:
            is_added = user.op and user.op.name in SUMS
            stack = [(operand, Added(operand.dtype, operand.shape))] if is_added else []
            while stack:
                value, added = stack.pop()
                if (value, added) not in seen and scatters(value, added):
                    folded.add(value)
                    seen.add((value, added))
                    if value.op is not None and value.op.name not in SUMS:
                        stack.extend(added.behind(value))
        melted = any(user.op and melts(user.op) for _, user in self.uses)
        return {
            v
            for v in (*self.reads, *self.between)
            if v.site is not None
            and v not in folded
            and not (melted and may_melt(v))
            and not _compat.is_packed(v.dtype)
            and may_be_cut(v)
        }


def walk_back(
    leaf: Leaf,
    known: Collection[Value],
    stop: Collection[Value] = (),
    *,
    repeats: Callable[[Op], bool],
) -> Walk:
    """Walks back from a leaf's new value through operations that the host repeats.

    Args:
      leaf: The leaf.
      known: Old values of leaves: the walk does not go behind them.
      stop: Further values that it does not go behind; where there are some, marks do not stop it.
      repeats: Which operations the host repeats, bit for bit or nearly.

    Returns:
      What it meets.
    """
    walk = Walk()
    seen: set[Value] = set()
    result = _unplaced(leaf.new)
    stack = [leaf.new]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in known:
            walk.reads[value] = None
            continue
        walk.between[value] = None
        behind = _unplaced(value)
        goes_on = bool(stop) or behind is result or behind in known
        if value in stop or _ends_walk(value, repeats, goes_on):
            walk.sources[value] = None
            continue
        assert value.op is not None
        for operand in value.op.inputs:
            if not (operand.is_constant and operand.shape == ()):
                walk.uses[operand, value] = None
                stack.append(operand)
    return walk


def _unplaced(value: Value) -> Value:
    """A value before the user says where it goes (`with_sharding_constraint`)."""
    while value.op is not None and value.op.name == "sharding_constraint":
        (value,) = value.op.inputs
    return value


def _ends_walk(value: Value, repeats: Callable[[Op], bool], goes_on: bool) -> bool:
    # A scalar costs nothing to capture: no need to repeat it but for rounding. But the compiler
    # merges one that it knows with what follows, and so it must where the host repeats it.
    may_repeat = repeats if value.shape or value.is_folded else is_exact
    if value.op is None or not (may_repeat(value.op) and is_elementwise(value.op, value)):
        return True
    if value.op.name not in IDENTITIES or goes_on or value.site is None:
        return False
    # A marked gradient, as a rule: no need to look behind. But for a leaf that is told its place,
    # and in a branch: it may be had from in front of it.
    return not value.site.is_in_branch and may_be_cut(value)


def is_elementwise(op: Op, value: Value) -> bool:
    """Whether it needs what is in the same place, and scalars: sums spread rows of one element."""
    return all(v.shape in (value.shape, ()) for v in op.inputs)


def why_unfit(leaf: Leaf) -> str | None:
    """Why a leaf cannot be replayed whatever its program does; `None` if it may be."""
    old, new = leaf.old, leaf.new
    if _compat.is_packed(old.dtype) and new is not old:
        return "numbers of less than a byte are not repeated"
    if jnp.issubdtype(old.dtype, jax.dtypes.extended):
        return "a typed PRNG key has no arithmetic to repeat"
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return f"its shape or dtype changes, from {old.aval.str_short()} to {new.aval.str_short()}"
    if math.prod(old.shape) <= 1:
        return "it is as small as what would be retained for it"
    return None
