"""The values of a traced step, and what makes them."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from gockpt_jax.training.primitives import ENTER, MEETINGS

Ratio = Fraction | int
_NOTHING = object()


def judged_once(
    judge: Callable[..., bool | Sequence[tuple[Any, ...]]],
) -> Callable[..., bool]:
    """Of a value or operation, which walks from many leaves meet, asks once as long as it lives.

    Args:
      judge: Says yes or no of what it is first given, or with what it is to be asked instead: then
        it is yes where any of these is. Nothing may come back to itself.
    """

    @functools.wraps(judge)
    def verdict(*asked: Any) -> bool:
        stack = [asked]  # without recursion: chains can be long
        while stack:
            (judged, *beside), todo = stack[-1], []
            key = (judge, *beside)
            if key not in judged.verdicts:
                found = judge(*stack[-1])
                if not isinstance(found, bool):
                    known = [inner.verdicts.get((judge, *more)) for inner, *more in found]
                    if True not in known:
                        todo = [n for n, k in zip(found, known, strict=True) if k is None]
                    found = True in known
                if todo:
                    stack += todo
                    continue
                judged.verdicts[key] = found
            stack.pop()
        return bool(asked[0].verdicts[(judge, *asked[1:])])

    return verdict


class PathEntry(NamedTuple):
    """The way into the body of one equation.

    Attributes:
      position: Of the equation, among those around it.
      branch: Which of its branches, if it is a `cond` that is decided only when it runs.
    """

    position: int
    branch: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Where the user's own program holds a value.

    Attributes:
      path: Into the enclosing `jit`, `shard_map` and `cond` equations, outermost first; empty at
        the top level.
      var: The variable there.
      spec: Inside a `shard_map`, how its shards lie when it is returned from there.
    """

    path: tuple[PathEntry, ...]
    var: Any
    spec: Any = None

    @property
    def is_in_branch(self) -> bool:
        """Whether the value is made only where some branch is taken."""
        return any(entry.branch is not None for entry in self.path)


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One value of the step: what makes it, and where it can be read.

    Attributes:
      aval: Its abstract value (shape and dtype).
      op: The operation that makes it; `None` for inputs and constants.
      index: Its position among that operation's results, or the step's arguments.
      site: Where the armed step can return it; `None` inside bodies that cannot be opened.
      constant: Its value where that is known while tracing.
      is_everywhere: Whether it is certain to be the same on all devices: inside a `shard_map`, and
        of scalars that have come out of one which is not checked.
      is_folded: Whether it is a constant, or computed from constants alone. Then the compiler
        knows its number, and may merge it with the constants that follow.
      arguments: Of the step, from which it is computed: a bit for each.
      number: What it is of arguments drawn at random, once that was asked (`drawn.Number`).
      is_spread: Whether it may be all the same, likewise (`factors.py`).
      verdicts: What else was asked of it (`judged_once`).
    """

    aval: Any
    op: "Op | None" = None
    index: int = 0
    site: Site | None = None
    constant: Any = _NOTHING
    is_everywhere: bool = True
    is_folded: bool = False
    arguments: int = 0
    number: Any = None
    is_spread: bool | None = None
    verdicts: dict[Any, bool] = dataclasses.field(default_factory=dict)

    @property
    def is_constant(self) -> bool:
        """Whether the host knows the value without being sent it."""
        return self.constant is not _NOTHING

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the global value."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def dtype(self) -> Any:
        """Element type."""
        return getattr(self.aval, "dtype", None)

    @property
    def size(self) -> int:
        """Elements of the global value."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global value; 0 for what has no size (tokens)."""
        return self.size * getattr(self.dtype, "itemsize", 0)


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """One primitive operation."""

    primitive: Any
    inputs: tuple[Value, ...]
    params: dict[str, Any]
    name: str = dataclasses.field(init=False)
    """The primitive's, as a jaxpr prints it."""
    arguments: int = dataclasses.field(init=False)
    """Of the step, from which its inputs are computed: a bit for each."""
    is_of_folded: bool = dataclasses.field(init=False)
    """Whether all its inputs are folded."""
    is_of_everywhere: bool = dataclasses.field(init=False)
    """Whether all its inputs are the same on all devices."""
    near: Any = None
    """What its inputs are made of by elementwise operations, once that was asked (`drawn.py`)."""
    far: dict[int, Any] = dataclasses.field(default_factory=dict)
    """What those of a size at least are made of otherwise, likewise: by that size."""
    sources: dict[bool, Any] = dataclasses.field(default_factory=dict)
    """What names its results, if they are products and if not, likewise."""
    common_factors: "tuple[tuple[Value, Ratio], ...] | None" = None
    """Of a sum: what its terms are all multiplied by, likewise (`common_factors.py`)."""
    ends: Sequence[int] | None = None
    """Of arrays that are joined, or taken apart: where each ends, likewise."""
    entered: "dict[Value, list[tuple[Any, Value]]]" = dataclasses.field(default_factory=dict)
    """Of a `shard_map`: what each input is inside, and how its shards lie there."""
    stands_for: "tuple[Value, ...]" = ()
    """What its results are, seen through it: what the body of a `shard_map` returns, or what the
    last turns of a loop make, where these are written out."""
    turn: "tuple[Value, ...]" = ()
    """Of a loop: what any one of its turns returns."""
    ends_at_known_turn: bool = False
    """Of a loop: whether a compiler may know if it makes its first turn, and maybe no other."""
    verdicts: dict[Any, bool] = dataclasses.field(default_factory=dict)
    """What was asked of it (`judged_once`)."""

    def __post_init__(self) -> None:
        self.name = str(self.primitive.name)
        self.arguments = functools.reduce(operator.or_, (v.arguments for v in self.inputs), 0)
        self.is_of_folded = all(v.is_folded for v in self.inputs)
        self.is_of_everywhere = all(v.is_everywhere for v in self.inputs)


