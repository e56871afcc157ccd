"""The tables of `bench gpu`: what matters most, beside what was aimed at, in few lines."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.record import print_table
from bench.train.table import show_modes

Samples = Mapping[str, Sequence[float]]

_AIMS = (
    ("gockpt: inflation per save, of stock async's", r"gockpt/\d+/inflation_vs_stock_async",
     "at most 0.02"),
    ("gockpt: throughput, of ideal", r"gockpt/\d+/throughput_ratio", "at least 0.995"),
    ("gockpt: device memory, of ideal + plan", r"gockpt/\d+/device_memory_over_plan",
     "at most 1.05"),
    ("a sixth of the state: device memory, of ideal + plan",
     r"sixth/gockpt/\d+/device_memory_over_plan", "at most 1.05"),
    ("a sixth of the state: throughput", r"sixth/gockpt/\d+/throughput_ratio", "told"),
    ("four fifths of the state: throughput", r"sixth/gockpt_b80/\d+/throughput_ratio", "told"),
    ("a sixth of the state: ULPs", r"sixth/gockpt/\d+/audit_max_ulps", "told"),
    ("gockpt: host peak, of state (alone)", r"memory/gockpt/\d+/host_memory_ratio",
     "at most 1.2"),
    ("the same, pinned memory and files in memory counted",
     r"memory/gockpt/\d+/host_system_memory_ratio", "told"),
    ("gockpt: drain, of interval", r"gockpt/\d+/drain_over_interval", "below 1"),
    ("replayed moments: ULPs, worst optimizer", r"exact/.*/moments/max_ulps", "0"),
)  # fmt: skip
_LINK = r"write_gbps/.*|raw_link_gbps/.*|pull_link_ratio|same_memory/.*" \
        r"|(async_dispatch/)?(overlap_ratio|step_inflation_ratio/.*|donated_step_secs/.*)" \
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
    aims = [
        (text, _spread(values), aim)
        for text, pattern, aim in _AIMS
        for values in [_all(samples, pattern)]
    ]
    print_table("aims", ("what", "measured", "aim"), aims, summary["notes"])


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
            numbers = (statistics.median(values), min(values), max(values))
            yield (name, *(f"{x:.4g}" for x in numbers), str(len(values)))


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
        return f"{values[0]:.3g}"
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
