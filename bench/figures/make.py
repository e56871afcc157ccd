"""Figures for the documents, from result files only: `python -m bench figures`.

Each figure is one SVG in `docs/figures/`, of the same bytes whenever it is made from the same file,
which its caption names. A figure whose results do not exist is left as it is, and said so.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import tables, timeline, train
from bench.figures.accelerator import is_on_accelerator
from bench.record import ROOT


@dataclasses.dataclass(frozen=True)
class Result:
    """A result file.

    Attributes:
      path: From the repository's root (or where it was found), as captions name it.
      record: Its content.
    """

    path: str
    record: Mapping[str, Any]

    @property
    def caption(self) -> str:
        """Where the figure is from."""
        devices = ", ".join(self.record["hardware"]["devices"])
        return f"{self.path}, commit {self.record['commit']}, {devices}"


@dataclasses.dataclass(frozen=True)
class Plot:
    """A figure in the making.

    Attributes:
      draw: Draws a record on a matplotlib figure.
      suits: Whether a record has what it shows.
      size: Inches.
      needs: What to run where no record suits.
    """

    draw: Callable[[Any, Mapping[str, Any]], None]
    suits: Callable[[Mapping[str, Any]], bool]
    size: tuple[float, float]
    needs: str


PLOTS = {
    "timeline": Plot(
        timeline.draw_lanes, timeline.has_spans, (9.0, 3.4), "bench timeline"
    ),
    "memory": Plot(
        timeline.draw_memory, timeline.has_series, (9.0, 2.6), "bench timeline"
    ),
    "throughput": Plot(
        train.draw_throughput, train.has_throughput, (6.4, 4.0),
        "bench train --intervals 10,20,50",
    ),
    "stall": Plot(train.draw_stall, train.has_stall, (7.0, 4.6), "bench train"),
    "prediction": Plot(
        train.draw_prediction, train.has_prediction, (6.4, 4.4),
        "bench train --modes with budgets, gockpt_b<percent>",
    ),
}  # fmt: skip


def load_results(directory: Path) -> list[Result]:
    """All result files below a directory, those of accelerators last, then by path."""
    results = []
    for path in sorted(directory.rglob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict) and record.keys() >= {"name", "figures", "hardware"}:
            inside = path.is_relative_to(ROOT)
            shown = path.relative_to(ROOT if inside else directory).as_posix()
            results.append(Result(shown, record))
    return sorted(results, key=lambda r: (is_on_accelerator(r.record), r.path))


def draw(plot: Plot, result: Result, path: Path) -> None:
    """Draws one figure into an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    # Ids are hashed with a salt and no date is written: the same result gives the same file.
    settings = {"svg.hashsalt": "gockpt_jax", "font.size": 9, "axes.spines.top": False,
                "axes.spines.right": False, "legend.frameon": False}  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=plot.size, layout="constrained")
        plot.draw(figure, result.record)
        figure.supxlabel(result.caption, fontsize=6.5, color="0.35", x=0.99, ha="right")
        metadata = {"Date": None, "Creator": "python -m bench figures", "Source": result.caption}
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata=metadata)
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.split("\n")), encoding="utf-8")


def make(results: Sequence[Result], out: Path, root: Path) -> Iterator[str]:
    """Makes what can be made.

    Args:
      results: As `load_results` returns them; of those that suit a figure the last is taken.
      out: Directory of the figures.
      root: Of the documents whose tables are made from results.

    Yields:
      A line for each figure and table: what it was made from, or what it needs.
    """
    for name, plot in PLOTS.items():
        suited = [r for r in results if plot.suits(r.record)]
        if suited:
            draw(plot, suited[-1], out / f"{name}.svg")
            yield f"{name}.svg: from {suited[-1].path}"
        else:
            yield f"{name}.svg: skipped, no result for it yet ({plot.needs})"
    for place, (suits, table) in tables.TABLES.items():
        suited = [r for r in results if suits(r.record)]
        if suited:
            page, _, name = place.partition("#")
            tables.insert(root / page, tables.lines_of(table, suited[-1]), name)
            yield f"{place}: table from {suited[-1].path}"


def main(argv: Sequence[str]) -> int:
    """Makes all figures and tables; returns the exit status."""
    argparse.ArgumentParser(prog="python -m bench figures", description=__doc__).parse_args(argv)
    for line in make(load_results(ROOT / "bench" / "results"), ROOT / "docs" / "figures", ROOT):
        print(line)
    return 0
