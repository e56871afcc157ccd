"""Steps whose one item has no name, as a stock manager writes them where nobody names it.

A manager is bound to named or to unnamed items by the first that it sees, so the user's must not
see one of these: they are read beside it, by their paths.
"""

import dataclasses
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.storage.managing.naming import UNNAMED
from gockpt_jax.storage.restoring.arguments import GoCkptRestore
from gockpt_jax.storage.saving.state_handler import StateHandler


def restore(
    path: epath.Path, wanted: Any, registry: Any, options: ocp.CheckpointManagerOptions
) -> Any:
    """Restores the item of a step.

    Args:
      path: Of the step.
      wanted: Arguments of the restore; `None`: as it was saved.
      registry: Of the manager's handlers.
      options: The manager's.
    """
    asked = {} if wanted is None else {UNNAMED: wanted}
    reader = _reader(registry, options)
    return reader.restore(path, args=ocp.args.Composite(**asked))[UNNAMED]


def metadata(path: epath.Path, handler: StateHandler, options: ocp.CheckpointManagerOptions) -> Any:
    """What is known of a step and its item, but for metrics."""
    registry = ocp.DefaultCheckpointHandlerRegistry()
    registry.add(UNNAMED, GoCkptRestore, handler)
    found = _reader(registry, options).metadata(path)
    return dataclasses.replace(found, item_metadata=found.item_metadata[UNNAMED])


def _reader(registry: Any, options: ocp.CheckpointManagerOptions) -> ocp.Checkpointer:
    """Not to be closed: its handlers are the manager's."""
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(handler_registry=registry),
        multiprocessing_options=options.multiprocessing_options,
    )
