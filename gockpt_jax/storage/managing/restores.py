"""What a manager restores: which step, which of its items, and under whose names.

A manager of stock's is bound to named or to unnamed items by the first that it sees. So the user's
must not see a step whose one item has no name, as stock writes it where nobody names it: that is
read beside it, by its path.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.storage.inspecting.directory import is_tree
from gockpt_jax.storage.managing import resume
from gockpt_jax.storage.managing.in_turn import SavesInTurn
from gockpt_jax.storage.managing.last_save import Stock
from gockpt_jax.storage.managing.naming import ITEM, UNNAMED, Naming
from gockpt_jax.storage.managing.places import step_path
from gockpt_jax.storage.restoring.arguments import GoCkptRestore
from gockpt_jax.storage.restoring.together import one_step
from gockpt_jax.storage.saving.state_handler import StateHandler


class Restores:
    """The restores of one manager.

    Args:
      manager: Of the checkpoints.
      options: The user's.
      handler: Of the states.
      naming: Of items.
      saves: Of that manager: a restore waits for them.
    """

    def __init__(
        self, manager: Any, options: ocp.CheckpointManagerOptions, handler: StateHandler,
        naming: Naming, saves: SavesInTurn,
    ):  # fmt: skip
        self._manager = manager
        self._options = options
        self._handler, self._processes = handler, handler._gockpt_session.processes
        self._naming = naming
        self._saves = saves

    def restore(self, step: int | None, args: Any, directory: Any, *, verify: bool) -> Any:
        """Restores a step; its parameters are those of `GoCkptManager.restore`."""
        self._saves.finish()  # as stock does; a window's failure is no matter of theirs
        is_named = args is None or isinstance(args, ocp.args.Composite)
        item = None if is_named else self._naming.item_of(args)
        find = functools.partial(self._find, step, item or ITEM, directory)
        if self._handler.together is not None:
            step, path, there = one_step(find, self._processes)
        else:
            step, path, there = find()
        if verify:
            resume.require_whole_step(path, self._processes)
        if self._naming.is_unnamed(there, item, args):
            asked = {} if args is None else {UNNAMED: args}
            reader = self._reader(self._naming.registry)
            return reader.restore(path, args=ocp.args.Composite(**asked))[UNNAMED]
        resume.require_items(path, (args or ()) if item is None else [item], there)
        read = functools.partial(Stock.restore, self._manager, step, directory=directory)
        if args is None:
            trees = [name for name in there if is_tree(path / name)]
            likely = dict.fromkeys(trees, ocp.args.StandardRestore())  # Orbax asks for all by such
            return self._naming.unname(self._read_items(read, path, likely))
        named = self._naming.name(args)
        restored = self._read_items(functools.partial(read, args=named), path, named)
        return restored if item is None else restored[item]

    def _read_items(self, read: Callable[[], Any], path: Any, asked: Any) -> Any:
        """What Orbax reads of a step; where that takes several processes, when all have read."""
        if (together := self._handler.together) is None:
            return read()
        trees = sum(self._naming.is_ours(*item) for item in asked.items())
        return together.read_items(read, path, trees)

    def _find(
        self, step: int | None, item: str, directory: Any
    ) -> tuple[int, epath.Path, Collection[str]]:
        """The label of the step to restore, where it is, and the names of its items."""
        root = epath.Path(directory or self._manager.directory)
        if step is None:
            step = resume.newest_in(root) if directory else self._saves.last.newest
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
            registry = ocp.DefaultCheckpointHandlerRegistry()
            registry.add(UNNAMED, GoCkptRestore, self._handler)
            found = self._reader(registry).metadata(path)
            metrics = self._manager.metrics(step) or {}
            item = found.item_metadata[UNNAMED]
            return dataclasses.replace(found, item_metadata=item, metrics=metrics)
        found = Stock.metadata(self._manager, step)
        items = self._naming.unname(found.item_metadata)
        return dataclasses.replace(found, item_metadata=items)

    def _reader(self, registry: Any) -> ocp.Checkpointer:
        """Of items without a name; not to be closed: its handlers are the manager's."""
        return ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(handler_registry=registry),
            multiprocessing_options=self._options.multiprocessing_options,
        )
