"""Figures as tables on the terminal."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def spread_row(name: str, samples: Sequence[float]) -> tuple[str, ...]:
    """A line of a table: a figure's median, least and most, and how many samples it has."""
    numbers = (statistics.median(samples), min(samples), max(samples))
    return (name, *(f"{x:.4g}" for x in numbers), str(len(samples)))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    """Prints notes, and below them a table whose first column is text, the others numbers."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left", no_wrap=not n)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:  # a log file folds nothing
        console.width = 160
    for note in notes:
        console.print(f"- {note}", markup=False, highlight=False)
    console.print(table)


def print_by_row(
    title: str, row: str, columns: Mapping[str, str], samples: Mapping[str, Sequence[float]],
    notes: Sequence[str], *, count: str = "",
    cell: Callable[[str, float], str] = lambda _, value: f"{value:.4g}",
) -> None:  # fmt: skip
    """Prints the medians of figures named `<row>/<column>`: a line for each row.

    Args:
      title: Of the table.
      row: What its rows are.
      columns: Figures, and what they are called there; those that no row has are left out.
      samples: Of any figures.
      notes: Printed above it.
      count: The figure whose samples a last column counts, if there is to be one.
      cell: Makes a cell of a figure's name and median.
    """
    rows: dict[str, dict[str, str]] = {}
    for name, values in samples.items():
        column = next((c for c in columns if name.endswith(f"/{c}")), None)
        if column is not None:
            found = rows.setdefault(name.removesuffix(f"/{column}"), {})
            found[column] = cell(column, statistics.median(values))
    shown = [c for c in columns if any(c in found for found in rows.values())]
    table = [
        (name, *(found.get(c, "-") for c in shown),
         *([str(len(samples.get(f"{name}/{count}", ())))] if count else []))
        for name, found in rows.items()
    ]  # fmt: skip
    if table or notes:
        names = (row, *(columns[c] for c in shown), *(["n"] if count else []))
        print_table(title, names, table, notes)
