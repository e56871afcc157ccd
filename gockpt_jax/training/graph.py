"""The traced step as one flat graph of values, for analysis only.

A jaxpr nests: `jnp.where` is a call of its own, an optimizer's `cond` holds its branches. To follow
a state leaf back to the gradient the nesting is in the way, so calls are inlined and `cond` becomes
`select`. The program that runs is never built from this graph (both rewrites may change rounding);
each value only remembers its `Site`, where the user's own program can be asked for it.

Inside a `shard_map` values are seen as one device sees them, on shapes of one shard.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from gockpt_jax import _compat
from gockpt_jax.training.bodies import body_of, can_open
from gockpt_jax.training.handed_on import handing_on, turns_of
from gockpt_jax.training.made import value_of
from gockpt_jax.training.merging import may_be_cut
from gockpt_jax.training.numbers import may_end_turns
from gockpt_jax.training.primitives import CHOICE, ENTER
from gockpt_jax.training.values import (
    Op,
    PathEntry,
    Site,
    Value,
    is_known,
)


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
      Its graph; values that the armed program can be made to return carry a `Site`.

    Example:
      >>> traced = jax.jit(lambda x: jax.numpy.where(x > 0, x, 0.0)).trace(1.0)
      >>> flatten(traced.jaxpr).outputs[0].op.name
      'select_n'
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    unsure: set[int] = set()
    while True:
        inputs = [
            Value(v.aval, index=i, is_everywhere=i not in unsure, arguments=1 << i)
            for i, v in enumerate(jaxpr.invars)
        ]
        for var, value in zip(jaxpr.invars, inputs, strict=True):
            _offer_site(value, (), var, ())
        outputs = _walk(jaxpr, consts, inputs, ())
        more = {i for i, o in carried if not outputs[o].is_everywhere} - unsure
        if not more:
            return Graph(tuple(inputs), tuple(outputs))
        unsure |= more


def _walk(
    jaxpr: Any, consts: list[Any], inputs: Sequence[Value], path: tuple[PathEntry, ...] | None,
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
    for var, constant in zip(jaxpr.constvars, consts, strict=True):
        env[var] = Value(var.aval, constant=constant, is_folded=True)

    def read(atom: Any) -> Value:
        if isinstance(atom, jex.Literal):
            return Value(atom.aval, constant=atom.val, is_folded=True)
        return env[atom]

    for position, eqn in enumerate(jaxpr.eqns):
        outputs = _apply(eqn, [read(a) for a in eqn.invars], path, position, axes)
        for var, value in zip(eqn.outvars, outputs, strict=True):
            env[var] = value
            _offer_site(value, path, var, axes)
    return [read(a) for a in jaxpr.outvars]


def _offer_site(
    value: Value, path: tuple[PathEntry, ...] | None, var: Any, axes: Collection[str]
) -> None:
    """Keeps the outermost site: the fewer calls are opened, the less the program changes."""
    if path is None or type(var) is _compat.DropVar:
        return
    if value.is_folded:
        return  # the step goes on with what the compiler makes of it
    if not (value.shape or value.is_everywhere):
        return  # a scalar is captured once, for all devices
    if value.site is None or len(path) < len(value.site.path):
        value.site = Site(path, var, jax.P() if axes else None)


def _apply(
    eqn: Any, inputs: list[Value], path: tuple[PathEntry, ...] | None, position: int,
    axes: Collection[str],
) -> list[Value]:  # fmt: skip
    name = eqn.primitive.name
    if name == "pvary":  # for the types alone
        return inputs
    inside = (*path, PathEntry(position)) if path is not None else None
    if (called := body_of(eqn, inputs)) is not None:
        body, operands = called
        inside = inside if can_open(eqn) else None
        return _walk(*_compat.open_jaxpr(body), operands, inside, axes)
    op = Op(eqn.primitive, tuple(inputs), eqn.params)
    if name == "cond":
        return _choices(op, [var.aval for var in eqn.outvars], inside, axes)
    if name == "shard_map":
        is_in_branch = any(entry.branch is not None for entry in inside or ())
        _look_inside(op, None if is_in_branch else inside)
    elif name == "scan":
        return _loop(op, [var.aval for var in eqn.outvars], axes)
    elif name == "while":
        return _while(op, [var.aval for var in eqn.outvars], axes)
    return [value_of(var.aval, op, i, axes) for i, var in enumerate(eqn.outvars)]


def _choices(
    cond: Op, avals: Sequence[Any], path: tuple[PathEntry, ...] | None, axes: Collection[str]
) -> list[Value]:
    """What comes out of branches: each a choice between what they make, but for typed keys.

    Nothing is cut where a branch is in a `shard_map`, nor where one is in a branch: what the other
    branches return in the place of a value would have to vary over the mesh as it does.
    """
    index, *operands = cond.inputs
    branches = []
    for i, branch in enumerate(cond.params["branches"]):
        inside = None
        if path is not None and not axes:
            inside = (*path[:-1], path[-1]._replace(branch=i))
        branches.append(_walk(*_compat.open_jaxpr(branch), operands, inside, axes))
    return [
        value_of(aval, cond, i, axes)
        if _is_extended(aval)
        else value_of(aval, Op(_chooser(cases), (index, *cases), {}), 0, axes)
        for i, (aval, *cases) in enumerate(zip(avals, *branches, strict=True))
    ]


def _chooser(cases: Sequence[Value]) -> Any:
    """What chooses a branch's result.

    Where every branch ends in a factor, or in adding a constant, a compiler may take that out of
    all of them, and merge it with what follows. That is neither cut nor repeated.
    """
    return lax.select_n_p if any(map(may_be_cut, cases)) else CHOICE


def _look_inside(op: Op, path: tuple[PathEntry, ...] | None) -> None:
    """Follows the body of a `shard_map`."""
    body, consts = _compat.open_jaxpr(op.params["jaxpr"])
    axes = op.params.get("newly_manual_axes") or op.params["mesh"].axis_names
    specs = op.params["in_specs"]
    given = [
        Value(var.aval, constant=outer.constant, is_folded=True)
        if outer.is_constant and not any(spec)
        else value_of(var.aval, Op(ENTER, (outer,), {"is_whole": not any(spec)}), 0, axes)
        for var, outer, spec in zip(body.invars, op.inputs, specs, strict=True)
    ]
    for var, outer, spec, value in zip(body.invars, op.inputs, specs, given, strict=True):
        op.entered.setdefault(outer, []).append((spec, value))
        _offer_site(value, path, var, axes)
    op.stands_for = tuple(_walk(body, consts, given, path, axes))


def _loop(scan: Op, avals: Sequence[Any], axes: Collection[str]) -> list[Value]:
    """What a loop returns, seen as its last turns make it, where the compiler sees these.

    It makes no loop of one round. And the turns that `unroll` leaves over come behind the loop.

    Args:
      scan: The loop.
      avals: Of what it returns.
      axes: Of the mesh, over which a `shard_map` around it maps.
    """
    body, consts = _compat.open_jaxpr(scan.params["jaxpr"])
    fixed, carry, rows = _compat.scan_operands(scan.params, scan.inputs)
    num_carried, length = len(carry), scan.params["length"]

    def turn(carry: Sequence[Value], place: int | None = None) -> list[Value]:
        given = [
            value_of(var.aval, Op(lax.slice_p, (row,), _of_row(row, place)), 0, axes)
            for var, row in zip(body.invars[len(fixed) + num_carried :], rows, strict=True)
        ]
        return _walk(body, consts, [*fixed, *carry, *given], None, axes)

    rounds, behind = divmod(length, scan.params["unroll"] or max(1, length))  # 0 stands for all
    stacked: list[Sequence[Value]] = []
    if rounds < 2:
        behind = length
    elif not behind:
        return _looped(scan, avals, carry, turn, axes)
    else:
        first = Op(scan.primitive, scan.inputs, scan.params)
        made = _looped(first, avals, carry, turn, axes)
        carry, stacked = made[:num_carried], [made[num_carried:]]
    for n in range(length - behind, length):
        made = turn(carry, length - 1 - n if scan.params["reverse"] else n)
        carry, stacked = made[:num_carried], [*stacked, made[num_carried:]]
    parts = [tuple(each[i] for each in stacked) for i in range(len(avals) - num_carried)]
    joined = (Op(lax.concatenate_p, part, {}) for part in parts)
    added = (value_of(a, op, 0, axes) for a, op in zip(avals[num_carried:], joined, strict=True))
    scan.stands_for = (*carry, *added)
    return [value_of(aval, scan, i, axes) for i, aval in enumerate(avals)]


def _of_row(rows: Value, place: int | None) -> dict[str, Any]:
    """Where a turn's row is, as a slice tells; nothing where a compiler does not know the turn."""
    if place is None:
        return {}
    _, *sizes = rows.shape
    return {"start_indices": (place, *(0 for _ in sizes)), "limit_indices": (place + 1, *sizes)}


