"""One optimizer on one model: its cut, armed and replayed."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.cut.order import measure_order
from bench.cut.programs import batch, make_step
from gockpt_jax.training.armed import with_outputs
from gockpt_jax.training.cut import Cut, find_cut
from gockpt_jax.training.graph import flatten
from gockpt_jax.training.recipe import make_recipe
from gockpt_jax.training.values import Value
from gockpt_jax.training.walk import Leaf

STEPS, REPLAYED = 8, 5

Arrays = list[np.ndarray]


def measure(optimizer: str, model: str, isa: str, directory: Path) -> dict[str, float]:
    """Figures by name; those that depend on the process are `<isa>/<figure>`."""
    step, first = make_step(optimizer, model)
    traced = step.trace(first(), batch(0))
    graph = flatten(traced.jaxpr)
    size = len(jax.tree.leaves(first()))
    leaves = [Leaf(str(i), graph.inputs[i], graph.outputs[i]) for i in range(size)]
    cut = find_cut(leaves, even_for_nothing=False)
    sites = [v.site for v in cut.values if v.site is not None]
    armed = jax.jit(with_outputs(traced.jaxpr, sites), donate_argnums=tuple(range(size)))
    run = _run(functools.partial(_call_armed, armed), first(), size)
    plain = _run(functools.partial(_call_plain, step, jax.tree.structure(first())), first(), size)
    perturbed = _differing(run[-1][:size], plain[-1][:size])
    torn = _torn(_recipes(cut, leaves), cut, run, size)
    figures = {f"{isa}/perturbed": perturbed[0], f"{isa}/perturbed by": perturbed[1]}
    figures |= {f"{isa}/torn": torn[0], f"{isa}/torn by": torn[1]}
    path = directory / f"{model}-{optimizer.replace(' ', '')}.npz"
    if isa == "avx":
        np.savez(path, *(x for arrays in run for x in arrays))
        params = sum(x.nbytes for x in jax.tree.leaves(first()[0]))
        return figures | _figures(cut, leaves, params)
    theirs = _restored(path, run)
    return figures | {"fenced": _torn(_recipes(cut, leaves, np.int32(0)), cut, theirs, size)[0]}


def _figures(cut: Cut, leaves: Sequence[Leaf], params: int) -> dict[str, float]:
    retained = {v for g in cut.groups for v in g.retained}
    early = [j for g in cut.groups for j in g.leaves]
    order = {f"order/{name}": value for name, value in measure_order(cut, leaves).items()}
    return order | {
        "retained": round(sum(v.nbytes for v in retained) / params, 3),
        "early bytes": round(sum(leaves[j].old.nbytes for j in early) / params, 3),
        "scalars": len({v for g in cut.groups for v in g.scalars}),
        "early": len(early),
        "late": len(cut.late),
    }


def _call_plain(step: Any, tree: Any, state: list[Any], tokens: Any) -> list[Any]:
    return jax.tree.leaves(step(jax.tree.unflatten(tree, state), tokens)[0])


def _call_armed(armed: Any, state: list[Any], tokens: Any) -> list[Any]:
    results = armed(*state, tokens)
    return [*results[: len(state)], *results[len(state) + 1 :]]  # without the loss


def _run(step: Callable[[list[Any], Any], list[Any]], first: Any, size: int) -> list[Arrays]:
    """The state at every version, followed by what the step to it retained."""
    flat = jax.tree.leaves(first)
    seen = [[_host(x) for x in flat]]
    for n in range(STEPS):
        results = step(flat, batch(n))
        seen.append([_host(x) for x in results])
        flat = results[:size]
    return seen


def _restored(path: Path, like: list[Arrays]) -> list[Arrays]:
    """The run of another process; NumPy stores bf16 as plain bytes."""
    with np.load(path) as stored:
        arrays = iter([stored[name] for name in stored.files])
    return [[next(arrays).view(x.dtype) for x in each] for each in like]


def _host(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(x) if is_key else x)


def _differing(got: Arrays, want: Arrays) -> tuple[int, float]:
    """How many elements differ, and by how much at most, over the leaf's largest value."""
    count, worst = 0, 0.0
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        bits = f"u{a.itemsize}"
        if found := int((a.reshape(-1).view(bits) != b.reshape(-1).view(bits)).sum()):
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            largest = np.abs(wide_b).max() or 1.0
            count, worst = count + found, max(worst, np.abs(wide_a - wide_b).max() / largest)
    return count, float(f"{worst:.1e}")


Replay = Callable[[dict[int, Any], dict[Value, Any]], dict[int, Any]]


def _torn(replay: Replay, cut: Cut, run: list[Arrays], size: int) -> tuple[int, float]:
    """Elements of the early leaves that differ after the last updates."""
    early = sorted(j for g in cut.groups for j in g.leaves)
    state: dict[int, Any] = {j: run[STEPS - REPLAYED][j] for j in early}
    for version in range(STEPS - REPLAYED + 1, STEPS + 1):
        state = replay(state, dict(zip(cut.values, run[version][size:], strict=True)))
    return _differing([np.asarray(state[j]) for j in early], [run[STEPS][j] for j in early])


def _recipes(cut: Cut, leaves: Sequence[Leaf], fence: Any = None) -> Replay:
    """One program per group, on flat leaves; `fence` as for an accelerator's run, or none."""
    updates = [jax.jit(make_recipe(group, leaves).apply) for group in cut.groups]

    def replay(state: dict[int, Any], values: dict[Value, Any]) -> dict[int, Any]:
        new: dict[int, Any] = {}
        for group, update in zip(cut.groups, updates, strict=True):
            old = [state[j].reshape(-1) for j in group.leaves]
            retained = [values[v].reshape(-1) for v in group.retained]
            scalars = [values[v] for v in group.scalars]
            chunks = update(old, retained, scalars, fence)
            for j, x in zip(group.leaves, chunks, strict=True):
                new[j] = np.asarray(x).reshape(leaves[j].old.shape)
        return new

    return replay
