"""From phases to figures: `<mode>/<interval>/<figure>`."""

import re
import statistics
from collections.abc import Iterator, Sequence

from bench.record import Record
from bench.train.phases import Phase

AROUND = 10
"""Steps on either side of a save that count as around it: the longest window that is measured."""
_MTBF_HOURS = (1, 24)
_RESTART_SECS = 60.0
# The planner says what it expects in the reason of its choice.
_PREDICTED = re.compile(r"steps: predicted stall ([0-9.]+) s|; .*of a snapshot ([0-9.]+) s")
_FITS = "one device copy of the state fits"

NOTES = [
    "throughput_ratio: wall of as many undisturbed steps (of the phases of `ideal` before and after"
    " the same round), over the wall of the phase's steps, wall_secs; job_throughput_ratio,"
    " job_wall_secs: with the wait until the last save is visible.",
    "inflation_secs_per_save: (wall - wall of undisturbed steps) / saves, without the wait at the"
    " end; inflation_with_drain_secs_per_save: with it. inflation_vs_stock_async: over that of"
    " orbax_async in the same round.",
    f"around_save_secs: what the steps from {AROUND} before a save to {AROUND} behind it took over"
    " the median of the phase's other steps, of which there must be as many. Of a drift between"
    " phases nothing is in it; nor of how writing slows the steps beside it, which inflation has.",
    "hook_secs_per_save: time in calls of the step and of `save`, over that of undisturbed steps;"
    " blocked_gb_per_sec: the state's bytes over it. link_gb_per_sec: of what crosses the link"
    " while it is watched, as the library learns it for its plans.",
    "visible_secs: from the return of `save` until the checkpoint was visible, seen once per step;"
    " drain_over_interval: that over the undisturbed time of an interval: above 1 the next save"
    " has to wait. drain_secs, write_secs, commit_secs, early and moved bytes: the library's"
    " own reports; predicted_stall_secs: what the planner expected of each save, by its cost model;"
    " gockpt is told the time of an undisturbed step, which a longer run would have measured (and"
    " the rate of a simulated link; a real one it measures).",
    "full_collection_secs: of wall_secs, in collections of all of Python's objects; by step in"
    " `phases` (collected_secs).",
    "gockpt_b<N>: with a device budget of N percent of the state's bytes for what is staged and"
    " retained. ..._plain: stock's, with its layout that is fastest on a local disk.",
    "device_memory_ratio, host_memory_ratio: the most sampled (every 10 ms) in use on the device,"
    " over that of ideal phases; growth of resident memory over the state's bytes, of a process"
    " that runs this mode alone. host_system_memory_ratio: growth of the machine's memory in use,"
    " which has pinned memory in it. resident_peak_bytes: of the process that all modes share,"
    " so it tells no mode from another. device_memory_over_plan: the device's peak, over that of"
    " ideal phases and what the library says that it staged and retained.",
    f"ettr_mtbf_Nh: 1 / (1 + C/tau + (tau/2 + visible + {_RESTART_SECS:.0f} s) / M): inflation C,"
    " interval tau, time between failures M of N hours, restart assumed to take that long.",
    "ideal's own throughput_ratio: of the phase after a round, over both: the machine's drift.",
    "Excluded: compilation, and one to three phases of each mode before the first that counts.",
]


def add_phase(
    record: Record, phase: Phase, *, interval: int, ideal: Phase, state_bytes: int,
    async_inflation: float | None,
) -> float | None:  # fmt: skip
    """Adds a phase's figures to a record.

    Args:
      record: To add to.
      phase: Of any mode.
      interval: Steps between its saves.
      ideal: The undisturbed phase of the same round.
      state_bytes: Of the state.
      async_inflation: Inflation per save of stock's asynchronous mode in the same round.

    Returns:
      Its inflation per save, if it has saved.
    """
    undisturbed = ideal.wall_secs / ideal.steps
    figures: dict[str, float] = {
        "step_median_secs": statistics.median(phase.step_secs),
        "step_p95_secs": quantile(phase.step_secs, 0.95),
        "throughput_ratio": undisturbed * phase.steps / phase.wall_secs,
        "job_throughput_ratio": undisturbed * phase.steps / phase.secs,
        "wall_secs": phase.wall_secs,
        "job_wall_secs": phase.secs,
        "resident_peak_bytes": phase.peaks.resident,
        "full_collection_secs": sum(phase.collected_secs),
    }
    if ideal.peaks.device:
        figures["device_peak_bytes"] = phase.peaks.device
        figures["device_memory_ratio"] = phase.peaks.device / ideal.peaks.device
        planned = max((r["peak_device_bytes"] for r in phase.reports), default=0)
        if planned:
            over = phase.peaks.device / (ideal.peaks.device + planned)
            figures["device_memory_over_plan"] = over
    inflation = None
    if phase.saves:
        inflation = (phase.wall_secs - undisturbed * phase.steps) / phase.saves
        figures |= _of_saves(phase, inflation, undisturbed * interval, ideal)
        if figures["hook_secs_per_save"] > 0:  # else it is noise
            figures["blocked_gb_per_sec"] = state_bytes / figures["hook_secs_per_save"] / 1e9
        if async_inflation is not None and async_inflation > 0:
            figures["inflation_vs_stock_async"] = inflation / async_inflation
    for name, value in (*figures.items(), *_of_reports(phase, state_bytes)):
        record.add(f"{phase.mode}/{interval}/{name}", value)
    return inflation


