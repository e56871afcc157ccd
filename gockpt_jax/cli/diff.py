"""`gockpt_jax diff`: the leaves in which two checkpoints differ."""

import dataclasses
import json
import sys
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from gockpt_jax.cli.console import (
    UnreadableError,
    make_console,
    read_limit,
    tree_at,
    why_unreadable,
)
from gockpt_jax.storage.inspecting.diff import LeafDifference, diff_items


@click.command()
@click.argument("a", type=str)
@click.argument("b", type=str)
@click.option("--item", help="The item's name, where a step has several trees.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@read_limit
@click.pass_context
def diff(
    context: click.Context, a: str, b: str, item: str | None, as_json: bool, limit_mib: int
) -> None:
    """Compares A and B: items, steps, or managers' directories (their newest steps).

    Exit code 0: they hold the same tree, bit for bit. 1: they differ. 2: one cannot be read.
    Layout, compression and placement do not matter, nor whether a node of the tree is a list, a
    tuple, or a dictionary of the same keys. JSON has no infinity: a difference that float64 cannot
    hold is its largest number there.
    """
    try:
        found = list(diff_items(tree_at(a, item), tree_at(b, item), limit_bytes=limit_mib << 20))
    except (OSError, ValueError) as error:
        raise UnreadableError(why_unreadable(error)) from error
    if as_json:
        differing = [dataclasses.asdict(leaf, dict_factory=_as_json) for leaf in found]
        click.echo(json.dumps({"differing": differing}, allow_nan=False))
    elif found:
        _print(found)
    context.exit(1 if found else 0)


def _as_json(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    most = sys.float_info.max
    return {name: min(x, most) if isinstance(x, float) else x for name, x in fields}


def _print(found: list[LeafDifference]) -> None:
    table = Table("leaf", "differs in", "A", "B", "elements", "max ULPs", "max abs.", "max rel.")
    for leaf in found:
        figures = ["", "", "", ""]
        if leaf.kind == "values":
            figures = [
                f"{leaf.elements} of {leaf.size}",
                "-" if leaf.max_ulps is None else str(leaf.max_ulps),
                f"{leaf.max_absolute:.3g}",
                f"{leaf.max_relative:.3g}",
            ]
        table.add_row(escape(leaf.name), leaf.kind, escape(leaf.a), escape(leaf.b), *figures)
    make_console().print(table)
