"""What moved between two result files: `python -m bench compare A.json B.json`.

For every figure that both hold: the ratio of medians, B over A, and its spread. The spread is a
bootstrap interval: both sides' samples are drawn again with replacement, 4000 times, and the middle
99% of the ratios of their medians is kept (with 5 samples a side, about all there is). A figure has
moved if that interval leaves 1 out and the ratio is further from 1 than the threshold, which is
there because samples of one run share what is particular to that run (placement, clock,
neighbours): their interval is too narrow for two runs, so a small step beyond it says little. Of
many figures some still pass by chance: run again.

Not judged: figures with fewer than 5 samples on a side, and those with samples at or below zero,
which have no ratio; but for counts and compiled sizes, which another run would repeat. Times and
rates are compared on the same hardware and for the same command only (sizes and modes are in it).
What differs between the two runs besides the code is said first. Yardsticks (raw disk, stock,
training without checkpoints) are nobody's regression: one that has moved says that the machine was
in another state, and ratios to it are to be read so. Exit status: 1 if a figure got worse, 2 if the
files cannot be compared.
"""

import argparse
import dataclasses
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.tables import print_table

LEAST_SAMPLES = 5
_DRAWS, _LEVEL, _SEED = 4000, 0.99, 0
_HARDWARE = ("cpu", "cores", "memory_gib", "devices")  # not the load, nor the kernel's name

# A figure's name tells what it is (units are in names). The first that matches counts.
_TIME_OR_RATE = re.compile(r"secs|_ms\b|_us\b|_ns\b|ns_per_|per_sec|\brate\b")
_RELATIVE = re.compile(r"ratio|speedup|inflation|_over_|_vs_|ettr")
_COUNT_OR_SIZE = re.compile(
    r"_gib\b|_bytes\b|copies|collectives|instructions|chips|parts\b|joins|torn|perturbed|parameters_b"
)
_HIGHER_IS_BETTER = re.compile(
    r"speedup|throughput|bandwidth|per_sec|\brate\b|ettr|overlap|link_ratio|disk_ratio"
)
_LOWER_IS_BETTER = re.compile(
    r"secs|_ms\b|_us\b|ns_per_|inflation|memory|rss|_gib\b|_bytes\b|drain|stall|copies|collectives"
    r"|instructions|staged|moved|_over_copied|torn|perturbed"
)
# What is measured beside this library, to hold it against.
_YARDSTICK = re.compile(
    r"(^|/)(raw|raw_link_gbps|stock|stock_fastest|torch|ideal|orbax_\w+|device_copy\w*)(/|$)"
)

Verdict = Literal["better", "worse", "moved", "same", "not judged"]


class IncomparableError(Exception):
    """Two files of which a ratio would say nothing."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure in both files.

    Attributes:
      figure: Its name.
      before: Median in the first file.
      after: Median in the second.
      ratio: `after` over `before`; `None` if there is none.
      spread: The 99% interval of the ratio; `None` if there is none.
      verdict: `moved`: beyond spread and threshold, but its name does not say which way is better,
        or it is a yardstick.
      reason: Why it is not judged, or not as better or worse.
    """

    figure: str
    before: float
    after: float
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    verdict: Verdict = "not judged"
    reason: str = ""


def compare(a: Mapping[str, Any], b: Mapping[str, Any], threshold: float = 0.05) -> list[Change]:
    """Compares two records.

    Args:
      a: A result file's content.
      b: Another one's.
      threshold: Part of 1 by which a ratio must differ at least to have moved.

    Returns:
      A change for each figure of both, in the order of `a`.

    Raises:
      IncomparableError: if they are of different benchmarks, or share no figure.
    """
    if a["name"] != b["name"]:
        raise IncomparableError(
            f"`{a['name']}` and `{b['name']}` are different benchmarks. Compare two results of one."
        )
    before, after = _samples(a), _samples(b)
    common = [name for name in before if name in after]
    if not common:
        raise IncomparableError(
            f"the two results of `{a['name']}` have no figure with samples in common."
        )
    other = [key for key in _HARDWARE if a["hardware"].get(key) != b["hardware"].get(key)]
    other += ["command"] if _command(a) != _command(b) else []
    return [_change(name, before[name], after[name], threshold, other) for name in common]


def _samples(record: Mapping[str, Any]) -> Mapping[str, Sequence[float]]:
    """Those of all figures; early records of counts have the counts alone."""
    return record["samples"] or {name: [count] for name, count in record.get("figures", {}).items()}