def _of_saves(
    phase: Phase, inflation: float, interval_secs: float, ideal: Phase
) -> dict[str, float]:
    hooks = sum(phase.hook_secs) - phase.steps * sum(ideal.hook_secs) / ideal.steps
    visible = max(phase.visible_secs, default=phase.drain_secs)
    figures = {
        "inflation_secs_per_save": inflation,
        "inflation_with_drain_secs_per_save": inflation + phase.drain_secs / phase.saves,
        "hook_secs_per_save": hooks / phase.saves,
        "final_drain_secs": phase.drain_secs,
        "visible_secs": visible,
        "drain_over_interval": visible / interval_secs,
    }
    around = around_saves(phase.step_secs, phase.saved_at)
    if around is not None:
        figures["around_save_secs"] = around
    for hours in _MTBF_HOURS:
        lost = interval_secs / 2 + visible + _RESTART_SECS
        cost = 1 + max(inflation, 0.0) / interval_secs + lost / (hours * 3600)
        figures[f"ettr_mtbf_{hours}h"] = 1 / cost
    return figures


def around_saves(step_secs: Sequence[float], saved_at: Sequence[int]) -> float | None:
    """What the steps around saves took over the median of the others, in seconds per save.

    Args:
      step_secs: Of each step; the first is not counted, for it waits for none before it.
      saved_at: Which of them had a save.

    Returns:
      `None` if fewer are left than are around saves, or there is no save.

    Example:
      >>> secs = [1.0] * 60
      >>> secs[20], secs[21] = 1.5, 0.75
      >>> around_saves(secs, [20])
      0.25
    """
    near = {n for at in saved_at for n in range(at - AROUND, at + AROUND + 1)}
    inside = [secs for n, secs in enumerate(step_secs) if n and n in near]
    others = [secs for n, secs in enumerate(step_secs) if n and n not in near]
    if not inside or len(others) < len(inside):
        return None
    return (sum(inside) - len(inside) * statistics.median(others)) / len(saved_at)


def _of_reports(phase: Phase, state_bytes: int) -> Iterator[tuple[str, float]]:
    for report in phase.reports:
        yield "stall_secs", report["stall_secs"]
        yield "drain_secs", report["drain_secs"]
        yield "write_secs", report["write_secs"]
        yield "commit_secs", report["commit_secs"]
        yield "window_steps", report["window_steps"]
        yield "early_bytes_ratio", report["early_bytes"] / state_bytes
        yield "moved_bytes_ratio", (report["state_bytes"] + report["gradient_bytes"]) / state_bytes
        yield "staged_bytes_ratio", report["peak_device_bytes"] / state_bytes
        if report.get("link_bytes_per_sec"):
            yield "link_gb_per_sec", report["link_bytes_per_sec"] / 1e9
        late_bytes = report["state_bytes"] - report["early_bytes"]
        if report["drain_secs"] > 0:
            yield "drain_gb_per_sec", late_bytes / report["drain_secs"] / 1e9
        predicted = predicted_stall_secs(report["reason"])
        if predicted is not None:
            yield "predicted_stall_secs", predicted
        if report["audit"]:
            yield "audit_max_ulps", report["audit"]["max_ulps"]


def predicted_stall_secs(reason: str) -> float | None:
    """What the planner expected of a save, from the reason in its report; `None` if it did not.

    Example:
      >>> predicted_stall_secs("3 steps: predicted stall 0.125 s, of a snapshot 2.500 s; at ...")
      0.125
      >>> why = "no window gains 0.03 s: predicted stall at least 3.000 s"
      >>> predicted_stall_secs(f"{why}; predicted stall of a snapshot 2.500 s")
      2.5
      >>> predicted_stall_secs("one device copy of the state fits: 1 GB, no device budget")
      0.0
      >>> predicted_stall_secs("`steps=4`")
    """
    if reason.startswith(_FITS):
        return 0.0
    found = _PREDICTED.search(reason)
    return float(found[1] or found[2]) if found else None


def add_host_memory(
    record: Record, phase: Phase, *, interval: int, state_bytes: int, before: tuple[int, int]
) -> None:
    """Adds by how much memory grew in a process that runs one mode alone.

    Args:
      record: To add to.
      phase: The first with saves.
      interval: Steps between them.
      state_bytes: Of the state.
      before: Resident bytes, and bytes in use on the machine, of training without checkpoints.
    """
    grown = (phase.peaks.resident - before[0], phase.peaks.system - before[1])
    for name, value in zip(("host_memory_ratio", "host_system_memory_ratio"), grown, strict=True):
        record.add(f"{phase.mode}/{interval}/{name}", max(0, value) / state_bytes)


def quantile(values: list[float], q: float) -> float:
    """The value that a part `q` of the others do not exceed.

    Example:
      >>> quantile([3.0, 1.0, 2.0, 4.0], 0.95)
      4.0
    """
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]
