"""The stock PyTree handler, with host arrays among its leaf types."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from gockpt_jax.storage.host_array import HostArray
from gockpt_jax.storage.leaf_names import why_no_files
from gockpt_jax.storage.registry import RegistryView
from gockpt_jax.storage.write_budget import DEFAULT_WRITE_LIMIT_BYTES
from gockpt_jax.storage.writer import HostArrayHandler
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.mounts import file_system

_log = logging.getLogger("gockpt_jax")


# Their files can be written past the page cache. One that we do not know counts as a network's.
_LOCAL_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "overlay"}
)


def default_layout(directory: Any) -> dict[str, Any]:
    """The layout of a save where the user says nothing, by the kind of storage.

    On a local disk a chunk is a plain file without compression: such files can be written past the
    page cache, and stock's own readers are fastest with them. Elsewhere the layout is stock's, one
    OCDBT database: what counts there is the number of files, and a link slower than zstd. See
    docs/decisions/0014-plain-files-on-local-disks.md.

    Args:
      directory: Of the checkpoints.

    Returns:
      Options of `make_tree_handler`.

    Example:
      >>> default_layout("gs://bucket/run")
      {}
    """
    is_local = file_system(directory) in _LOCAL_FILE_SYSTEMS
    return {"use_ocdbt": False, "use_compression": False} if is_local else {}


class TreeHandler(NamedTuple):
    """The handler of whole trees, and the writer inside it.

    Attributes:
      handler: A stock `ocp.PyTreeCheckpointHandler`. It saves trees in which every `jax.Array`
        has been replaced by a `HostArray`; other leaves are as in stock. It restores like
        stock.
      writer: Writes the arrays.
    """

    handler: ocp.PyTreeCheckpointHandler
    writer: HostArrayHandler


def make_tree_handler(
    *,
    write_limit_bytes: int = DEFAULT_WRITE_LIMIT_BYTES,
    chunk_byte_size: int | None = None,
    use_replica_parallel: bool | None = None,
    min_slice_bytes_for_replica_parallel: int | None = None,
    max_replicas_for_replica_parallel: int | None = None,
    type_handler_registry: ocp.type_handlers.TypeHandlerRegistry | None = None,
    multiprocessing_options: ocp.options.MultiprocessingOptions | None = None,
    host: ByteBudget | None = None,
    **options: Any,
) -> TreeHandler:
    """Makes a stock PyTree handler that also takes `HostArray` leaves.

    A tree must not mix `jax.Array`s with them: both handlers would write `array_metadatas`.

    Args:
      write_limit_bytes: See `HostArrayHandler`.
      chunk_byte_size: See `HostArrayHandler`.
      use_replica_parallel: See `HostArrayHandler`.
      min_slice_bytes_for_replica_parallel: See `HostArrayHandler`.
      max_replicas_for_replica_parallel: See `HostArrayHandler`.
      type_handler_registry: The handlers of all other types; Orbax's global ones by default.
      multiprocessing_options: As in `ocp.PyTreeCheckpointHandler`.
      host: See `HostArrayHandler`.
      **options: Any other keyword of `ocp.PyTreeCheckpointHandler` (`use_ocdbt`, `use_zarr3`,
        `use_compression`, ...). `save_concurrent_gb` is stock's word for `write_limit_bytes`
        (in units of 10**9 bytes) and takes its place.

    Raises:
      TypeError: Orbax does not know one of `options`.
      ValueError: A limit is not positive.
    """
    multiprocessing_options = multiprocessing_options or ocp.options.MultiprocessingOptions()
    save_concurrent_gb = options.pop("save_concurrent_gb", None)
    if save_concurrent_gb is not None:
        write_limit_bytes = int(save_concurrent_gb * 10**9)
    writer = HostArrayHandler(
        write_limit_bytes=write_limit_bytes,
        host=host,
        primary_host=multiprocessing_options.primary_host,
        chunk_byte_size=chunk_byte_size,
        use_replica_parallel=use_replica_parallel,
        min_slice_bytes_for_replica_parallel=min_slice_bytes_for_replica_parallel,
        max_replicas_for_replica_parallel=max_replicas_for_replica_parallel,
    )
    handler = ocp.PyTreeCheckpointHandler(
        # By its name, "jax.Array" is read by the stock handler.
        type_handler_registry=RegistryView(HostArray, writer, type_handler_registry, by_name=False),
        multiprocessing_options=multiprocessing_options,
        **options,
    )
    return TreeHandler(handler, writer)


class TreeHandlers:
    """The handler of each tree: one that makes files, if so asked, or a database.

    Args:
      **options: As in `make_tree_handler`.
    """

    def __init__(self, **options: Any) -> None:
        self.usual = make_tree_handler(**options)
        self._options = options
        self._of_databases: TreeHandler | None = None

    def of(self, tree: Any) -> TreeHandler:
        """The usual handler, but for a tree whose leaves cannot be files."""
        if self._options.get("use_ocdbt", True) or (why_not := why_no_files(tree)) is None:
            return self.usual
        if self._of_databases is None:
            _log.warning("States are saved as OCDBT databases, not as plain files: %s.", why_not)
            self._of_databases = make_tree_handler(**{**self._options, "use_ocdbt": True})
        return self._of_databases

    def close(self) -> None:
        """Closes the stock handlers."""
        for made in (self.usual, self._of_databases):
            if made is not None:
                made.handler.close()
