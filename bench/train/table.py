"""The training benchmark as a table: a line for each mode and interval."""

import re
import statistics
from collections.abc import Mapping, Sequence

from bench.record import Record, print_table

_COST = {
    "throughput_ratio": "through-put",
    "job_throughput_ratio": "with drain",
    "inflation_secs_per_save": "inflation s",
    "inflation_vs_stock_async": "of stock's",
    "hook_secs_per_save": "hooks s",
    "step_median_secs": "step s",
    "step_p95_secs": "p95 s",
    "job_wall_secs": "wall, drain s",
    "ettr_mtbf_1h": "ETTR 1 h",
    "ettr_mtbf_24h": "24 h",
}
_HOLDINGS = {
    "window_steps": "K",
    "moved_bytes_ratio": "moved",
    "link_gb_per_sec": "link GB/s",
    "blocked_gb_per_sec": "blocked GB/s",
    "drain_secs": "drain s",
    "write_secs": "write s",
    "commit_secs": "commit s",
    "visible_secs": "visible s",
    "drain_over_interval": "of interval",
    "device_memory_ratio": "device",
    "device_memory_over_plan": "of plan",
    "host_memory_ratio": "host",
}
_FIGURE = re.compile(r"(.*/\d+)/([a-z0-9_]+)")


class TrainRecord(Record):
    """A record of `<mode>/<interval>/<figure>`."""

    def show(self) -> None:
        """Prints the notes, and last the medians: two tables, a line for each mode and interval."""
        show_modes("bench train, medians", self.samples, self.notes)


def show_modes(
    title: str, samples: Mapping[str, Sequence[float]], notes: Sequence[str] = ()
) -> None:
    """Prints the medians of `<mode>/<interval>/<figure>`: two tables, a line for each mode.

    Args:
      title: Of the table.
      samples: Of any figures; others are left out, and so are columns without any.
      notes: Printed above it.
    """
    _show(f"{title}: what training pays", _COST, samples, notes)
    _show(f"{title}: what moves and what is held", _HOLDINGS, samples)


def _show(
    title: str, names: Mapping[str, str], samples: Mapping[str, Sequence[float]],
    notes: Sequence[str] = (),
) -> None:  # fmt: skip
    rows: dict[str, dict[str, Sequence[float]]] = {}
    phases: dict[str, int] = {}
    for name, values in samples.items():
        found = _FIGURE.fullmatch(name)
        if found and found[2] in names:
            rows.setdefault(found[1], {})[found[2]] = values
        if found and found[2] == "wall_secs":
            phases[found[1]] = len(values)
    columns = [c for c in names if any(c in figures for figures in rows.values())]
    table = [
        (
            row,
            *(f"{statistics.median(figures[c]):.3g}" if c in figures else "-" for c in columns),
            str(phases.get(row, 0)),
        )
        for row, figures in rows.items()
    ]
    if table or notes:
        print_table(title, ("mode/interval", *(names[c] for c in columns), "n"), table, notes)
