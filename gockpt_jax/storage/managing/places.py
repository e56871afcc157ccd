"""Where a manager's checkpoints are: their directory, and the names of steps in it."""

import contextlib
import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.files.literal import refuse_backslash


def root_of(directory: Any) -> Any:
    """Local paths made absolute, as Orbax demands; addresses of buckets as they are.

    Raises:
      TypeError: if it is no path.
      ValueError: if it is empty: an unset variable would name the working directory. Or if there
        is a backslash in it: TensorStore would write into another one.
      NotADirectoryError: if there is something else.
      StorageError: if nobody knows what the address means.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"`directory` must be a path, got {directory!r}. Pass the directory of the checkpoints "
            "as a string or as a `pathlib.Path`."
        )
    if not os.fspath(directory):
        raise ValueError(
            "`directory` is empty. Pass the directory of the checkpoints; `.` is the working one."
        )
    bucket.prepare(directory)
    path = epath.Path(directory)
    if "://" in str(directory):
        return path
    path = path.expanduser().absolute()
    refuse_backslash("`directory`", path)
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir():
        raise NotADirectoryError(
            f"`directory` is {path}, but {there} is a file. Pass a directory, or one to be made."
        )
    return path


def step_path(root: Any, step: int, options: ocp.CheckpointManagerOptions) -> Any:
    """Where a step is, or would be."""
    if options.step_name_format is not None:  # it may read by other names than it writes
        with contextlib.suppress(ValueError):
            return epath.Path(options.step_name_format.find_step(root, step).path)
    return ocp.path.step.build_step_path(epath.Path(root), step_names(options), step)


def step_names(options: ocp.CheckpointManagerOptions) -> Any:
    """Orbax's `NameFormat` of the steps."""
    return options.step_name_format or ocp.path.step.standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
    )
