"""Figures of the training benchmark: `<mode>/<interval>/<figure>` of one result file."""

import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_NAME = re.compile(r"([a-z0-9_]+)/(\d+)/([a-z0-9_]+)")
# Ours in black, filled and solid; what it is measured against in grey.
_OURS = {"color": "0.0", "linestyle": "-"}
_OTHERS = {"color": "0.5", "linestyle": "--"}
_MARKERS = "osD^vP<>Xh"

_HOOKS, _INFLATION = "hook_secs_per_save", "inflation_secs_per_save"
_PREDICTED = "predicted_stall_secs"

_STOCK = "orbax_async"
_LEAST_PREDICTIONS = 6  # fewer points would show no line

Modes = dict[str, dict[int, Sequence[float]]]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the planner expected of one mode's saves, and what they cost; seconds per save.

    Attributes:
      mode: Its name.
      interval: Steps between its saves.
      steps: K.
      predicted: Stall, by the cost model.
      inflation: All that training lost, of each phase.
      hooks: Of it, what was spent in calls of the step and of `save`.
    """

    mode: str
    interval: int
    steps: int
    predicted: float
    inflation: Sequence[float]
    hooks: Sequence[float]


def of_figure(record: Mapping[str, Any], figure: str) -> Modes:
    """Samples of one figure, by mode and interval.

    Example:
      >>> of_figure({"samples": {"gockpt/50/x": [1.0], "gockpt/50/y": [2.0]}}, "x")
      {'gockpt': {50: [1.0]}}
    """
    modes: Modes = {}
    for name, values in record["samples"].items():
        found = _NAME.fullmatch(name)
        if found and found[3] == figure:
            modes.setdefault(found[1], {})[int(found[2])] = values
    return modes


def has_throughput(record: Mapping[str, Any]) -> bool:
    """Whether a record holds training's throughput at several intervals, stock's beside ours."""
    modes = of_figure(record, "throughput_ratio")
    return all(len(modes.get(mode, ())) > 1 for mode in ("gockpt", _STOCK))


def has_stall(record: Mapping[str, Any]) -> bool:
    """Whether a record holds inflation per save, stock's beside ours; never the stall alone."""
    inflation, hooks = of_figure(record, _INFLATION), of_figure(record, _HOOKS)
    return bool(hooks) and {"gockpt", _STOCK} <= inflation.keys()


def has_prediction(record: Mapping[str, Any]) -> bool:
    """Whether a record holds enough predicted stalls beside measured ones."""
    return len(predictions(record)) >= _LEAST_PREDICTIONS


def draw_throughput(figure: Any, record: Mapping[str, Any]) -> None:
    """Throughput over that without checkpoints, against the interval; bars hold the middle half.

    So does the band, of training without checkpoints over itself: what lies in it may be drift.
    """
    axes = figure.subplots()
    modes = of_figure(record, "throughput_ratio")
    saving = _saving(modes)
    for n, (mode, by_interval) in enumerate(saving):
        intervals = sorted(by_interval)
        medians = [statistics.median(by_interval[i]) for i in intervals]
        halves = [middle_half(by_interval[i]) for i in intervals]
        spread = [
            [m - low for m, (low, _) in zip(medians, halves, strict=True)],
            [high - m for m, (_, high) in zip(medians, halves, strict=True)],
        ]
        axes.errorbar(intervals, medians, yerr=spread, label=mode, capsize=2, linewidth=1.2,
                      marker=_MARKERS[n % len(_MARKERS)], markersize=5, **_look(mode))  # fmt: skip
    ideal = sorted(modes.get("ideal", {}).items())
    if ideal:
        low, high = zip(*(middle_half(values) for _, values in ideal), strict=True)
        axes.fill_between([i for i, _ in ideal], low, high, color="0.9", zorder=0, label="ideal")
    axes.axhline(1.0, color="0.0", linewidth=0.6, linestyle=":")
    axes.set_xscale("log")
    ticks = sorted({i for _, by_interval in saving for i in by_interval})
    axes.set_xticks(ticks, [str(i) for i in ticks])
    axes.minorticks_off()
    axes.set_xlabel("steps between saves")
    axes.set_ylabel("throughput over that without checkpoints")
    axes.legend(fontsize=8)


