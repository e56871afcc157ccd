"""What the commands share: where they print their tables, options, and their error."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import click
from rich.console import Console

from gockpt_jax.storage.inspecting.directory import look_into
from gockpt_jax.storage.inspecting.stored_item import READ_LIMIT_BYTES, StoredLeafError

FILE_COLUMNS = 160


class UnreadableError(click.ClickException):
    """There is nothing at a path that the command can read: no fault of how it was called."""

    exit_code = 2


_EXIT_BROKEN_PIPE = 128 + 13  # as of a process that SIGPIPE has ended


class Commands(click.Group):
    """A group whose exit codes mean the same where what is printed cannot be written."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Reads the options; the help, and the version, are printed meanwhile."""
        with _telling_of_the_output():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; the errors of its reads are its own."""
        with _telling_of_the_output():
            return super().invoke(ctx)


@contextlib.contextmanager
def _telling_of_the_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:  # `| head`
        _print_no_more()
        raise click.exceptions.Exit(_EXIT_BROKEN_PIPE) from error
    except OSError as error:
        _print_no_more()
        raise UnreadableError(f"what was asked for cannot be printed: {error}") from error


def _print_no_more() -> None:
    """Has the interpreter's last flush go nowhere."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Leaves it to `Commands`; rich would end with 1, which means `damaged` here."""
        raise BrokenPipeError


def why_unreadable(error: Exception) -> str:
    """What to tell of an error of `describe_item` or `diff_items`."""
    if isinstance(error, StoredLeafError):
        return f"{error}\n`gockpt_jax verify` names all that is damaged."
    return str(error)


read_limit = click.option(
    "--limit-mib",
    default=READ_LIMIT_BYTES // 2**20,
    show_default=True,
    type=click.IntRange(min=1),
    help="MiB of values read at one time.",
)
"""The option of the commands that read arrays."""


def tree_at(path: str, item: str | None = None) -> str:
    """The one tree that is meant by a path: an item's, a step's, or that of the newest step.

    Args:
      path: Of an item, a step, or a manager's directory.
      item: The item's name, where a step has several trees.

    Raises:
      OSError: if there is nothing.
      ValueError: if there is no such tree, or several.
    """
    found = look_into(path)
    trees = {name: s.items[name] for s in found.steps[-1:] for name in s.trees}
    wanted, expected = trees, "one tree"
    if item is not None and found.kind != "item":
        wanted, expected = {k: v for k, v in trees.items() if k == item}, f"the tree `{item}`"
    if len(wanted) != 1:
        held = ", ".join(f"`{name}`" for name in trees) or found.describe()
        if found.kind == "root" and found.steps and not trees:
            held = f"none in the newest checkpoint, `{found.steps[-1].path.name}`"
        raise ValueError(f"{path}: expected {expected}, found {held}. Give the path of one.")
    return str(next(iter(wanted.values())))


def make_console() -> Console:
    """As wide as the terminal; wide enough for whole lines where a file or a pipe takes them."""
    console = _Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    return console
