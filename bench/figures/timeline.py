"""The window's timeline and memory over time; readable in grey."""

from collections.abc import Mapping
from typing import Any

from bench.timeline.spans import LANES

_TITLES = {
    "device": "device",
    "trainer": "trainer's thread,\nin our hooks",
    "pulls": "pulls landing",
    "replay": "replay",
    "write": "write",
}
# Greys far enough apart to print; hatched where two kinds share a lane.
_LOOKS = {
    "step": {"facecolor": "0.88"},
    "armed step": {"facecolor": "0.62"},
    "staging copy": {"facecolor": "0.0"},
    "stage": {"facecolor": "0.0"},
    "start pulls": {"facecolor": "0.62"},
    "seal": {"facecolor": "0.88", "hatch": "//////"},
    "audit": {"facecolor": "1.0", "hatch": "xxxx"},
    "land": {"facecolor": "0.45"},
    "replay": {"facecolor": "0.25"},
    "write": {"facecolor": "0.75"},
}
_LEAST_SHARE = 1 / 800
"""Of the width: a shorter span would not be seen."""


def has_spans(record: Mapping[str, Any]) -> bool:
    """Whether a record holds a window's spans."""
    return bool(record.get("spans"))


def has_series(record: Mapping[str, Any]) -> bool:
    """Whether a record holds memory over time."""
    return has_spans(record) and bool(record.get("series"))


def draw_lanes(figure: Any, record: Mapping[str, Any]) -> None:
    """One lane for each place where work is done, top to bottom the way of the data."""
    spans = record["spans"]
    axes = figure.subplots()
    end = max(s["end_secs"] for s in spans)
    lanes = list(LANES)
    kinds: dict[str, Any] = {}
    for name in (label for names in LANES.values() for label in names.values()):
        ours = [s for s in spans if s["name"] == name]
        if ours:
            boxes = _visible([(s["start_secs"], s["end_secs"]) for s in ours], end * _LEAST_SHARE)
            row = lanes.index(ours[0]["lane"])
            kinds[name] = axes.broken_barh(
                [(start, stop - start) for start, stop in boxes], (row - 0.36, 0.72),
                edgecolor="0.0", linewidth=0.3, **_LOOKS[name],
            )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [_TITLES[lane] for lane in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0.0, end)
    axes.set_xlabel("seconds")
    opened, sealed = window_of(record)
    for secs, what in ((opened, "opens"), (sealed, "save")):
        axes.axvline(secs, color="0.0", linewidth=0.8, linestyle=":")
        axes.annotate(what, (secs, 1.0), xycoords=("data", "axes fraction"), ha="center",
                      va="bottom", fontsize=8)  # fmt: skip
    axes.legend(kinds.values(), kinds.keys(), loc="upper center", ncols=5,
                bbox_to_anchor=(0.5, -0.16), fontsize=8)  # fmt: skip


def _visible(spans: list[tuple[float, float]], least_secs: float) -> list[tuple[float, float]]:
    """Spans at least as long as can be seen; those closer than that become one.

    Example:
      >>> _visible([(0.0, 0.25), (0.5, 0.75), (4.0, 6.0)], 1.0)
      [(0.0, 1.5), (4.0, 6.0)]
    """
    seen: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        end = max(end, start + least_secs)
        if seen and start < seen[-1][1]:
            seen[-1] = (seen[-1][0], max(seen[-1][1], end))
        else:
            seen.append((start, end))
    return seen


def draw_memory(figure: Any, record: Mapping[str, Any]) -> None:
    """Memory over time, over what it was at the beginning."""
    axes = figure.subplots()
    styles = {"resident_bytes": ("process, resident", "-"), "device_bytes": ("device", "--")}
    for name, values in record["series"].items():
        label, style = styles[name]
        secs, held = zip(*values, strict=True)
        mib = [(x - held[0]) / 2**20 for x in held]
        axes.plot(secs, mib, color="0.0", linestyle=style, linewidth=1.0, label=label)
    opened, sealed = window_of(record)
    drained = max(s["end_secs"] for s in record["spans"] if s["lane"] == "write")
    axes.axvspan(opened, sealed, color="0.88", linewidth=0, label="window")
    axes.axvspan(sealed, drained, color="0.95", linewidth=0, label="until written")
    state = record["figures"]["state_bytes"] / 2**20
    axes.axhline(state, color="0.0", linewidth=0.7, linestyle=":", label="the state's size")
    axes.set_xlim(0.0, max(s["end_secs"] for s in record["spans"]))
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB over the beginning")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def window_of(record: Mapping[str, Any]) -> tuple[float, float]:
    """When the window opened (its first staging copy was asked for), and when it was sealed."""
    trainer = [s for s in record["spans"] if s["lane"] == "trainer"]
    opened = min(s["start_secs"] for s in trainer if s["name"] == "stage")
    return opened, max(s["end_secs"] for s in trainer if s["name"] == "seal")
