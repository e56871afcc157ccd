"""Where the commands print their tables."""

from rich.console import Console

_FILE_COLUMNS = 160


def make_console() -> Console:
    """As wide as the terminal; wide enough for whole lines where a file or a pipe takes them."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console
