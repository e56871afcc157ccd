"""What replay on the host makes of updates that a device made: distances in ULPs, per optimizer.

Per optimizer: some armed steps on the device, whose states and cut values are kept; the last
updates replayed from them on the CPU backend, by the programs that the library itself would run;
each element compared with the device's own. With the exact cut every distance should be 0; the cut
that accepts rounding lets parameters leave early too, and here is by how much they would be off.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import gockpt_jax as gockpt
from bench.cut.programs import OPTIMIZERS, batch, mlp_loss
from bench.record import Record
from gockpt_jax.replay.ulps import scale_of, ulp_distance
from gockpt_jax.training.armed import with_outputs
from gockpt_jax.training.cut import Cut, find_cut
from gockpt_jax.training.graph import flatten
from gockpt_jax.training.recipe import make_recipe
from gockpt_jax.training.walk import Leaf

FIRST = ("adamw", "adam", "sgd, momentum", "lion", "adafactor", "lamb", "adamw, clipped", "rmsprop",
         "adam, l2", "adagrad", "amsgrad", "nadam", "yogi", "adamax", "muon")  # fmt: skip
"""Measured in this order; the rest of `OPTIMIZERS` after them."""
BINS = (0, 1, 2, 4, 8, 16, 64, 1024)
"""Upper ends, in ULPs; a last bin has all beyond, and what no number of ULPs is between."""

_STEPS, _REPLAYED = 8, 5
_WIDTHS = (20, 640, 512, 384, 7)
_TOY_WIDTHS = (20, 48, 40, 32, 7)

NOTES = [
    f"CUT/OPTIMIZER/PART/...: {_REPLAYED} of {_STEPS} updates replayed on the CPU backend, fenced "
    "as for an accelerator's run; PART: params, or moments (all other early leaves). max_ulps: the "
    "largest distance; differing: part of the elements that are not equal; relative: largest "
    "difference over the leaf's largest value. CUT: exact, or rounded (the cut that accepts "
    "rounding). `histograms` counts elements by distance, bins up to and with "
    f"{', '.join(map(str, BINS))} ULPs and beyond. Denormals count as zero.",
    "perturbed/OPTIMIZER: part of the state's elements that differ between the user's own "
    f"executable and the armed one after {_STEPS} steps.",
    "library/OPTIMIZER/audit_max_ulps: the whole way, through a manager and a window of four "
    "steps; every replayed element compared with the device's at the save step.",
    "Equal in every run of the same programs, so one run each.",
]


def run(
    record: Record, *, toy: bool, is_over: Callable[[], bool], saved: Callable[[], None]
) -> None:
    """Measures optimizer after optimizer.

    Args:
      record: Takes figures; histograms go to its details.
      toy: A tiny model and one optimizer.
      is_over: Whether the time is.
      saved: Called after each optimizer.
    """
    record.notes += NOTES
    names = FIRST[:1] if toy else (*FIRST, *(name for name in OPTIMIZERS if name not in FIRST))
    widths = _TOY_WIDTHS if toy else _WIDTHS
    record.details |= {"histograms": {}, "failures": {}}
    for name in names:
        if is_over():
            record.notes.append(f"not measured, the time was over: {name} and what follows it.")
            return
        for what in (_replay, _through_the_library):
            try:
                what(record, name, widths)
            except Exception as error:  # one optimizer less, not all of them
                record.details["failures"][f"{what.__name__} {name}"] = repr(error)[:1000]
        saved()


def _make_step(name: str, widths: Sequence[int]) -> tuple[Any, Any]:
    tx = OPTIMIZERS[name]()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(mlp_loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    @jax.jit
    def first() -> Any:
        keys = jax.random.split(jax.random.key(0), len(widths))
        params = {
            f"layer{i}": {
                "kernel": jax.random.normal(keys[i], (a, b)) * a**-0.5,
                "bias": jnp.zeros(b),
            }
            for i, (a, b) in enumerate(itertools.pairwise(widths))
        }
        return params, tx.init(params)

    return step, first


def _replay(record: Record, name: str, widths: Sequence[int]) -> None:
    step, first = _make_step(name, widths)
    start = first()
    traced = step.trace(start, batch(0))
    graph = flatten(traced.jaxpr)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(start)[0]]
    size = len(paths)
    leaves = [Leaf(str(i), graph.inputs[i], graph.outputs[i]) for i in range(size)]
    plain = _run(lambda s, x: jax.tree.leaves(step(s, x)[0]), first(), jax.tree.structure(start))
    for label, exact in (("exact", True), ("rounded", False)):
        cut = find_cut(leaves, even_for_nothing=True, exact=exact)
        sites = [v.site for v in cut.values if v.site is not None]
        armed = jax.jit(with_outputs(traced.jaxpr, sites), donate_argnums=tuple(range(size)))

        def call(state: Any, tokens: Any, armed: Any = armed) -> list[Any]:
            results = armed(*jax.tree.leaves(state), tokens)
            return [*results[:size], *results[size + 1 :]]  # without the loss

        seen = _run(call, first(), jax.tree.structure(start))
        if exact:
            differing = sum(_differing(a, b) for a, b in zip(seen[-1], plain[-1], strict=False))
            elements = sum(a.size for a in plain[-1])
            record.samples[f"perturbed/{name}"] = [differing / elements]
        replayed = _replayed(cut, leaves, seen)
        compare_leaves(record, f"{label}/{name}", paths, replayed, seen[_STEPS])


def _run(call: Any, state: Any, tree: Any) -> list[list[np.ndarray]]:
    """The state at every version, followed by what the step to it retained."""
    seen = [[_host(x) for x in jax.tree.leaves(state)]]
    for n in range(_STEPS):
        results = call(state, batch(n))
        seen.append([_host(x) for x in results])
        state = jax.tree.unflatten(tree, results[: tree.num_leaves])
    return seen


def _host(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(x) if is_key else x)


def _differing(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.count_nonzero(ulp_distance(a, b)))


def compare_leaves(
    record: Record, label: str, paths: Sequence[str], replayed: Mapping[int, np.ndarray],
    true: Sequence[np.ndarray],
) -> None:  # fmt: skip
    """Adds how far replayed leaves are from the device's own.

    Args:
      record: Takes figures, and histograms in its details.
      label: Of the figures.
      paths: Of all leaves.
      replayed: Early leaves, by position.
      true: All leaves.
    """
    parts: dict[str, list[tuple[np.ndarray, float]]] = {}
    for j, value in replayed.items():
        part = "params" if paths[j].startswith("[0]") else "moments"
        distance = ulp_distance(value, true[j]).reshape(-1)
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(value.astype(np.float64) - true[j].astype(np.float64))
        scale = scale_of(true[j].reshape(-1)) or 1.0
        largest = float(np.max(gap[np.isfinite(gap)], initial=0.0))
        parts.setdefault(part, []).append((distance, largest / scale))
    for part, found in parts.items():
        distances = np.concatenate([distance for distance, _ in found])
        record.samples[f"{label}/{part}/max_ulps"] = [float(distances.max(initial=0))]
        record.samples[f"{label}/{part}/differing"] = [float(np.mean(distances > 0))]
        record.samples[f"{label}/{part}/relative"] = [max(relative for _, relative in found)]
        bins = np.searchsorted(np.array(BINS, np.uint64), distances)  # the first end not below it
        counts = np.bincount(bins, minlength=len(BINS) + 1)
        record.details["histograms"][f"{label}/{part}"] = counts.tolist()


def _replayed(
    cut: Cut, leaves: Sequence[Leaf], seen: list[list[np.ndarray]]
) -> dict[int, np.ndarray]:
    """The early leaves after the last updates, replayed on the CPU backend."""
    size = len(leaves)
    state: dict[int, Any] = {
        j: seen[_STEPS - _REPLAYED][j] for group in cut.groups for j in group.leaves
    }
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        updates = [jax.jit(make_recipe(group, leaves).apply) for group in cut.groups]
        for version in range(_STEPS - _REPLAYED + 1, _STEPS + 1):
            values = dict(zip(cut.values, seen[version][size:], strict=True))
            for group, update in zip(cut.groups, updates, strict=True):
                old = [state[j].reshape(-1) for j in group.leaves]
                retained = [values[v].reshape(-1) for v in group.retained]
                scalars = [values[v] for v in group.scalars]
                for j, x in zip(
                    group.leaves, update(old, retained, scalars, np.int32(0)), strict=True
                ):
                    state[j] = np.asarray(x).reshape(seen[0][j].shape)
    return state


def _through_the_library(record: Record, name: str, widths: Sequence[int]) -> None:
    step, first = _make_step(name, widths)
    window = gockpt.WindowOptions(steps=4, audit=gockpt.Audit(fraction=1.0, max_ulps=2**40))
    options = ocp.CheckpointManagerOptions(save_interval_steps=6)
    with (
        tempfile.TemporaryDirectory() as directory,
        gockpt.GoCkptManager(directory, options=options, window=window) as manager,
    ):
        wrapped, state = manager.wrap(step), first()
        for n in range(13):
            state, _ = wrapped(state, batch(n))
            manager.save(n, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        report = manager.reports[-1]
    if report.audit is None:
        record.notes.append(f"library/{name}: {report.kind}, {report.reason}")
        return
    record.samples[f"library/{name}/audit_max_ulps"] = [float(report.audit.max_ulps)]
    record.samples[f"library/{name}/audited_bytes"] = [float(report.audit.compared_bytes)]
