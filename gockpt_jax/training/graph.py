"""The traced step as one flat graph of values, for analysis only.

A jaxpr nests: `jnp.where` is a call of its own, an optimizer's `cond` holds its branches. To follow
a state leaf back to the gradient the nesting is in the way, so calls are inlined and `cond` becomes
`select`. The program that runs is never built from this graph (both rewrites may change rounding);
each value only remembers its `Site`, where the user's own program can be asked for it.

Inside a `shard_map` values are seen as one device sees them, on shapes of one shard.
"""

import dataclasses
import math
import types
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from gockpt_jax import _compat

_SELECT = lax.select_n_p
_NOTHING = object()
# Calls whose body is the function itself. Only `jit` may also be opened in the armed program; the
# others carry rules (a derivative, a rematerialisation) that opening would drop. A gradient often
# comes straight out of a rematerialised block: what made it must be seen.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
_OPENABLE = frozenset({"jit", "pjit"})
_ENTER = types.SimpleNamespace(name="shard_map")
"""In place of a primitive: what makes one shard of an argument."""
_MEETINGS = frozenset({"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather"})
"""What gives all devices that take part the same result."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Where the user's own program holds a value.

    Attributes:
      path: Positions of the enclosing `jit` and `shard_map` equations, outermost first; empty at
        the top level.
      var: The variable there.
      spec: Inside a `shard_map`, how its shards lie when it is returned from there.
    """

    path: tuple[int, ...]
    var: Any
    spec: Any = None


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One value of the step: what makes it, and where it can be read.

    Attributes:
      aval: Its abstract value (shape and dtype).
      op: The operation that makes it; `None` for inputs and constants.
      index: Its position among that operation's results.
      site: Where the armed step can return it; `None` inside bodies that cannot be opened.
      constant: Its value where that is known while tracing.
      is_everywhere: Whether it is certain to be the same on all devices: inside a `shard_map`, and
        of scalars that have come out of one which is not checked.
    """

    aval: Any
    op: "Op | None" = None
    index: int = 0
    site: Site | None = None
    constant: Any = _NOTHING
    is_everywhere: bool = True

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
    def nbytes(self) -> int:
        """Bytes of the global value; 0 for what has no size (tokens)."""
        return math.prod(self.shape) * getattr(self.dtype, "itemsize", 0)


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """One primitive operation."""

    primitive: Any
    inputs: tuple[Value, ...]
    params: dict[str, Any]
    num_outputs: int
    entered: "tuple[Value, ...]" = ()
    """Of a `shard_map`: what goes into its body, seen from inside."""
    results: "tuple[Value, ...]" = ()
    """Of a `shard_map`: what its body returns, seen from inside. So of a loop that is none."""

    @property
    def name(self) -> str:
        """The primitive's name, as a jaxpr prints it."""
        return str(self.primitive.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """The whole step.

    Attributes:
      inputs: One value per flat dynamic argument.
      outputs: One value per flat result.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def flatten(closed: Any, carried: Sequence[tuple[int, int]] = ()) -> Graph:
    """Flattens a closed jaxpr.

    Args:
      closed: As returned by `jax.jit(f).trace(...).jaxpr`.
      carried: Positions of arguments, with those of the results that the next call is given there.

    Returns:
      Its graph; values of the top level and of `jit` calls carry a `Site`.

    Example:
      >>> traced = jax.jit(lambda x: jax.numpy.where(x > 0, x, 0.0)).trace(1.0)
      >>> flatten(traced.jaxpr).outputs[0].op.name
      'select_n'
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    unsure: set[int] = set()
    while True:
        inputs = [Value(v.aval, is_everywhere=i not in unsure) for i, v in enumerate(jaxpr.invars)]
        for var, value in zip(jaxpr.invars, inputs, strict=True):
            _offer_site(value, (), var, ())
        outputs = _walk(jaxpr, consts, inputs, ())
        more = {i for i, o in carried if not outputs[o].is_everywhere} - unsure
        if not more:
            return Graph(tuple(inputs), tuple(outputs))
        unsure |= more


def _walk(
    jaxpr: Any, consts: list[Any], inputs: Sequence[Value], path: tuple[int, ...] | None,
    axes: Collection[str] = (),
) -> list[Value]:  # fmt: skip
    """Follows the equations of one body.

    Args:
      jaxpr: The body.
      consts: Its constants.
      inputs: What goes in.
      path: As of its values' sites; `None` where it cannot be opened.
      axes: Of the mesh, over which a `shard_map` around it maps.

    Returns:
      What comes out.
    """
    env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    env.update((v, Value(v.aval, constant=c)) for v, c in zip(jaxpr.constvars, consts, strict=True))

    def read(atom: Any) -> Value:
        if isinstance(atom, jex.Literal):
            return Value(atom.aval, constant=atom.val)
        return env[atom]

    for position, eqn in enumerate(jaxpr.eqns):
        outputs = _apply(eqn, [read(a) for a in eqn.invars], path, position, axes)
        for var, value in zip(eqn.outvars, outputs, strict=True):
            env[var] = value
            _offer_site(value, path, var, axes)
    return [read(a) for a in jaxpr.outvars]


def _offer_site(
    value: Value, path: tuple[int, ...] | None, var: Any, axes: Collection[str]
) -> None:
    """Keeps the outermost site: the fewer calls are opened, the less the program changes."""
    if path is None or value.is_constant or type(var) is _compat.DropVar:
        return
    if not (value.shape or value.is_everywhere):
        return  # a scalar is captured once, for all devices
    if value.site is None or len(path) < len(value.site.path):
        value.site = Site(path, var, jax.P() if axes else None)


def _apply(
    eqn: Any, inputs: list[Value], path: tuple[int, ...] | None, position: int,
    axes: Collection[str],
) -> list[Value]:  # fmt: skip
    name = eqn.primitive.name
    if name == "pvary":  # for the types alone
        return inputs
    if (name in _CALLS and _CALLS[name] in eqn.params) or _decided_branch(eqn) is not None:
        body, operands = body_of(eqn, inputs)
        inner = (*path, position) if path is not None and can_open(eqn) else None
        return _walk(*_compat.open_jaxpr(body), operands, inner, axes)
    if name == "cond" and not any(_is_extended(v.aval) for v in eqn.outvars):
        index, *operands = inputs
        branches = [
            _walk(*_compat.open_jaxpr(b), operands, None, axes) for b in eqn.params["branches"]
        ]
        return [
            _value(var.aval, Op(_SELECT, (index, *cases), {}, 1), 0, axes)
            for var, *cases in zip(eqn.outvars, *branches, strict=True)
        ]
    op = Op(eqn.primitive, tuple(inputs), eqn.params, len(eqn.outvars))
    if name == "shard_map":
        _look_inside(op, (*path, position) if path is not None else None)
    elif name == "scan" and _is_unrolled(op):
        body, consts = _compat.open_jaxpr(op.params["jaxpr"])
        op.results = tuple(_walk(body, consts, inputs, None, axes))
    return [_value(var.aval, op, i, axes) for i, var in enumerate(eqn.outvars)]


def _value(aval: Any, op: Op, index: int, axes: Collection[str]) -> Value:
    certain = _is_everywhere(op, index, axes) and not _compat.varies(aval)
    return Value(aval, op, index, is_everywhere=certain)


def _look_inside(op: Op, path: tuple[int, ...] | None) -> None:
    """Follows the body of a `shard_map`."""
    body, consts = _compat.open_jaxpr(op.params["jaxpr"])
    axes = op.params.get("newly_manual_axes") or op.params["mesh"].axis_names
    op.entered = tuple(
        Value(var.aval, constant=outer.constant)
        if outer.is_constant and not any(spec)
        else _value(var.aval, Op(_ENTER, (outer,), {"is_whole": not any(spec)}, 1), 0, axes)
        for var, outer, spec in zip(body.invars, op.inputs, op.params["in_specs"], strict=True)
    )
    for var, value in zip(body.invars, op.entered, strict=True):
        _offer_site(value, path, var, axes)
    op.results = tuple(_walk(body, consts, op.entered, path, axes))


def _is_everywhere(op: Op, index: int, axes: Collection[str]) -> bool:
    """Whether an operation gives the same on all devices, for certain."""
    if op.results and not axes:
        inside = op.results[index]
        return bool(inside.shape or op.params.get("check_vma")) or inside.is_everywhere
    over = op.params.get("axis_name", op.params.get("axes", ()))
    names = {a for a in ((over,) if isinstance(over, str) else over) if isinstance(a, str)}
    if names:
        in_groups = op.params.get("axis_index_groups") is not None
        return op.name in _MEETINGS and names >= set(axes) and not in_groups
    if not axes:
        return all(v.is_everywhere for v in op.inputs)
    holds_a_body = any("jaxpr" in key or key == "branches" for key in op.params)
    if holds_a_body or "callback" in op.name or not (op.inputs or op.name == "iota"):
        return False
    return op.params.get("is_whole", True) and all(v.is_everywhere for v in op.inputs)


def without_walls(value: Value) -> Value:
    """A value as the compiler sees it: what goes into a `shard_map` or comes out is that value."""
    while (op := value.op) is not None and (op.results or op.primitive is _ENTER):
        value = op.results[value.index] if op.results else op.inputs[0]
    return value


def _is_unrolled(scan: Op) -> bool:
    """Whether the compiler makes no loop of it: it has one turn, or so many are written out."""
    turns, at_once = scan.params["length"], scan.params["unroll"]
    return at_once is True or bool(turns <= max(1, at_once))


def body_of(eqn: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """What a call runs, and with which of its operands."""
    if (branch := _decided_branch(eqn)) is not None:
        return branch, operands[1:]
    return eqn.params[_CALLS[eqn.primitive.name]], operands


def can_open(eqn: Any) -> bool:
    """Whether a call may be replaced by its body in the armed program without losing anything."""
    if (branch := _decided_branch(eqn)) is not None:
        return not _compat.open_jaxpr(branch)[1]
    if eqn.primitive.name not in _OPENABLE:
        return False
    _, consts = _compat.open_jaxpr(eqn.params["jaxpr"])
    placed = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return not consts and not any(isinstance(s, jax.sharding.Sharding) for s in placed)


def _decided_branch(eqn: Any) -> Any | None:
    """The branch of a `cond` that was decided while tracing; the compiler keeps it alone."""
    if eqn.primitive.name != "cond" or not isinstance(eqn.invars[0], jex.Literal):
        return None
    branches = eqn.params["branches"]
    return branches[min(max(int(eqn.invars[0].val), 0), len(branches) - 1)]


def _is_extended(aval: Any) -> bool:
    """Typed PRNG keys and other types without a plain element layout."""
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jax.dtypes.extended))
