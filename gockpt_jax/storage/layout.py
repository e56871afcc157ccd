"""Which layout a save has where the user says nothing: by the kind of storage.

On a local disk a chunk is a plain file without compression: such files can be written past the page
cache, and stock's own readers are fastest with them. Elsewhere the layout is stock's, one OCDBT
database: what counts there is the number of files, and a link slower than zstd. See
docs/decisions/0014-plain-files-on-local-disks.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

Storage = Literal["local", "network", "bucket"]

# As /proc/self/mountinfo names them. A file system that we do not know counts as a network's,
# for the layout there is stock's own.
_LOCAL_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "overlay"}
)

_MOUNTS = "/proc/self/mountinfo"

_LOCAL_LAYOUT = {"use_ocdbt": False, "use_compression": False}


def default_layout(directory: str) -> Mapping[str, Any]:
    """Returns the options of `make_tree_handler` for checkpoints in `directory`.

    Example:
      >>> dict(default_layout("gs://bucket/run"))
      {}
    """
    return _LOCAL_LAYOUT if storage_of(directory) == "local" else {}


def storage_of(directory: str) -> Storage:
    """Returns the kind of storage in which a directory is, or will be.

    Example:
      >>> storage_of("s3://bucket/run")
      'bucket'
    """
    if "://" in directory:
        return "bucket"
    return "local" if _file_system(directory) in _LOCAL_FILE_SYSTEMS else "network"


def _file_system(directory: str) -> str:
    """The type of the mount that holds a path; empty where the system does not tell (not Linux)."""
    path = os.path.realpath(os.path.abspath(directory))
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as lines:
            mounts = [line.split() for line in lines]
    except OSError:
        return ""
    found, depth = "", -1
    for words in mounts:
        # The mount point has its blanks as octal escapes.
        point = words[4].encode().decode("unicode_escape").rstrip("/")
        if (path == point or path.startswith(f"{point}/")) and len(point) >= depth:
            found, depth = words[words.index("-") + 1], len(point)
    return found
