"""Which file system holds a directory: the table of mounts tells."""

import os
import re
from pathlib import Path
from typing import Any

_TABLE = "proc/mounts"
_ESCAPED = re.compile(r"\\([0-7]{3})")


def file_system(directory: Any, root: Path = Path("/")) -> str:
    """The type of the file system in which a directory is, or will be.

    Args:
      directory: A path, or an address in a bucket.
      root: Where `proc` is, for tests.

    Returns:
      As Linux names it (`ext4`, `tmpfs`, ...); empty for an address, and where the system does not
      tell (not Linux).

    Example:
      >>> file_system("gs://bucket/run")
      ''
    """
    if "://" in str(directory):
        return ""
    try:
        table = (root / _TABLE).read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
    path, found, depth = os.path.realpath(directory), "", -1
    for line in filter(None, table.split("\n")):
        mount, kind = line.split(" ")[1:3]
        # Blanks and the like are told as octal numbers.
        mount = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), mount).rstrip("/")
        # Of two on one directory the later one hides the earlier.
        if (path == mount or path.startswith(f"{mount}/")) and len(mount) >= depth:
            found, depth = kind, len(mount)
    return found
