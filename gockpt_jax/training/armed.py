"""The armed step: the user's own program with the cut values as trailing outputs.

Nothing that it computes is rewritten. Where a cut value lies inside a `jit` call, or in a branch
decided while tracing, that call alone is replaced by its body, as XLA's own passes do later; where
it lies inside a `shard_map` or a branch, that one returns it too.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from gockpt_jax import _compat
from gockpt_jax.training.bodies import body_of
from gockpt_jax.training.values import Site


class ArmedResult(NamedTuple):
    """What an armed step returns.

    Attributes:
      result: The user's.
      state: The leaves of the new state in it, in the order of the program's.
      cut: The cut arrays, in the order of the program's `cut.arrays`.
    """

    result: Any
    state: list[jax.Array]
    cut: list[jax.Array]


def with_outputs(closed: Any, sites: Sequence[Site]) -> Callable[..., list[jax.Array]]:
    """A function of the flat arguments that returns the flat results and then the sites' values.

    Args:
      closed: The closed jaxpr of the user's step.
      sites: Where the values to return are held.

    Returns:
      A traceable function, equal to the step in its first results.

    Example:
      >>> traced = jax.jit(lambda x: jnp.sin(x) + 1.0).trace(0.0)
      >>> site = Site((), traced.jaxpr.eqns[0].outvars[0])
      >>> [float(v) for v in with_outputs(traced.jaxpr, [site])(0.0)]
      [1.0, 0.0]
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    found: dict[Site, Any] = {}
    eqns, rename = _open(jaxpr, sites, found, 0)
    outvars = [_renamed(a, rename) for a in jaxpr.outvars]
    taken = [found[s] for s in sites]
    run = jex.jaxpr_as_fun(
        _compat.close_jaxpr(jaxpr, consts, eqns=eqns, outvars=[*outvars, *taken])
    )
    num_outputs, inputs = len(outvars), set(jaxpr.invars)
    # An argument returned as it is would be the caller's own, perhaps donated, buffer.
    copied = [num_outputs + i for i, var in enumerate(taken) if var in inputs]

    def armed(*flat: Any) -> list[jax.Array]:
        results = list(run(*flat))
        for i in copied:
            results[i] = jnp.copy(results[i])
        return results

    return armed


def _open(
    jaxpr: Any, sites: Sequence[Site], found: dict[Site, Any], depth: int
) -> tuple[list[Any], dict[Any, Any]]:
    """A body's equations with those on the sites' paths opened, and its renamed variables.

    Args:
      jaxpr: The body.
      sites: Of values in it, or in what it calls.
      found: Is told the variable of each.
      depth: Entries of their paths that lead to this body.
    """
    inside = defaultdict(list)
    for site in sites:
        if len(site.path) > depth:
            inside[site.path[depth].position].append(site)
    eqns: list[Any] = []
    rename: dict[Any, Any] = {}
    for position, eqn in enumerate(jaxpr.eqns):
        invars = [_renamed(a, rename) for a in eqn.invars]
        if position not in inside:
            eqns.append(eqn.replace(invars=invars))
            continue
        if eqn.primitive.name == "shard_map":
            enter = _widen
        else:
            is_decided = inside[position][0].path[depth].branch is None
            enter = _inline if is_decided else _choose
        body, results = enter(eqn, invars, inside[position], found, depth + 1)
        eqns.extend(body)
        rename.update(zip(eqn.outvars, results, strict=True))
    found.update((s, _renamed(s.var, rename)) for s in sites if len(s.path) == depth)
    return eqns, rename


def _inline(
    eqn: Any, invars: list[Any], sites: Sequence[Site], found: dict[Site, Any], depth: int
) -> tuple[list[Any], list[Any]]:
    """A call's body in the caller's variables. One body may be called twice, so all are fresh."""
    called = body_of(eqn, invars)
    assert called is not None, "only calls are opened"
    closed, operands = called
    jaxpr, consts = _compat.open_jaxpr(closed)
    inner: dict[Site, Any] = {}
    body, renamed_inside = _open(jaxpr, sites, inner, depth)
    fresh: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        fresh[var] = jex.Literal(const, var.aval)
    eqns = []
    for e in body:
        operands = [_renamed(a, fresh) for a in e.invars]
        outvars = [jex.Var(v.aval) for v in e.outvars]
        fresh.update(zip(e.outvars, outvars, strict=True))
        eqns.append(e.replace(invars=operands, outvars=outvars))
    found.update((site, _renamed(var, fresh)) for site, var in inner.items())
    results = [_renamed(_renamed(a, renamed_inside), fresh) for a in jaxpr.outvars]
    return eqns, results


def _widen(
    eqn: Any, invars: list[Any], sites: Sequence[Site], found: dict[Site, Any], depth: int
) -> tuple[list[Any], list[Any]]:
    """A `shard_map` that also returns the sites' values, laid out as the sites say."""
    inner: dict[Site, Any] = {}
    body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
    eqns, rename = _open(body, sites, inner, depth)
    results = [_renamed(a, rename) for a in body.outvars]
    body = _compat.with_equations(body, eqns, [*results, *(inner[s] for s in sites)])
    specs = (*eqn.params["out_specs"], *(s.spec for s in sites))
    return _returning(eqn, invars, sites, found, {"jaxpr": body, "out_specs": specs})


def _choose(
    eqn: Any, invars: list[Any], sites: Sequence[Site], found: dict[Site, Any], depth: int
) -> tuple[list[Any], list[Any]]:
    """A `cond` that also returns the sites' values; branches that do not make one return zeros."""
    branches = []
    for i, closed in enumerate(eqn.params["branches"]):
        body, consts = _compat.open_jaxpr(closed)
        inner: dict[Site, Any] = {}
        own = [s for s in sites if s.path[depth - 1].branch == i]
        eqns, rename = _open(body, own, inner, depth)
        others = [s for s in sites if s not in inner]
        zeros, _ = _compat.open_jaxpr(jax.make_jaxpr(_zeros_like)([s.var.aval for s in others]))
        inner.update(zip(others, zeros.outvars, strict=True))
        results = [*(_renamed(a, rename) for a in body.outvars), *(inner[s] for s in sites)]
        eqns = [*eqns, *zeros.eqns]
        branches.append(_compat.close_jaxpr(body, consts, eqns=eqns, outvars=results))
    return _returning(eqn, invars, sites, found, {"branches": tuple(branches)})


def _returning(
    eqn: Any, invars: list[Any], sites: Sequence[Site], found: dict[Site, Any],
    params: dict[str, Any],
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """An equation whose bodies return the sites' values, too, and its own results."""
    # Of a `shard_map` their types are those of one shard. No `cond` around it returns them (its
    # zeros are of these types), and the program is traced anew.
    found.update((s, jex.Var(s.var.aval)) for s in sites)
    outvars = [*eqn.outvars, *(found[s] for s in sites)]
    return [eqn.replace(invars=invars, outvars=outvars, params=eqn.params | params)], eqn.outvars


def _zeros_like(arrays: list[Any]) -> list[jax.Array]:
    return [jnp.zeros_like(x) for x in arrays]


def _renamed(atom: Any, rename: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, jex.Literal) else rename.get(atom, atom)