def _change(
    name: str, a: Sequence[float], b: Sequence[float], threshold: float, other: Sequence[str]
) -> Change:
    before, after = statistics.median(a), statistics.median(b)
    change = Change(name, before, after)
    if other and not _travels(name):
        return dataclasses.replace(change, reason=f"absolute, and other {', '.join(other)}")
    if list(a) == list(b):
        return dataclasses.replace(change, ratio=1.0, spread=(1.0, 1.0), verdict="same")
    if min(*a, *b) <= 0:
        if not _repeats(name) or before == after:
            return dataclasses.replace(change, reason="samples at or below zero")
        step = math.inf if after > before else 0.0
        return dataclasses.replace(change, verdict=_judge(name, step, (step, step), threshold))
    change = dataclasses.replace(change, ratio=after / before)
    if min(len(a), len(b)) < LEAST_SAMPLES and not _repeats(name):
        return dataclasses.replace(change, reason=f"fewer than {LEAST_SAMPLES} samples")
    spread = ratio_interval(a, b)
    verdict, reason = _judge(name, after / before, spread, threshold), ""
    if verdict != "same" and _YARDSTICK.search(name):
        verdict, reason = "moved", "a yardstick"
    return dataclasses.replace(change, spread=spread, verdict=verdict, reason=reason)


def _judge(name: str, ratio: float, spread: tuple[float, float], threshold: float) -> Verdict:
    if spread[0] <= 1.0 <= spread[1] or abs(ratio - 1.0) <= threshold:
        return "same"
    if _HIGHER_IS_BETTER.search(name):
        return "better" if ratio > 1.0 else "worse"
    if _LOWER_IS_BETTER.search(name):
        return "worse" if ratio > 1.0 else "better"
    return "moved"


def _travels(name: str) -> bool:
    """Whether a figure means the same on another machine; one of unknown unit does not."""
    if _TIME_OR_RATE.search(name):
        return False
    return bool(_RELATIVE.search(name) or _COUNT_OR_SIZE.search(name))


def _repeats(name: str) -> bool:
    """Whether another run would give the same number: counts and sizes, but not measured memory."""
    relative = _RELATIVE.search(name) and not name.endswith("_over_copied")
    return bool(_COUNT_OR_SIZE.search(name)) and not relative and not _TIME_OR_RATE.search(name)


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """The bootstrap interval of `median(b) / median(a)`; the same for the same samples.

    Example:
      >>> ratio_interval([2.0], [3.0])
      (1.5, 1.5)
    """
    draw = np.random.default_rng(_SEED)
    medians = [
        np.median(draw.choice(np.asarray(x, float), (_DRAWS, len(x))), axis=1) for x in (a, b)
    ]
    low, high = np.quantile(medians[1] / medians[0], [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def main(argv: Sequence[str]) -> int:
    """Compares two files and prints what it finds; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench compare", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("a", type=Path, help="the result to compare with")
    parser.add_argument("b", type=Path, help="the result in question")
    parser.add_argument("--threshold", type=float, default=0.05, help="part of 1 (0.05)")
    parser.add_argument("--json", action="store_true", help="one object on stdout, and no table")
    options = parser.parse_args(argv)
    try:
        a, b = (json.loads(p.read_text(encoding="utf-8")) for p in (options.a, options.b))
        changes = compare(a, b, options.threshold)
    except (IncomparableError, OSError, ValueError, KeyError) as error:
        print(f"cannot compare {options.a.name} and {options.b.name}: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"changes": [dataclasses.asdict(c) for c in changes]}, indent=1))
    else:
        _show(a, b, changes)
    if all(c.verdict == "not judged" for c in changes):
        print("nothing could be judged; the reasons are above", file=sys.stderr)
        return 2
    return int(any(c.verdict == "worse" for c in changes))


def _show(a: Mapping[str, Any], b: Mapping[str, Any], changes: Sequence[Change]) -> None:
    rows = []
    for c in changes:
        ratio = "-" if c.ratio is None else f"{c.ratio:.3f}"
        spread = "-" if c.spread is None else f"{c.spread[0]:.3f} to {c.spread[1]:.3f}"
        verdict = f"{c.verdict}: {c.reason}" if c.reason else c.verdict
        rows.append((c.figure, f"{c.before:.4g}", f"{c.after:.4g}", ratio, spread, verdict))
    columns = ("figure", "before", "after", "ratio", "spread", "verdict")
    title = f"{a['name']}: {b['commit']} over {a['commit']}"
    yardsticks = [f"{c.figure} ({c.ratio:.3f})" for c in changes if c.reason == "a yardstick"]
    notes = list(_differences(a, b))
    if yardsticks:
        notes.append(
            f"THE MACHINE WAS IN ANOTHER STATE, by its yardsticks: {', '.join(yardsticks)}"
        )
    print_table(title, columns, rows, notes)


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """What differs between the runs."""
    if a["commit"] == b["commit"]:
        yield f"commit: {a['commit']} both times; what has moved is not the code's doing"
    else:
        yield f"commit: {a['commit']} before, {b['commit']} after"
    if _command(a) != _command(b):
        yield f"OTHER COMMAND: {_command(a)} before, {_command(b)} after"
    for part in ("versions", "hardware"):
        for key in {**a[part], **b[part]}:
            left, right = a[part].get(key), b[part].get(key)
            if left != right and key not in ("load_average", "system"):
                other = "OTHER HARDWARE, " if key in _HARDWARE else ""
                yield f"{other}{key}: {left} before, {right} after"


def _command(record: Mapping[str, Any]) -> str:
    """What was run; where its record went is no part of it."""
    return re.sub(r" --out[ =]\S+", "", record.get("command", ""))
