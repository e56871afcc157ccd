"""`gockpt_jax verify`: re-reads checkpoints and compares them with their checksums."""

import json
import time
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from gockpt_jax.cli.console import UnreadableError, make_console, read_limit
from gockpt_jax.storage.inspecting.stored_item import READ_THREADS
from gockpt_jax.storage.inspecting.verdict import Verdict, first_of
from gockpt_jax.storage.inspecting.verify import verify as verify_all

EXIT_DAMAGED, EXIT_UNCHECKED = 1, 3  # 2 is click's, for what was asked wrongly
_STYLES = {"whole": "green", "damaged": "bold red", "unchecked": "yellow"}


@click.command()
@click.argument("path", type=str)
@click.option("--newest", is_flag=True, help="Only the newest step of a manager's directory.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--threads", default=READ_THREADS, show_default=True, type=click.IntRange(min=1))
@read_limit
@click.pass_context
def verify(
    context: click.Context, path: str, newest: bool, as_json: bool, threads: int, limit_mib: int
) -> None:
    """Re-reads all chunks below PATH: a manager's directory, one step, or one item.

    Exit code 0: everything is as it was before it was written. 1: something is damaged, missing,
    foreign or of an unknown version. 2: there is nothing to verify. 3: nothing is known to be
    wrong, but something has no checksums.
    """
    started_at = time.perf_counter()
    try:
        verdicts = list(verify_all(path, newest=newest, limit_bytes=limit_mib << 20,
                                   threads=threads))  # fmt: skip
    except (OSError, ValueError) as error:
        raise UnreadableError(str(error)) from error
    secs = time.perf_counter() - started_at
    if as_json:
        click.echo(json.dumps({"secs": round(secs, 3), "found": [_as_json(v) for v in verdicts]}))
    else:
        _print(verdicts, secs)
    states = {verdict.state for verdict in verdicts}
    if "damaged" in states:
        context.exit(EXIT_DAMAGED)
    context.exit(EXIT_UNCHECKED if "unchecked" in states else 0)


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "path": verdict.path,
        "state": verdict.state,
        "faults": verdict.faults,
        "notes": verdict.notes,
        "chunks": verdict.chunks,
        "bytes": verdict.nbytes,
    }


def _print(verdicts: list[Verdict], secs: float) -> None:
    console = make_console()
    table = Table("path", "state", "chunks", "MiB")
    for verdict in verdicts:
        state = f"[{_STYLES[verdict.state]}]{verdict.state}"
        read = (str(verdict.chunks), f"{verdict.nbytes / 2**20:,.1f}") if verdict.chunks else ()
        table.add_row(escape(verdict.path), state, *read)
    console.print(table)
    for verdict in verdicts:
        for line in (*first_of(verdict.faults), *first_of(verdict.notes)):
            console.print(f"{verdict.path}: {line}", style=_STYLES[verdict.state], markup=False)
    nbytes = sum(verdict.nbytes for verdict in verdicts)
    console.print(f"{nbytes / 2**20:,.1f} MiB in {secs:.2f} s")