def _looped(
    loop: Op, avals: Sequence[Any], carry: Sequence[Value],
    turn: Callable[[Sequence[Value]], list[Value]], axes: Collection[str],
) -> list[Value]:  # fmt: skip
    """What a loop of several rounds returns.

    Args:
      loop: It; is told what any one of its turns returns.
      avals: Of what it returns.
      carry: Of what it is given, what each turn is given by the one before.
      turn: What one makes of it.
      axes: Of the mesh, over which a `shard_map` around it maps.
    """

    def a_round(before: Sequence[Value]) -> list[Value]:
        made = turn(before)
        for _ in range(1, loop.params["unroll"]):
            made = turn(made[: len(carry)])
        return made

    after, stays = turns_of(loop, avals[: len(carry)], carry, a_round, axes)
    loop.turn = tuple(after)
    made = [value_of(aval, loop, i, axes) for i, aval in enumerate(avals)]
    for value, last in zip(made, after, strict=True):
        value.is_folded |= last.is_folded  # whatever else the loop is given
    return handing_on(made, carry, stays, axes)


def _while(loop: Op, avals: Sequence[Any], axes: Collection[str]) -> list[Value]:
    """What a loop returns that turns until something holds: maybe never."""
    condition, body = (_compat.open_jaxpr(loop.params[f"{of}_jaxpr"]) for of in ("cond", "body"))
    start = loop.params["cond_nconsts"]
    end = start + loop.params["body_nconsts"]
    fixed, carry = loop.inputs[start:end], loop.inputs[end:]
    (turns,) = _walk(*condition, [*loop.inputs[:start], *carry], None, axes)
    loop.ends_at_known_turn = may_end_turns(turns)
    turn = lambda before: _walk(*body, [*fixed, *before], None, axes)  # noqa: E731
    _, stays = turns_of(loop, avals, carry, turn, axes)
    made = [value_of(aval, loop, i, axes) for i, aval in enumerate(avals)]
    for value, first in zip(made, carry, strict=True):
        value.is_folded |= loop.ends_at_known_turn and is_known(first)  # if it does not turn
    return handing_on(made, carry, stays, axes)


def _is_extended(aval: Any) -> bool:
    """Typed PRNG keys and other types without a plain element layout."""
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jax.dtypes.extended))
