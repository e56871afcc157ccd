"""A checkpoint that is deleted goes out of sight at once, and then its files go one by one."""

from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.files.item_files import TEMPORARY
from gockpt_jax.storage.managing.arguments import step_names, step_path


class Deleter:
    """Stock's deleter, for steps that nobody lists any more.

    Stock's removes the files of a step that is listed until the last of them is gone: a process
    that is killed meanwhile leaves a torn checkpoint, which `best_fn` may make the one to resume
    from. Here it first takes the name of a save that never ended, which is what stock's looks for
    first, and what `cleanup_tmp_directories` cleans up.

    Args:
      stock: Orbax's `CheckpointDeleter`.
      root: Of the checkpoints.
      options: The user's.
    """

    def __init__(self, stock: Any, root: Any, options: ocp.CheckpointManagerOptions):
        self._stock = stock
        self._root = epath.Path(root)
        self._options = options

    def delete(self, step: int) -> None:
        """Deletes a step, on this thread or on one of stock's."""
        self._hide(step)
        self._stock.delete(step)

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Deletes some; none of them is listed while the first one goes."""
        for step in steps:
            self._hide(step)
        self._stock.delete_steps(steps)

    def close(self) -> None:
        """Waits for stock's thread, if there is one."""
        self._stock.close()

    def _hide(self, step: int) -> None:
        options = self._options
        if not ocp.multihost.is_primary_host(options.multiprocessing_options.primary_host):
            return
        path = step_path(self._root, step, options)
        is_moved = options.todelete_subdir is not None or options.todelete_full_path is not None
        if bucket.is_bucket(path):
            if not is_moved:
                (path / bucket.MARKER).unlink(missing_ok=True)
        elif path.exists():
            unfinished = step_names(options).build_name(step) + TEMPORARY
            hidden = self._root / unfinished
            if hidden.exists():  # by a killed save: stock's would take it for the step
                hidden.rmtree()
            if not is_moved:
                path.rename(hidden)
