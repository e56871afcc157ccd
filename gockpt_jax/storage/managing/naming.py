"""Items by their names: which handler takes one, and what it is called where the caller does not.

A bare tree is `state` on disk. `None` stands in Orbax's registries for items of any name.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax.errors import SnapshotOnlyWarning, warn
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.storage.restoring.arguments import GoCkptRestore
from gockpt_jax.storage.saving.handler import GoCkptHandler, GoCkptSave
from gockpt_jax.storage.saving.state_handler import RestoreAsSaved, StateHandler
from gockpt_jax.storage.saving.taken import TakenSave

ITEM = "state"
UNNAMED = "default"
"""What Orbax calls an item that was saved without a name."""
METRICS = "metrics"
_ENDS_TREES = (
    StateHandler, ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler,
    ocp.handlers.ArrayCheckpointHandler,
)  # fmt: skip
"""By what trees that ours has written can be ended, and be read; stock's give them no checksums."""


def _registry(given: Any, item_handlers: Any, handler: StateHandler) -> Any:
    """The user's handlers, and ours for our own and for stock arguments.

    `None` stands for items of any name; what is registered for a name alone does not find it.
    """
    registry = ocp.DefaultCheckpointHandlerRegistry(given)
    if item_handlers is not None and not isinstance(item_handlers, Mapping):
        item_handlers = {ITEM: item_handlers}
    for item, users in (item_handlers or {}).items():
        for args in dict.fromkeys(_arguments_of(item, users)):
            registry.add(item, args, users)
    _warn_of_tree_handlers(registry)
    arguments = (
        GoCkptSave,
        GoCkptRestore,
        TakenSave,
        RestoreAsSaved,
        ocp.args.PyTreeSave,
        ocp.args.PyTreeRestore,
        ocp.args.StandardSave,
        ocp.args.StandardRestore,
    )
    # Orbax finalizes an item by the first handler under its name, whoever has written it.
    is_users = any(item in (ITEM, None) for item, _ in registry.get_all_entries())
    for item, args in itertools.product((None,) if is_users else (ITEM, None), arguments):
        if not registry.has(item, args):
            registry.add(item, args, handler)
    return registry


def _arguments_of(item: str, handler: Any) -> tuple[Any, Any]:
    if isinstance(handler, type) or not ocp.args.has_registered_args(handler):
        raise ValueError(
            f"`item_handlers`: item `{item}` needs a handler with checkpoint arguments, got "
            f"{handler!r}. Make one, such as `ocp.JsonCheckpointHandler()`; arguments are "
            "registered with `ocp.args.register_with_handler`."
        )
    save, restore = ocp.args.get_registered_args_cls(handler)
    return save, restore


def _warn_of_tree_handlers(registry: Any) -> None:
    """The user's word is kept, but it may come from a loop that was written for stock."""
    of_trees = (ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler, GoCkptHandler)
    entries = registry.get_all_entries().items()
    items = sorted({str(item) for (item, _), users in entries if isinstance(users, of_trees)})
    if items:
        warn(
            f"The handlers that were given for {', '.join(f'`{item}`' for item in items)} know "
            "nothing of this manager's windows: `save` waits until the state is on the host. Leave "
            "them out; `pytree_options` takes what they were made with, such as `use_zarr3`.",
            SnapshotOnlyWarning,
        )


class Naming:
    """Whether the caller names its items, and so what it gets back: the item, or a `Composite`.

    A bare tree is named `state` on disk, and so may be an item that the caller named. Who has used
    names and never left them out gets them back, as in stock. Any other bare item is named as stock
    names it.

    Args:
      handler: Ours.
      handler_registry: The user's, or `None`.
      item_names: What the manager was given by this name.
      item_handlers: Handlers by the names of their items, or the one of the bare item, as in
        `ocp.CheckpointManager`.

    Attributes:
      registry: All handlers.

    Raises:
      ValueError: if one of the user's handlers has no arguments registered.

    Warns:
      SnapshotOnlyWarning: if one of them takes trees of arrays, which ours does through windows.
    """

    def __init__(
        self, handler: StateHandler, handler_registry: Any, item_names: Any, item_handlers: Any
    ):
        self.registry = _registry(handler_registry, item_handlers, handler)
        self._handler = handler
        self._is_named = bool(item_names) or isinstance(item_handlers, Mapping)
        self._is_bare = False

    def is_ours(self, name: str, args: Any) -> bool:
        """Whether an item is a tree that our handler takes."""
        keys = ((key, args) for key in (name, None))
        found = next((self.registry.get(*key) for key in keys if self.registry.has(*key)), None)
        return found is self._handler

    def item_of(self, args: Any) -> str:
        """The name of a bare item.

        Raises:
          TypeError: if these are no arguments of a checkpoint.
        """
        _require_arguments(args)
        if any(item == ITEM for item, _ in self.registry.get_all_entries()):
            return ITEM if self.registry.has(ITEM, args) else UNNAMED
        return ITEM if self.is_ours(ITEM, args) else UNNAMED

    def note(self, args: Any) -> None:
        """Remembers whether items are named; of a call that saves nothing, too.

        Raises:
          TypeError: if these are no arguments of a checkpoint.
        """
        if isinstance(args, ocp.args.Composite):
            self._is_named = True
        else:
            _require_arguments(args)
            self._is_bare = True

    def name(self, args: Any) -> Any:
        """Arguments by the names of their items."""
        self.note(args)
        if isinstance(args, ocp.args.Composite):
            return args
        return ocp.args.Composite(**{self.item_of(args): args})

    def is_unnamed(
        self, items: Collection[str], item: str | None = None, wanted: Any = None
    ) -> bool:
        """Whether it is a step's item without a name that is wanted.

        Among others it is one that was named so: a caller who names items wants all of them.

        Args:
          items: Of the step.
          item: The name of the bare item that is wanted; `None`: items are wanted by their names.
          wanted: Arguments of the restore; `None`: whatever there is.
        """
        if UNNAMED not in items:
            return False
        if item is not None:
            return item == UNNAMED or item not in items
        is_alone = set(items) - {METRICS} == {UNNAMED}
        return wanted is None and (is_alone or not self._is_named)

    def unname(self, composite: Any) -> Any:
        """What a call without arguments gives: the bare item itself, where it is the only one."""
        is_alone = set(composite.keys()) - {METRICS} == {ITEM}
        return composite[ITEM] if is_alone and (self._is_bare or not self._is_named) else composite

    def refuse_ended_by_others(self, manager: Any, trees: Iterable[str]) -> None:
        """Refuses trees that nobody could read: what our handler writes, it has to end.

        On all processes alike, for they register the same handlers at the same calls.

        Args:
          manager: Of the checkpoints.
          trees: The names under which our handler would write some.

        Raises:
          ValueError: if Orbax has another handler end one of them.
        """
        for name in trees:
            other = of_orbax.who_ends(manager, name)
            if other is not None and not isinstance(other, _ENDS_TREES):
                raise ValueError(
                    f"`args`: item `{name}` is a tree of arrays, but under that name the manager "
                    f"has a `{type(other).__name__}`: it was given for it, or took or gave another "
                    "kind of item that was so named, as metrics are. Orbax would end the tree by "
                    "it, and nobody could read what was written. Give the tree another name, or "
                    "leave that handler out."
                )


def _require_arguments(args: Any) -> None:
    if not isinstance(args, ocp.args.CheckpointArgs):
        raise TypeError(
            f"`args` must be checkpoint arguments, got a `{type(args).__name__}`. Write "
            "`args=GoCkptSave(state)`, or `args=GoCkptRestore(state)` to restore."
        )
