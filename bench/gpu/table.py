"""The tables of `bench gpu`: what matters most, beside what was aimed at, in few lines."""

import dataclasses
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.cut.programs import OPTIMIZERS
from bench.tables import print_table, spread_row
from bench.train.table import show_modes

Samples = Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Aim:
    """What is aimed at.

    Attributes:
      text: In words.
      figures: Their names, a pattern; each of them has to meet it by its median.
      most: Of a figure; `None`: as much as may be.
      least: Of a figure; `None`: as little as may be.
      below: What it must not reach; `None`: no such value.
    """

    text: str
    figures: str
    most: float | None = None
    least: float | None = None
    below: float | None = None

    def is_met(self, figure: float) -> bool:
        """Whether a figure meets it."""
        return (
            (self.most is None or figure <= self.most)
            and (self.least is None or figure >= self.least)
            and (self.below is None or figure < self.below)
        )


def _of_a_save(prefix: str, mode: str) -> Iterator[Aim]:
    yield Aim(f"{prefix}inflation per save: at most 0.02 of stock async's",
              rf"{mode}/\d+/inflation_vs_stock_async", most=0.02)  # fmt: skip
    yield Aim(f"{prefix}throughput: at least 0.995 of ideal", rf"{mode}/\d+/throughput_ratio",
              least=0.995)  # fmt: skip
    yield Aim(f"{prefix}device memory: at most 1.05 of ideal + plan",
              rf"{mode}/\d+/device_memory_over_plan", most=1.05)  # fmt: skip
    yield Aim(f"{prefix}drain: below 1 of the interval", rf"{mode}/\d+/drain_over_interval",
              below=1)  # fmt: skip


AIMS = (
    Aim("state: at least 20 GB", r"state_gb", least=20),
    *_of_a_save("", "gockpt"),
    *_of_a_save("window of 4 steps, ", "gockpt_k4"),
    Aim("budget of a sixth of the state, device memory: at most 1.05 of ideal + plan",
        r"sixth/gockpt/\d+/device_memory_over_plan", most=1.05),
    Aim("budget of four fifths, device memory: at most 1.05 of ideal + plan",
        r"sixth/gockpt_b80/\d+/device_memory_over_plan", most=1.05),
    Aim("host peak, alone: at most 1.2 of the state", r"memory/gockpt/\d+/host_memory_ratio",
        most=1.2),
    Aim("replayed moments: 0 ULPs", r"exact/.*/moments/max_ulps", most=0),
    Aim(f"optimizers that replay was tried of: all {len(OPTIMIZERS)}", r"exact/tried",
        least=len(OPTIMIZERS)),
    Aim("measurements of replay that failed: none", r"exact/failures", most=0),
)  # fmt: skip
_BESIDE = {
    f"{text}: {what}": rf"{prefix}/\d+/{figure}"
    for text, prefix in (
        ("the planner's choice", "gockpt"), ("a sixth of the state", "sixth/gockpt"),
        ("four fifths", "sixth/gockpt_b80"),
    )
    for what, figure in (
        ("throughput, of ideal", "throughput_ratio"), ("K", "window_steps"),
        ("ULPs", "audit_max_ulps"),
    )
} | {
    "ideal over itself, the machine's drift": r"ideal/\d+/throughput_ratio",
    "host peak, pinned memory and files in memory counted":
        r"memory/gockpt/\d+/host_system_memory_ratio",
}  # fmt: skip
_LINK = r"write_gbps/.*|raw_link_gbps/.*|pull_link_ratio|same_memory/.*" \
        r"|(async_dispatch/)?(overlap_ratio.*|step_inflation_ratio/.*|donated_step_secs/.*)" \
        r"|torch/.*"  # fmt: skip
_PULL = re.compile(r"pull_gbps/(\w+)/([\d.]+)MiB/(cold|warm)")


def show(summary: Mapping[str, Any]) -> None:
    """Prints the tables, the shortest and most wanted last."""
    samples: Samples = summary["samples"]
    show_replay(samples)
    rows = [*_medians(samples, _LINK), *_largest_pulls(samples)]
    print_table("link and disk", ("figure", "median", "least", "most", "n"), rows)
    for prefix in ("", "sixth/", "memory/"):
        chosen = {
            name.removeprefix(prefix): values
            for name, values in samples.items()
            if re.fullmatch(rf"{prefix}[a-z]\w*/\d+/\w+", name)
        }
        show_modes(f"training {prefix.strip('/')}".strip(), chosen)
    beside = [(text, _spread(_all(samples, figures))) for text, figures in _BESIDE.items()]
    notes = list(summary["notes"])
    if summary.get("hardware", {}).get("devices") == ["cpu"]:
        notes.append("No accelerator ran: it is a rehearsal, and its figures mean nothing.")
    print_table("beside the aims", ("what", "measured"), beside, notes)
    print_table("aims", ("aim", "measured", "met"), [*aims_of(samples)])


def aims_of(samples: Samples) -> Iterator[tuple[str, str, str]]:
    """Each aim, what was measured of it, and whether it is met.

    Example:
      >>> aims = aims_of({"exact/adam/moments/max_ulps": [0.0]})
      >>> next(aim for aim in aims if aim[2] != "-")
      ('replayed moments: 0 ULPs', '0', 'yes')
    """
    for aim in AIMS:
        found = [values for name, values in samples.items() if re.fullmatch(aim.figures, name)]
        is_met = all(aim.is_met(statistics.median(values)) for values in found)
        met = ("yes" if is_met else "NO") if found else "-"
        yield aim.text, _spread([x for values in found for x in values]), met


def show_replay(samples: Samples) -> None:
    """Prints a line for each optimizer."""
    columns = {
        "exact/{}/moments/max_ulps": "moments ULP",
        "exact/{}/params/max_ulps": "params ULP",
        "rounded/{}/params/max_ulps": "rounded params ULP",
        "rounded/{}/params/relative": "relative",
        "library/{}/audit_max_ulps": "library ULP",
        "perturbed/{}": "perturbed",
    }
    optimizers = [name.partition("/")[2] for name in samples if name.startswith("perturbed/")]
    rows = [
        (name, *(_spread(samples.get(column.format(name), ())) for column in columns))
        for name in optimizers
    ]
    if rows:
        print_table("replay on the host", ("optimizer", *columns.values()), rows)


def _medians(samples: Samples, pattern: str) -> Iterator[tuple[str, ...]]:
    for name, values in samples.items():
        if re.fullmatch(pattern, name):
            yield spread_row(name, values)


def _largest_pulls(samples: Samples) -> Iterator[tuple[str, ...]]:
    """Of each way to the host, the figures of the largest size."""
    found = [m for m in map(_PULL.fullmatch, samples) if m]
    largest = max((float(m[2]) for m in found), default=0.0)
    for match in found:
        if float(match[2]) == largest:
            yield from _medians(samples, re.escape(match[0]))


def _all(samples: Samples, pattern: str) -> list[float]:
    return [x for name, values in samples.items() if re.fullmatch(pattern, name) for x in values]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "not measured"
    if min(values) == max(values):
        return f"{values[0]:.4g}"
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
