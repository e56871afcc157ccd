"""A checkpoint that is deleted goes out of sight at once, and then its files go one by one."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.locks import is_running
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.files.item_files import TEMPORARY
from gockpt_jax.storage.managing.places import step_names, step_path

_LOOK_SECS = 0.05
"""Between two looks at what stock's thread, which tells of nothing, still has to delete."""


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

    Attributes:
      failure: Why some that were not to be kept are not gone; for whoever tells of it to forget.
    """

    def __init__(self, stock: Any, root: Any, options: ocp.CheckpointManagerOptions):
        self._stock = stock
        self._root = epath.Path(root)
        self._options = options
        self.failure: Exception | None = None
        self._thread: Any = of_orbax.deleting_thread(stock)  # with `enable_background_delete`
        # Where it found, or will find, the files of each step that it has not deleted yet.
        self._leaving: dict[int, Any] = {}

    def delete(self, step: int) -> None:
        """Deletes a step, on this thread or on one of stock's."""
        self._hide(step)
        self._stock.delete(step)

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Deletes what is not to be kept; none of them is listed while the first one goes.

        It raises nothing, for the save that they make way for is visible: that one has not failed,
        and other processes wait for the end of it.
        """
        self._forget_what_has_gone()
        hidden = []
        for step in steps:
            with self._noting_failures():
                self._hide(step)
                hidden.append(step)
        with self._noting_failures():
            self._stock.delete_steps(hidden)

    @contextlib.contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = error

    def make_way(self, step: int) -> None:
        """Waits until a deleted step's files have gone; those of its next save would go too."""
        path = self._leaving.get(step)
        while path is not None and is_running(self._thread) and path.exists():
            time.sleep(_LOOK_SECS)
        self._leaving.pop(step, None)  # not sooner: after an interrupt the next save waits

    def close(self) -> None:
        """Waits for stock's thread, if there is one."""
        self._stock.close()

    def _forget_what_has_gone(self) -> None:
        """In a commit: no other save can end meanwhile, so none of these steps is a new one."""
        for step, path in list(self._leaving.items()):
            with contextlib.suppress(Exception):  # the storage does not say: later, maybe
                if not (is_running(self._thread) and path.exists()):
                    self._leaving.pop(step, None)

    def _hide(self, step: int) -> None:
        """Takes a step out of sight; one process does so for all."""
        primary = self._options.multiprocessing_options.primary_host
        if ocp.multihost.is_primary_host(primary):
            path = self._hidden(step)
            if self._thread is not None:  # what cannot be hidden it is not told of
                self._leaving[step] = path

    def _hidden(self, step: int) -> Any:
        """Where the files of a step are, once it is out of sight."""
        options = self._options
        path = step_path(self._root, step, options)
        is_moved = options.todelete_subdir is not None or options.todelete_full_path is not None
        if bucket.is_bucket(path):
            if not is_moved:
                (path / bucket.MARKER).unlink(missing_ok=True)
        elif path.exists():
            hidden = self._root / (step_names(options).build_name(step) + TEMPORARY)
            if hidden.exists():  # by a killed save: stock's would take it for the step
                hidden.rmtree()
            if not is_moved:
                # Some have one on disks, and Orbax 0.11.33 believes it, whatever their name.
                (path / bucket.MARKER).unlink(missing_ok=True)
                path.rename(hidden)
                return hidden
        return path