def in_order(value: Value, before: Callable[[Value], Sequence[Value]]) -> Iterator[Value]:
    """A value behind what it is made of, without recursion: update chains can be long.

    Args:
      value: It; comes last.
      before: What must have come before one, and has not. What comes twice is for the caller to
        pass over.
    """
    stack = [value]
    while stack:
        if todo := before(stack[-1]):
            stack.extend(todo)
        else:
            yield stack.pop()


def is_everywhere(op: Op, index: int, axes: Collection[str]) -> bool:
    """Whether an operation gives the same on all devices, for certain."""
    if op.name == "shard_map" and not axes:
        inside = op.stands_for[index]
        return bool(inside.shape or op.params.get("check_vma")) or inside.is_everywhere
    over = op.params.get("axis_name", op.params.get("axes", ()))
    names = {a for a in ((over,) if isinstance(over, str) else over) if isinstance(a, str)}
    if names:
        in_groups = op.params.get("axis_index_groups") is not None
        return op.name in MEETINGS and names >= set(axes) and not in_groups
    if not axes:
        return op.is_of_everywhere
    holds_a_body = any("jaxpr" in key or key == "branches" for key in op.params)
    if holds_a_body or "callback" in op.name or not (op.inputs or op.name == "iota"):
        return False
    return op.params.get("is_whole", True) and op.is_of_everywhere


def contracted(op: Op) -> list[int]:
    """Along how many elements a matrix product, ragged or not, adds up: for each such axis."""
    ragged = op.params.get("ragged_dot_dimension_numbers")
    numbers = op.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    (axes, _), _ = numbers
    return [op.inputs[0].shape[axis] for axis in axes]


def num_devices(aval: Any, names: Any) -> int | None:
    """How many devices there are along axes of the mesh; `None` where that is not known.

    Under `vmap` it is one along an axis of the array, which has a number in the place of a name.

    Args:
      aval: Of what a `shard_map` over that mesh holds.
      names: Of one axis, or of several.
    """
    sharding = getattr(aval, "sharding", None)
    mesh: Mapping[Any, int] = getattr(getattr(sharding, "mesh", None), "shape", {})
    sizes = {**mesh, **dict(enumerate(aval.shape))}
    listed = names if isinstance(names, tuple) else (names,)
    return math.prod(sizes[n] for n in listed) if all(n in sizes for n in listed) else None


def through_wall(value: Value) -> Value | None:
    """What goes into a `shard_map` or comes out of it, on the other side; `None` if it does not."""
    op = value.op
    if op is None or not (op.stands_for or op.primitive is ENTER):
        return None
    return op.stands_for[value.index] if op.stands_for else op.inputs[0]


def without_walls(value: Value) -> Value:
    """A value as the compiler sees it: what goes into a `shard_map` or comes out is that value."""
    return through_walls(value)[0]


def through_walls(value: Value, per: Ratio = 1) -> tuple[Value, Ratio]:
    """Likewise, and how its sizes compare: in a `shard_map` a device has a shard of what is whole.

    Args:
      value: The value.
      per: How many elements are here what is one where it is looked at from.

    Returns:
      The value on the other side, and how many are there what is one.
    """
    while (inner := through_wall(value)) is not None:
        if inner.size != value.size:
            per *= Fraction(inner.size, max(1, value.size))
        value = inner
    return value, per


def unspread(value: Value) -> Value:
    """A value before it was spread over a shape, or converted."""
    return unspread_through_walls(value)[0]


def unspread_through_walls(value: Value, per: Ratio = 1) -> tuple[Value, Ratio]:
    """Likewise, and how its sizes compare, as `through_walls` says."""
    value, per = through_walls(value, per)
    while value.op is not None and value.op.name in ("broadcast_in_dim", "convert_element_type"):
        value, per = through_walls(value.op.inputs[0], per)
    return value, per


def is_known(value: Value) -> bool:
    """Whether the compiler knows a value's number: a constant, or made of constants."""
    return unspread(value).is_folded
