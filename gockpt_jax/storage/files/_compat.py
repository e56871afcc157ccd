"""What Orbax does not tell: barriers and operations, the parts of a `CheckpointManager`, buckets.

Each entry says why it is needed and on which versions it was read; without the parts of a
`CheckpointManager` ours fails.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import orbax.checkpoint as ocp

COMMIT_BARRIERS = ("async_write_complete", "async_commit_complete")
"""Parts of the keys of Orbax's barriers after writing and after renaming (0.11.33 to 0.12.8)."""

PROGRESS_BARRIER = "set_value_end"
"""Part of the key of Orbax's barrier at which all processes know that a save has begun, or ended
(0.11.33 to 0.12.8). Where it is missing, saves wait for the next accepted one, or for a wait."""


def commit_thread(manager: Any) -> Any | None:
    """The thread that ends a `CheckpointManager`'s last save; `None` before the first.

    Its attribute `exception` is what it has failed with, and what those who wait for it raise. Of
    Orbax 0.11.33 to 0.12.
    """
    return manager._finalize_thread.get()


def writes_thread(manager: Any) -> Any | None:
    """The thread that ends a `CheckpointManager`'s writes (0.11.33 to 0.12), if one does."""
    return manager._checkpointer._async_manager._thread


def wait_for_writes(manager: Any) -> None:
    """Waits for what a `CheckpointManager` writes (0.11.33 to 0.12), and raises why it failed."""
    manager._checkpointer.wait_until_finished()


# Of this thread, or of one in whose place a loop of Orbax's runs.
_own_operation: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "own_operation", default=None
)


@contextlib.contextmanager
def own_operation(name: str | None) -> Iterator[None]:
    """What is done in here by Orbax belongs to one operation, whatever others begin meanwhile.

    Orbax (0.11.33 to 0.12.8) numbers the operations of each process, and each part of a save asks
    for the number of the one that has begun last there: it waits until that one's directory is
    told to be made, by whichever process has come to the same number. Where another thread has
    begun an operation in between, it waits for 300 s if that has been committed already; where
    another process has made another directory, it does not wait, and Orbax deletes what it has
    written by then when it makes this one. All others are told the number, as they always were.

    Args:
      name: Of the operation, where processes write one directory together the same on each of
        them, and of no other; `None`: what Orbax tells.
    """
    _tell_own_operations()
    before = _own_operation.get()
    try:
        _own_operation.set(name)  # in here: an interrupt comes behind it, and loses what it returns
        yield
    finally:
        _own_operation.set(before)


def operation() -> str | None:
    """The operation that this thread is part of; `None` where Orbax has no numbers."""
    ids = _operation_ids()
    return None if ids is None else str(ids.get_current_operation_id())


def _operation_ids() -> Any:
    from orbax.checkpoint._src.futures import synchronization

    ids = getattr(synchronization, "OperationIdGenerator", None)
    return ids if hasattr(ids, "get_current_operation_id") else None


@functools.cache
def _tell_own_operations() -> None:
    """Replaces the method that tells the number, for the whole process."""
    if (ids := _operation_ids()) is not None:
        last = ids.get_current_operation_id
        ids.get_current_operation_id = classmethod(lambda cls: _own_operation.get() or last())


def meet_behind_restore(together: Any) -> None:
    """Comes to the barrier behind the last item of a restore (0.11.33 to 0.12.8).

    Whom an item has failed does not come there by itself.

    Args:
      together: Orbax's `MultiprocessingOptions`.
    """
    prefix = together.barrier_sync_key_prefix
    key = "Checkpointer:restore" if prefix is None else f"{prefix}_Checkpointer:restore"
    ocp.multihost.sync_global_processes(key, processes=together.active_processes)


def replace_deleter(manager: Any, around: Callable[[Any], Any]) -> Any:
    """Puts another deleter in the place of a `CheckpointManager`'s, which no option names.

    Args:
      manager: Of Orbax 0.11.33 to 0.12.
      around: Gives the new one, of the `ocp.path.deleter.CheckpointDeleter` that it has.
    """
    manager._checkpoint_deleter = deleter = around(manager._checkpoint_deleter)
    return deleter


def items_have_names(manager: Any) -> None:
    """Says that a `CheckpointManager` is given items by their names, in a `Composite`, always.

    With a handler registry it finds that out from the first call, or step: one that holds an item
    by the name `default` passes for a step whose item has no name. Of Orbax 0.11.33 to 0.12.
    """
    manager._default_item.set(False)


def who_ends(manager: Any, item: str) -> Any | None:
    """The handler by which a `CheckpointManager` with a registry ends the item of a save.

    It is the first that was registered under the name, whoever has written the item; `None`: there
    is none yet, and who writes it is the first. Of Orbax 0.11.33 to 0.12.
    """
    entries = manager._checkpointer._handler._handler_registry.get_all_entries()
    return next((handler for (name, _), handler in entries.items() if name == item), None)


def wait_for_metadata(manager: Any) -> Callable[[], None]:
    """What waits until the notes of a `CheckpointManager` on its steps have been written.

    A thread of its own writes them, of Orbax 0.11.33 to 0.12.
    """
    wait: Callable[[], None] = manager._non_blocking_metadata_store.wait_until_finished
    return wait


def deleting_thread(deleter: Any) -> Any | None:
    """The thread of an `ocp.path.deleter.ThreadedCheckpointDeleter`; `None` of another deleter.

    Which step it is at, nobody is told. Of Orbax 0.11.33 to 0.12.
    """
    return getattr(deleter, "_delete_thread", None)


def route_buckets(schemes: tuple[str, ...], kvstore: Callable[[str], dict[str, Any]]) -> bool:
    """Has Orbax keep arrays in buckets by TensorStore's drivers, with specs of ours.

    Orbax 0.12.8 knows `gs://` only. At `s3://` it refuses with OCDBT ("Checkpoint path should be
    absolute"), and without it writes arrays into a local folder named `s3:`. All it lacks is in
    four names, which are replaced for the whole process; local paths take the way they took.

    Args:
      schemes: Such as `gs://`; Orbax then commits there by a marker file, not by renaming.
      kvstore: Gives the spec of an address.

    Returns:
      Whether that was possible; `False` where Orbax (such as 0.11.33) has no such names.
    """
    try:
        from orbax.checkpoint._src.path import gcs_utils
        from orbax.checkpoint._src.serialization import tensorstore_utils
    except ImportError:
        return False
    names = (
        (gcs_utils, "_GCS_PATH_PREFIX"), (gcs_utils, "get_kvstore_for_gcs"),
        (tensorstore_utils, "_use_gcs_driver"), (tensorstore_utils, "_normalize_path"),
    )  # fmt: skip
    if not all(hasattr(module, name) for module, name in names):
        return False
    if gcs_utils.get_kvstore_for_gcs is kvstore:
        return True
    local = tensorstore_utils._normalize_path

    def normalize(path: str) -> str:
        scheme = next((s for s in schemes if path.startswith(s)), "")
        return scheme + str(local(path.removeprefix(scheme)))

    gcs_utils._GCS_PATH_PREFIX = schemes
    gcs_utils.get_kvstore_for_gcs = kvstore
    tensorstore_utils._use_gcs_driver = lambda directory: directory.startswith(schemes)
    tensorstore_utils._normalize_path = normalize
    return True
