"""Paths that stand for themselves where Orbax looks for files by a pattern.

Orbax finds the databases of the processes, and the notes on their arrays, by `Path.glob`, for which
`epath` joins the path and the pattern. Below `run[lr=1]` it finds nothing then, or what lies below
`runl`: the database that Orbax commits has no values, and typed keys come back as their data.
"""

import contextlib
import fnmatch
import glob
from collections.abc import Iterator
from typing import Any

from etils import epath

from gockpt_jax.storage.files import bucket


def literal(path: Any) -> epath.Path:
    """Returns the same path, in whose own name nothing is a pattern.

    Example:
      >>> import tempfile
      >>> folder = epath.Path(tempfile.mkdtemp()) / "run[lr=1]"
      >>> (folder / "ocdbt.process_0").mkdir(parents=True)
      >>> [len(list(path.glob("ocdbt.*"))) for path in (folder, literal(folder))]
      [0, 1]
    """
    path = epath.Path(path)
    return path if glob.escape(path.as_posix()) == path.as_posix() else _Literal(path)


def refuse_backslash(subject: str, path: Any) -> None:
    """Refuses a directory that TensorStore would take for another one.

    Args:
      subject: What names it to the caller.
      path: Where arrays shall be written.

    Raises:
      ValueError: There is a backslash in it.

    Example:
      >>> refuse_backslash("`directory`", "/data/run_1")
    """
    if "\\" in str(path) and not bucket.is_bucket(path):
        raise ValueError(
            f"{subject} is {path}: TensorStore takes a backslash for a slash, so arrays would be "
            "somewhere else. Give it a name without one."
        )


class _Literal(type(epath.Path("/"))):  # type: ignore[misc]  # the class of all of epath's paths
    def glob(self, pattern: str) -> Iterator[epath.Path]:
        folder, _, names = pattern.rpartition("/")
        with contextlib.suppress(FileNotFoundError):
            for entry in (self / folder).iterdir():
                if fnmatch.fnmatchcase(entry.name, names):
                    yield entry