def draw_stall(figure: Any, record: Mapping[str, Any]) -> None:
    """What a save costs: time in hooks, and the whole of it; bars hold the middle half."""
    inflation, hooks = of_figure(record, _INFLATION), of_figure(record, _HOOKS)
    rows = [(mode, i) for mode, by_interval in _saving(inflation) for i in sorted(by_interval)]
    axes = figure.subplots()
    for n, (mode, i) in enumerate(rows):
        for values, fill, label in (
            (inflation[mode][i], "0.0", "inflation: all the time that training lost"),
            (hooks.get(mode, {}).get(i, ()), "1.0", "of it inside calls of the step and of save"),
        ):
            if values:
                axes.plot(middle_half(values), [n, n], color="0.5", linewidth=1.0)
                axes.plot(statistics.median(values), n, "o", color="0.0", markersize=6,
                          markerfacecolor=fill, label=label if n == 0 else None)  # fmt: skip
    axes.axvline(0.0, color="0.0", linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(rows)), [f"{mode}, every {i}" for mode, i in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("seconds per save")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def draw_prediction(figure: Any, record: Mapping[str, Any]) -> None:
    """The planner's predicted stall against what was measured; bars from least to most."""
    axes = figure.subplots()
    found = predictions(record)
    for n, p in enumerate(found):
        for values, fill, label in (
            (p.inflation, "0.0", "inflation: all the time that training lost"),
            (p.hooks, "1.0", "of it inside calls of the step and of save"),
        ):
            axes.plot([p.predicted] * 2, [min(values), max(values)], color="0.5", linewidth=1.0)
            axes.plot(p.predicted, statistics.median(values), "o", color="0.0", markersize=5,
                      markerfacecolor=fill, label=label if n == 0 else None)  # fmt: skip
        name = f"{p.mode.removeprefix('gockpt_')}, K = {p.steps}"
        axes.annotate(name, (p.predicted, max(p.inflation)), xytext=(0, 4), fontsize=6.5,
                      textcoords="offset points", ha="left", rotation=30)  # fmt: skip
    most = max(max(p.predicted, *p.inflation) for p in found) * 1.1
    axes.plot([0, most], [0, most], color="0.5", linewidth=0.8, linestyle=":", label="as predicted")
    axes.set_xlabel("predicted stall, seconds per save")
    axes.set_ylabel("measured, seconds per save")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def predictions(record: Mapping[str, Any]) -> list[Prediction]:
    """Of each mode and interval whose saves the planner predicted; in the record's order."""
    predicted, steps = of_figure(record, _PREDICTED), of_figure(record, "window_steps")
    inflation, hooks = of_figure(record, _INFLATION), of_figure(record, _HOOKS)
    return [
        Prediction(
            mode, i, round(statistics.median(steps[mode][i])), statistics.median(values),
            inflation[mode][i], hooks[mode][i],
        )
        for mode, by_interval in predicted.items()
        for i, values in by_interval.items()
        if all(i in figure.get(mode, ()) for figure in (steps, inflation, hooks))
    ]  # fmt: skip


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """Between what a quarter of the values is below, and a quarter above.

    Example:
      >>> middle_half([0.9, 1.0, 1.1, 1.2, 1.6])
      (1.0, 1.2)
    """
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _saving(modes: Modes) -> list[tuple[str, dict[int, Sequence[float]]]]:
    """All modes but the one that never saves, in the record's order."""
    return [(mode, by_interval) for mode, by_interval in modes.items() if mode != "ideal"]


def _look(mode: str) -> dict[str, str]:
    return _OURS if mode.startswith("gockpt") else _OTHERS
