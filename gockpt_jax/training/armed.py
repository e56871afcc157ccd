"""The armed step: the user's own program with the cut values as trailing outputs.

Nothing is rewritten. Where a cut value lies inside a `jit` call, or in a branch decided while
tracing, that call alone is replaced by its body, as XLA's own passes do later; where it lies inside
a `shard_map`, that one returns it too.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from gockpt_jax import _compat
from gockpt_jax.training.graph import body_of
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
    eqns, rename = _open(jaxpr, sites, found, ())
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
    jaxpr: Any, sites: Sequence[Site], found: dict[Site, Any], prefix: tuple[int, ...]
) -> tuple[list[Any], dict[Any, Any]]:
    """The body's equations with the calls on the sites' paths opened, and its renamed variables."""
    depth = len(prefix)
    inside = defaultdict(list)
    for site in sites:
        if len(site.path) > depth:
            inside[site.path[depth]].append(site)
    eqns: list[Any] = []
    rename: dict[Any, Any] = {}
    for position, eqn in enumerate(jaxpr.eqns):
        invars = [_renamed(a, rename) for a in eqn.invars]
        if position not in inside:
            eqns.append(eqn.replace(invars=invars))
            continue
        enter = _widen if eqn.primitive.name == "shard_map" else _inline
        body, results = enter(eqn, invars, inside[position], found, (*prefix, position))
        eqns.extend(body)
        rename.update(zip(eqn.outvars, results, strict=True))
    found.update((s, _renamed(s.var, rename)) for s in sites if len(s.path) == depth)
    return eqns, rename


def _inline(
    eqn: Any,
    invars: list[Any],
    sites: Sequence[Site],
    found: dict[Site, Any],
    path: tuple[int, ...],
) -> tuple[list[Any], list[Any]]:
    """A call's body in the caller's variables. One body may be called twice, so all are fresh."""
    closed, operands = body_of(eqn, invars)
    jaxpr, consts = _compat.open_jaxpr(closed)
    inner: dict[Site, Any] = {}
    body, renamed_inside = _open(jaxpr, sites, inner, path)
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
    eqn: Any,
    invars: list[Any],
    sites: Sequence[Site],
    found: dict[Site, Any],
    path: tuple[int, ...],
) -> tuple[list[Any], list[Any]]:
    """A `shard_map` that also returns the sites' values, laid out as the sites say."""
    inner: dict[Site, Any] = {}
    body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
    eqns, rename = _open(body, sites, inner, path)
    results = [_renamed(a, rename) for a in body.outvars]
    body = _compat.with_equations(body, eqns, [*results, *(inner[s] for s in sites)])
    # Their types are those of one shard. Nobody reads them: the program is traced anew.
    found.update((s, jex.Var(s.var.aval)) for s in sites)
    params = eqn.params | {
        "jaxpr": body,
        "out_specs": (*eqn.params["out_specs"], *(s.spec for s in sites)),
    }
    outvars = [*eqn.outvars, *(found[s] for s in sites)]
    return [eqn.replace(invars=invars, outvars=outvars, params=params)], list(eqn.outvars)


def _renamed(atom: Any, rename: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, jex.Literal) else rename.get(atom, atom)
