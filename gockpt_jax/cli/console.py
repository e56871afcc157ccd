"""What the commands share: where they print their tables, options, and their error."""

import click
from rich.console import Console

from gockpt_jax.storage.stored_item import READ_LIMIT_BYTES

_FILE_COLUMNS = 160


class UnreadableError(click.ClickException):
    """There is nothing at a path that the command can read: no fault of how it was called."""

    exit_code = 2


read_limit = click.option(
    "--limit-mib",
    default=READ_LIMIT_BYTES // 2**20,
    show_default=True,
    type=click.IntRange(min=1),
    help="MiB of values read at one time.",
)
"""The option of the commands that read arrays."""


def make_console() -> Console:
    """As wide as the terminal; wide enough for whole lines where a file or a pipe takes them."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console
