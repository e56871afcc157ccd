"""The training benchmark as a table: a line for each mode and interval."""

from collections.abc import Mapping, Sequence

from bench.record import Record
from bench.tables import print_by_row

_COST = {
    "throughput_ratio": "through-put",
    "job_throughput_ratio": "with drain",
    "inflation_secs_per_save": "inflation s",
    "around_save_secs": "around it s",
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
    "early_bytes_ratio": "early",
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
    for what, columns, said in (
        ("what training pays", _COST, notes), ("what moves and what is held", _HOLDINGS, ()),
    ):  # fmt: skip
        print_by_row(
            f"{title}: {what}", "mode/interval", columns, samples, said, count="wall_secs",
            cell=lambda _, value: f"{value:.3g}",
        )  # fmt: skip
