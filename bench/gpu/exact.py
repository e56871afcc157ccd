"""What replay on the host makes of updates that a device made: distances in ULPs, per optimizer.

Per optimizer: some armed steps on the device, whose states and cut values are kept; the last
updates replayed from them on the CPU backend, by the programs that the library itself would run;
each element compared with the device's own. With the exact cut every distance should be 0; the cut
that accepts rounding lets parameters leave early too, and here is by how much they would be off.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import gockpt_jax as gockpt
from bench.cut.programs import OPTIMIZERS, batch, make_step
from bench.cut.runs import REPLAYED, STEPS, Traced, replayed
from bench.record import Record
from gockpt_jax.replay.ulps import scale_of, ulp_distance
from gockpt_jax.training.cut import find_cut

FIRST = ("adamw", "adam", "sgd, momentum", "lion", "adafactor", "lamb", "adamw, clipped", "rmsprop",
         "adam, l2", "adagrad", "amsgrad", "nadam", "yogi", "adamax", "muon")  # fmt: skip
"""Measured in this order; the rest of `OPTIMIZERS` after them."""
_LEFT = "not measured, or failed, when the time was over: "
BINS = (0, 1, 2, 4, 8, 16, 64, 1024)
"""Upper ends, in ULPs; a last bin has all beyond, and what no number of ULPs is between."""

NOTES = [
    f"CUT/OPTIMIZER/PART/...: {REPLAYED} of {STEPS} updates replayed on the CPU backend, fenced "
    "as for an accelerator's run; PART: params, or moments (all other early leaves). max_ulps: the "
    "largest distance; differing: part of the elements that are not equal; relative: largest "
    "difference over the leaf's largest value. CUT: exact, or rounded (the cut that accepts "
    "rounding). `histograms` counts elements by distance, bins up to and with "
    f"{', '.join(map(str, BINS))} ULPs and beyond. Denormals count as zero.",
    "perturbed/OPTIMIZER: part of the state's elements that differ between the user's own "
    f"executable and the armed one after {STEPS} steps.",
    "library/OPTIMIZER/audit_max_ulps: the whole way, through a manager and a window of four "
    "steps; every replayed element compared with the device's at the save step.",
    f"tried: optimizers, of {len(OPTIMIZERS)}; failures: of measurements, told in `failures`.",
    "Equal in every run of the same programs, so one run each.",
]


def run(
    record: Record, *, toy: bool, is_over: Callable[[], bool], saved: Callable[[], None],
    share: tuple[int, int] = (0, 1),
) -> None:  # fmt: skip
    """Measures optimizer after optimizer.

    Args:
      record: Takes figures; histograms go to its details.
      toy: A tiny model and one optimizer.
      is_over: Whether the time is.
      saved: Called after each optimizer.
      share: Which share of the optimizers, of how many; other processes measure the others.
    """
    record.notes += NOTES
    first, count = share
    names = names_of(count, toy=toy)[first::count]
    record.details |= {"histograms": {}, "failures": {}}
    for name in names:
        if is_over():
            record.notes += _not_measured(record.samples, names)
            return
        for what in (_replay, _through_the_library):
            try:
                what(record, name, "mlp" if toy else "wide mlp")
            except Exception as error:  # one optimizer less, not all of them
                record.details["failures"][f"{what.__name__} {name}"] = repr(error)[:1000]
        record.samples["exact/tried"] = [float(names.index(name) + 1)]
        record.samples["exact/failures"] = [float(len(record.details["failures"]))]
        saved()


def names_of(shares: int, *, toy: bool) -> tuple[str, ...]:
    """The optimizers to measure, in order; of toys one for each share."""
    everything = (*FIRST, *(name for name in OPTIMIZERS if name not in FIRST))
    return everything[:shares] if toy else everything


def _not_measured(samples: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    left = "; ".join(name for name in names if f"perturbed/{name}" not in samples)
    return [f"{_LEFT}{left}."] if left else []


def gather(record: Record, shares: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Makes one record of those of several processes, each of which had a share of the optimizers.

    Args:
      record: Takes them; what it had of them before is replaced.
      shares: The records, as JSON.
      names: Of all optimizers that they were to measure.
    """
    counts = ("exact/tried", "exact/failures")
    notes = (note for share in shares for note in share["notes"] if not note.startswith(_LEFT))
    record.notes[:] = dict.fromkeys(notes)
    record.samples.clear()
    for share in shares:
        record.samples |= share["samples"]
    record.notes += _not_measured(record.samples, names)
    for name in counts:
        record.samples[name] = [sum(sum(share["samples"].get(name, ())) for share in shares)]
    for name in ("histograms", "failures"):
        found = [share.get("details", {}).get(name, {}) for share in shares]
        record.details[name] = {key: value for part in found for key, value in part.items()}


def _replay(record: Record, name: str, model: str) -> None:
    traced = Traced(*make_step(name, model))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(traced.first())]
    plain = traced.run(traced.user)[-1]
    for label, exact in (("exact", True), ("rounded", False)):
        cut = find_cut(traced.leaves, even_for_nothing=True, exact=exact)
        seen = traced.run(traced.armed(cut))
        if exact:
            differing = sum(_differing(a, b) for a, b in zip(seen[-1], plain, strict=False))
            record.samples[f"perturbed/{name}"] = [differing / sum(a.size for a in plain)]
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            early = replayed(cut, traced.leaves, seen, np.int32(0))
        compare_leaves(record, f"{label}/{name}", paths, early, seen[STEPS])


def _differing(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.count_nonzero(ulp_distance(a, b)))


def compare_leaves(
    record: Record, label: str, paths: Sequence[str], early: Mapping[int, np.ndarray],
    true: Sequence[np.ndarray],
) -> None:  # fmt: skip
    """Adds how far early leaves are from the device's own.

    Args:
      record: Takes figures, and histograms in its details.
      label: Of the figures.
      paths: Of all leaves.
      early: Replayed leaves, by position.
      true: All leaves.
    """
    parts: dict[str, list[tuple[np.ndarray, float]]] = {}
    for j, value in early.items():
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


def _through_the_library(record: Record, name: str, model: str) -> None:
    step, first = make_step(name, model)
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
