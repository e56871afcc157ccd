"""What a manager restores: which step, which of its items, and under whose names."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.storage.managing import naming, resume, unnamed
from gockpt_jax.storage.managing.in_turn import SavesInTurn
from gockpt_jax.storage.managing.last_save import Stock
from gockpt_jax.storage.managing.places import step_path
from gockpt_jax.storage.restoring.together import one_step
from gockpt_jax.storage.saving.state_handler import StateHandler


class Restores:
    """The restores of one manager.

    Args:
      manager: Of the checkpoints.
      options: The user's.
      handler: Of the states.
      names: Of items.
      saves: Of that manager: a restore waits for them.
    """

    def __init__(
        self, manager: Any, options: ocp.CheckpointManagerOptions, handler: StateHandler,
        names: naming.Naming, saves: SavesInTurn,
    ):  # fmt: skip
        self._manager = manager
        self._options = options
        self._handler, self._processes = handler, handler._gockpt_session.processes
        self._naming = names
        self._saves = saves

    def restore(self, step: int | None, args: Any, directory: Any, *, verify: bool) -> Any:
        """Restores a step; its parameters are those of `GoCkptManager.restore`."""
        self._saves.finish()  # as stock does; a window's failure is no matter of theirs
        is_named = args is None or isinstance(args, ocp.args.Composite)
        item = None if is_named else self._naming.item_of(args)
        find = functools.partial(self._find, step, item or naming.ITEM, directory)
        if self._handler.together is not None:
            step, path, there = one_step(find, self._processes)
        else:
            step, path, there = find()
        if verify:
            resume.require_whole_step(path, self._processes)
        if self._naming.is_unnamed(there, item, args):
            return unnamed.restore(path, args, self._naming.registry, self._options)
        resume.require_items(path, (args or ()) if item is None else [item], there)
        if args is None:
            restored = Stock.restore(self._manager, step, directory=directory)
            return self._naming.unname(restored)
        named = self._naming.name(args)
        read = functools.partial(
            Stock.restore, self._manager, step, directory=directory, args=named
        )
        restored = self._read_items(read, path, named)
        return restored if item is None else restored[item]

    def _read_items(self, read: Callable[[], Any], path: Any, named: Any) -> Any:
        """What Orbax reads of a step; where that takes several processes, when all have read."""
        if (together := self._handler.together) is None:
            return read()
        trees = sum(self._naming.is_ours(*item) for item in named.items())
        return together.read_items(read, path, trees)

    def _find(
        self, step: int | None, item: str, directory: Any
    ) -> tuple[int, epath.Path, Collection[str]]:
        """The label of the step to restore, where it is, and the names of its items."""
        root = epath.Path(directory or self._manager.directory)
        if step is None:
            step = resume.newest_in(root) if directory else Stock.latest_step(self._manager)
        if step is None:
            raise resume.nothing_in(root)
        path = step_path(root, step, self._options)
        there = resume.items_of(path, root)
        if not there:
            raise resume.no_item(path, item, there)
        return step, path, there

    def metadata(self, step: int) -> Any:
        """What is known of a step, under the names by which it would be restored."""
        root = self._manager.directory
        path = step_path(root, step, self._options)
        if step in self._saves.under_way and not path.is_dir():
            raise resume.not_yet(path)
        if self._naming.is_unnamed(resume.items_of(path, root)):
            found = unnamed.metadata(path, self._handler, self._options)
            return dataclasses.replace(found, metrics=self._manager.metrics(step) or {})
        found = Stock.metadata(self._manager, step)
        items = self._naming.unname(found.item_metadata)
        return dataclasses.replace(found, item_metadata=items)
