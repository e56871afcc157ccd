"""`gockpt_jax inspect`: what a checkpoint holds, without reading its values."""

import json
from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gockpt_jax.checks import describe_bytes
from gockpt_jax.cli.console import UnreadableError, make_console, why_unreadable
from gockpt_jax.storage.inspecting.describe import describe_item
from gockpt_jax.storage.inspecting.directory import (
    Directory,
    Step,
    look_into,
    no_checkpoint,
    some_of,
)


@click.command()
@click.argument("path", type=str)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def inspect(path: str, as_json: bool) -> None:
    """Shows the steps, and of the newest one the leaves, below PATH.

    PATH is a manager's directory, one step, or one item. Nothing is verified. Exit code 2: there
    is no checkpoint, or its leaves cannot be read.
    """
    try:
        found = look_into(path)
    except OSError as error:
        raise UnreadableError(str(error)) from error
    items, unreadable = _describe_newest(found)
    if as_json:
        click.echo(json.dumps(_as_json(found) | {"items": items}))
    elif found.steps:
        console = make_console()
        _print_directory(console, found)
        for item in items:
            _print_item(console, item)
    if not found.steps:
        raise UnreadableError(no_checkpoint(path, found))
    if unreadable is not None:
        raise UnreadableError(why_unreadable(unreadable)) from unreadable


def _describe_newest(found: Directory) -> tuple[list[dict[str, Any]], Exception | None]:
    """The trees of the newest step up to the first that cannot be read, and why it cannot."""
    items = []
    try:
        for step in found.steps[-1:]:
            for name in step.trees:
                items.append(describe_item(step.items[name]))
    except (OSError, ValueError) as error:
        return items, error
    return items, None


def _as_json(found: Directory) -> dict[str, Any]:
    steps = [
        {"path": str(s.path), "items": sorted(s.items), "faults": s.faults, "metadata": s.metadata}
        for s in found.steps
    ]
    return {
        "path": str(found.path),
        "kind": found.kind,
        "steps": steps,
        "leftovers": found.leftovers,
        "others": found.others,
    }


def _print_directory(console: Console, found: Directory) -> None:
    if found.kind != "item":
        table = Table("step", "items", "committed", "faults", title=escape(str(found.path)))
        for step in found.steps:
            table.add_row(
                escape(step.path.name), escape(", ".join(step.items)), _committed(step),
                escape("; ".join(step.faults)),
            )  # fmt: skip
        console.print(table)
    for what, names in (("saves that never ended", found.leftovers), ("others", found.others)):
        if names:
            console.print(f"{what}: {some_of(names)}", markup=False)


def _committed(step: Step) -> str:
    nanoseconds = step.metadata.get("commit_timestamp_nsecs")
    if not isinstance(nanoseconds, int) or not 0 < nanoseconds < 2**63:
        return "never"
    return datetime.fromtimestamp(nanoseconds / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _print_item(console: Console, item: dict[str, Any]) -> None:
    table = Table("leaf", "type", "dtype", "shape", "chunk", "size", "saved from",
                  title=escape(item["path"]))  # fmt: skip
    for leaf in item["leaves"]:
        if "dtype" not in leaf:
            table.add_row(
                escape(leaf["name"]), leaf["type"], "",
                escape(json.dumps(leaf["value"])) if "value" in leaf else "",
            )  # fmt: skip
            continue
        table.add_row(
            escape(leaf["name"]), leaf["type"], _dtype(leaf), _shape(leaf["shape"]),
            _shape(leaf["chunk"]), describe_bytes(leaf["bytes"]), escape(leaf["placement"] or ""),
        )  # fmt: skip
    console.print(table)
    layout, made = item["layout"], item["checksums"]
    lines = {
        "values": describe_bytes(item["bytes"]),
        "on disk": f"{describe_bytes(item['bytes_on_disk'])} in {item['files']} files",
        "layout": f"{layout['store']}, zarr v{layout['zarr']}",
        "checksums": "none" if made is None else json.dumps(made),
        "metadata": json.dumps(item["custom_metadata"]) if item["custom_metadata"] else "none",
    }
    for what, text in lines.items():
        console.print(f"{what + ':':<11}{text}", markup=False)


def _dtype(leaf: dict[str, Any]) -> str:
    """That of a random key's data, and the key's."""
    key = leaf.get("random_key")
    return f"{leaf['dtype']}, key<{key}>" if key else leaf["dtype"]


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
