"""The training benchmark as a table: a line for each mode and interval."""

import re
import statistics
from collections.abc import Mapping, Sequence

from bench.record import Record, print_table

_COLUMNS = {
    "throughput_ratio": "through-put",
    "job_throughput_ratio": "with drain",
    "inflation_secs_per_save": "inflation s",
    "inflation_vs_stock_async": "of stock's",
    "hook_secs_per_save": "hooks s",
    "step_median_secs": "step s",
    "step_p95_secs": "p95 s",
    "visible_secs": "visible s",
    "drain_over_interval": "of interval",
    "device_memory_ratio": "device",
    "device_memory_over_plan": "of plan",
    "host_memory_ratio": "host",
    "window_steps": "K",
}
_FIGURE = re.compile(r"(.*/\d+)/([a-z0-9_]+)")


class TrainRecord(Record):
    """A record of `<mode>/<interval>/<figure>`."""

    def show(self) -> None:
        """Prints the notes, and last the medians, a line for each mode and interval."""
        show_modes("bench train: medians", self.samples, self.notes)


def show_modes(
    title: str, samples: Mapping[str, Sequence[float]], notes: Sequence[str] = ()
) -> None:
    """Prints the medians of `<mode>/<interval>/<figure>`, a line for each mode and interval.

    Args:
      title: Of the table.
      samples: Of any figures; others are left out, and so are columns without any.
      notes: Printed above it.
    """
    rows: dict[str, dict[str, Sequence[float]]] = {}
    for name, values in samples.items():
        found = _FIGURE.fullmatch(name)
        if found and found[2] in {*_COLUMNS, "wall_secs"}:
            rows.setdefault(found[1], {})[found[2]] = values
    columns = [c for c in _COLUMNS if any(c in figures for figures in rows.values())]
    table = [
        (
            row,
            *(f"{statistics.median(figures[c]):.3g}" if c in figures else "-" for c in columns),
            str(len(figures.get("wall_secs", ()))),
        )
        for row, figures in rows.items()
    ]
    if table or notes:
        print_table(title, ("mode/interval", *(_COLUMNS[c] for c in columns), "n"), table, notes)
