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
What differs between the two runs besides the code is said first. Yardsticks (raw disk, stock, a
copy, training without checkpoints) are nobody's regression: those that have moved say that the
machine was in another state. Their times and rates are its pace, and other times and rates are
judged over it: the ratio over the yardsticks' median, the spread over their middle half, in which
those count for most that have the narrowest spread themselves. Exit status: 1 if a figure got
worse, 2 if the files cannot be compared.
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

from bench import naming
from bench.tables import print_table

LEAST_SAMPLES = 5
_DRAWS, _LEVEL, _SEED = 4000, 0.99, 0
_LEAST_WIDTH = 0.01
_SHOWN = 4  # of the yardsticks that have moved; the table has all
_HARDWARE = ("cpu", "cores", "memory_gib", "devices")  # not the load, nor the kernel's name

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


@dataclasses.dataclass(frozen=True)
class Pace:
    """How many times as long the machine took for its yardsticks.

    Attributes:
      low: The lower end of the middle half of them.
      middle: Their median.
      high: The upper end.
    """

    low: float = 1.0
    middle: float = 1.0
    high: float = 1.0

    @classmethod
    def of(cls, changes: Sequence[Change]) -> "Pace":
        """The pace of all yardsticks that are times or rates; 1 if there are none.

        Those of narrow spread count for more, by its inverse square: of many small figures of a
        save, as of its renaming, each says next to nothing of a machine.
        """
        found = sorted(
            (1 / c.ratio if naming.is_rate(c.figure) else c.ratio, _width(c.spread))
            for c in changes
            if c.ratio and c.spread
            if naming.is_yardstick(c.figure) and naming.is_time_or_rate(c.figure)
        )
        if not found:
            return cls()
        ratios, widths = np.array(found).T
        ends = np.cumsum(widths**-2.0)
        middles = ends - widths**-2.0 / 2
        return cls(*np.interp((0.25, 0.5, 0.75), middles / ends[-1], ratios).tolist())

    def over(
        self, ratio: float, spread: tuple[float, float], *, is_rate: bool
    ) -> tuple[float, tuple[float, float]]:
        """A ratio and its spread, as they would be at the pace of before."""
        low, high = spread
        if is_rate:
            return ratio * self.middle, (low * self.low, high * self.high)
        return ratio / self.middle, (low / self.high, high / self.low)


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
    changes = [_change(name, before[name], after[name], other) for name in common]
    pace = Pace.of(changes)
    return [_judged(change, pace, threshold) for change in changes]


def _samples(record: Mapping[str, Any]) -> Mapping[str, Sequence[float]]:
    """Those of all figures; early records of counts have the counts alone."""
    return record["samples"] or {name: [count] for name, count in record.get("figures", {}).items()}


def _change(name: str, a: Sequence[float], b: Sequence[float], other: Sequence[str]) -> Change:
    """A change, with its ratio and spread, or why it is not judged."""
    before, after = statistics.median(a), statistics.median(b)
    change = Change(name, before, after)
    if other and not naming.travels(name):
        return dataclasses.replace(change, reason=f"absolute, and other {', '.join(other)}")
    if list(a) == list(b):
        return dataclasses.replace(change, ratio=1.0, spread=(1.0, 1.0), verdict="same")
    if min(*a, *b) <= 0:
        if not naming.repeats(name) or before == after:
            return dataclasses.replace(change, reason="samples at or below zero")
        step = math.inf if after > before else 0.0
        return dataclasses.replace(change, ratio=step, spread=(step, step))
    change = dataclasses.replace(change, ratio=after / before)
    if min(len(a), len(b)) < LEAST_SAMPLES and not naming.repeats(name):
        return dataclasses.replace(change, reason=f"fewer than {LEAST_SAMPLES} samples")
    return dataclasses.replace(change, spread=ratio_interval(a, b))


def _width(spread: tuple[float, float]) -> float:
    """Of a spread, on a scale of logarithms; of one that is nothing, as little as matters."""
    return max(math.log(spread[1] / spread[0]), _LEAST_WIDTH)


def _judged(change: Change, pace: Pace, threshold: float) -> Change:
    """A change with its verdict."""
    if change.ratio is None or change.spread is None or change.verdict == "same":
        return change  # it has none, or not a sample has changed
    name, ratio, spread = change.figure, change.ratio, change.spread
    if naming.is_yardstick(name):
        if _judge(name, ratio, spread, threshold) == "same":
            return dataclasses.replace(change, verdict="same")
        return dataclasses.replace(change, verdict="moved", reason="a yardstick")
    if naming.is_time_or_rate(name):
        ratio, spread = pace.over(ratio, spread, is_rate=naming.is_rate(name))
    return dataclasses.replace(change, verdict=_judge(name, ratio, spread, threshold))


def _judge(name: str, ratio: float, spread: tuple[float, float], threshold: float) -> Verdict:
    if spread[0] <= 1.0 <= spread[1] or abs(ratio - 1.0) <= threshold:
        return "same"
    higher_is_better = naming.higher_is_better(name)
    if higher_is_better is None:
        return "moved"
    return "better" if (ratio > 1.0) == higher_is_better else "worse"


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
    except (IncomparableError, OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}" if _is_no_record(error) else error
        print(f"cannot compare {options.a.name} and {options.b.name}: {why}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"changes": [dataclasses.asdict(c) for c in changes]}, indent=1))
    else:
        _show(a, b, changes)
    if all(c.verdict == "not judged" for c in changes):
        print("nothing could be judged; the reasons are above", file=sys.stderr)
        return 2
    return int(any(c.verdict == "worse" for c in changes))


def _is_no_record(error: Exception) -> bool:
    """Whether a file is JSON of another kind: the error alone would say little."""
    return isinstance(error, KeyError | TypeError)


def _show(a: Mapping[str, Any], b: Mapping[str, Any], changes: Sequence[Change]) -> None:
    rows = []
    for c in changes:
        ratio = "-" if c.ratio is None else f"{c.ratio:.3f}"
        spread = "-" if c.spread is None else f"{c.spread[0]:.3f} to {c.spread[1]:.3f}"
        verdict = f"{c.verdict}: {c.reason}" if c.reason else c.verdict
        rows.append((c.figure, f"{c.before:.4g}", f"{c.after:.4g}", ratio, spread, verdict))
    columns = ("figure", "before", "after", "ratio", "spread", "verdict")
    title = f"{a['name']}: {b['commit']} over {a['commit']}"
    notes = [*_differences(a, b), *_machine(changes)]
    print_table(title, columns, rows, notes)


def _machine(changes: Sequence[Change]) -> Iterator[str]:
    """What its yardsticks say of the machine."""
    moved = [f"{c.figure} ({c.ratio:.3f})" for c in changes if c.reason == "a yardstick"]
    if not moved:
        return
    shown = moved if len(moved) <= _SHOWN else [*moved[:_SHOWN], f"and {len(moved) - _SHOWN} more"]
    yield f"THE MACHINE WAS IN ANOTHER STATE, by its yardsticks: {', '.join(shown)}"
    pace = Pace.of(changes)
    if pace != Pace():
        yield (
            f"they took {pace.middle:.3f} times as long (middle half {pace.low:.3f} to "
            f"{pace.high:.3f}): times and rates are judged over that"
        )


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
