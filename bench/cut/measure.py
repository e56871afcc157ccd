"""One optimizer on one model: its cut, armed and replayed."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from bench.cut.order import measure_order
from bench.cut.programs import make_step
from bench.cut.runs import STEPS, Arrays, Traced, replayed
from gockpt_jax.training.cut import Cut, find_cut
from gockpt_jax.training.walk import Leaf


def measure(optimizer: str, model: str, isa: str, directory: Path) -> dict[str, float]:
    """Figures by name; those that depend on the process are `<isa>/<figure>`."""
    traced = Traced(*make_step(optimizer, model))
    leaves, size = traced.leaves, len(traced.leaves)
    cut = find_cut(leaves, even_for_nothing=False)
    run = traced.run(traced.armed(cut))
    perturbed = differing(run[-1][:size], traced.run(traced.user)[-1])
    torn = _torn(cut, leaves, run)
    figures = {f"{isa}/perturbed": perturbed[0], f"{isa}/perturbed by": perturbed[1]}
    figures |= {f"{isa}/torn": torn[0], f"{isa}/torn by": torn[1]}
    path = directory / f"{model}-{optimizer.replace(' ', '')}.npz"
    if isa == "avx":
        np.savez(path, *(x for arrays in run for x in arrays))
        params = sum(x.nbytes for x in jax.tree.leaves(traced.first()[0]))
        return figures | _figures(cut, leaves, params)
    return figures | {"fenced": _torn(cut, leaves, _restored(path, run), np.int32(0))[0]}


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


def _restored(path: Path, like: list[Arrays]) -> list[Arrays]:
    """The run of another process; NumPy stores bf16 as plain bytes."""
    with np.load(path) as stored:
        arrays = iter([stored[name] for name in stored.files])
    return [[next(arrays).view(x.dtype) for x in each] for each in like]


def differing(got: Arrays, want: Arrays) -> tuple[int, float]:
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


def _torn(
    cut: Cut, leaves: Sequence[Leaf], run: list[Arrays], fence: np.int32 | None = None
) -> tuple[int, float]:
    """Elements of the early leaves that differ after the last updates."""
    found = replayed(cut, leaves, run, fence)
    return differing(list(found.values()), [run[STEPS][j] for j in found])
