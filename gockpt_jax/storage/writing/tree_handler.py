"""The stock PyTree handler, with host arrays among its leaf types, and its layout by default."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.options import WindowOptions
from gockpt_jax.storage.files.literal import literal
from gockpt_jax.storage.writing.array_handler import HostArrayHandler
from gockpt_jax.storage.writing.array_layout import ReplicaLayout
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.leaf_names import why_no_files
from gockpt_jax.storage.writing.registry import RegistryView
from gockpt_jax.storage.writing.spec import is_unmerged
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.mounts import file_system

_log = logging.getLogger("gockpt_jax")


# Their files can be written past the page cache. One that we do not know counts as a network's.
_LOCAL_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "overlay"}
)


def default_layout(directory: Any) -> dict[str, Any]:
    """The layout of a save where the user says nothing, by the kind of storage.

    It is stock's, one OCDBT database. On a local disk it is without compression, for then its
    values can be written and read past the page cache, as fast as the disk is; elsewhere there may
    be a link slower than zstd. See docs/decisions/0027-databases-on-local-disks.md.

    Args:
      directory: Of the checkpoints.

    Returns:
      Options of `make_tree_handler`.

    Example:
      >>> default_layout("gs://bucket/run")
      {}
    """
    is_local = file_system(directory) in _LOCAL_FILE_SYSTEMS
    return {"use_compression": False} if is_local else {}


def make_tree_handler(
    *,
    write_limit_bytes: int = WindowOptions.write_limit_bytes,
    host: ByteBudget | None = None,
    **options: Any,
) -> ocp.PyTreeCheckpointHandler:
    """Makes a stock PyTree handler that also takes `HostArray` leaves.

    It saves trees in which every `jax.Array` has been replaced by a `HostArray`: a tree must not
    mix them, for both handlers would write `array_metadatas`. Other leaves are as in stock, and so
    is restoring.

    Args:
      write_limit_bytes: See `HostArrayHandler`.
      host: See `HostArrayHandler`.
      **options: Keywords of `ocp.PyTreeCheckpointHandler` (`use_ocdbt`, `use_zarr3`,
        `use_compression`, ...), `HostArrayHandler`'s `chunk_byte_size`, and those of stock's
        `ArrayHandler` for replicas (`use_replica_parallel`, ...).
        `save_concurrent_gb` is stock's word for `write_limit_bytes` (in units of 10**9 bytes) and
        takes its place.

    Raises:
      TypeError: Orbax does not know one of `options`.
      ValueError: A limit is not positive.
    """
    together = options.pop("multiprocessing_options", None) or ocp.options.MultiprocessingOptions()
    if (limit_gb := options.pop("save_concurrent_gb", None)) is not None:
        write_limit_bytes = int(limit_gb * 10**9)
    writer = HostArrayHandler(
        write_limit_bytes=write_limit_bytes,
        chunk_byte_size=options.pop("chunk_byte_size", None),
        replica_layout=ReplicaLayout.pop_from(options),
        primary_host=together.primary_host,
        host=host,
    )
    others = options.pop("type_handler_registry", None)
    # By its name, "jax.Array" is read by the stock handler.
    registry = RegistryView(HostArray, writer, others, by_name=False)
    try:
        return ocp.PyTreeCheckpointHandler(
            type_handler_registry=registry, multiprocessing_options=together, **options
        )
    except TypeError as error:
        raise TypeError(
            f"these options (of a manager, its `pytree_options`) are not understood: {error}. They "
            "are keywords of `ocp.PyTreeCheckpointHandler` (`use_zarr3`, ...) and `chunk_byte_size`"
        ) from error


class TreeHandlers:
    """The handler of each tree: one that makes files, if so asked, or a database.

    Args:
      **options: As in `make_tree_handler`.
    """

    def __init__(self, **options: Any) -> None:
        self._usual = make_tree_handler(**options)
        self._options = options
        self._of_databases: ocp.PyTreeCheckpointHandler | None = None

    def of(self, tree: Any) -> ocp.PyTreeCheckpointHandler:
        """The usual handler, but for a tree whose leaves cannot be files."""
        if self._options.get("use_ocdbt", True) or (why_not := why_no_files(tree)) is None:
            return self._usual
        if self._of_databases is None:
            _log.warning("States are saved as OCDBT databases, not as plain files: %s.", why_not)
            self._of_databases = make_tree_handler(**{**self._options, "use_ocdbt": True})
        return self._of_databases

    def finalize(self, directory: Any) -> None:
        """Orbax's own: merges what the processes wrote, if that is a database.

        Raises:
          RuntimeError: It has not been merged: a reader would find no arrays.
        """
        with _nothing_said_of_no_merge():
            self._usual.finalize(literal(directory))
        if is_unmerged(epath.Path(directory)):
            raise RuntimeError(
                f"{directory}: Orbax has not merged the databases of the processes: nobody would "
                "find the arrays, so the save fails. `use_ocdbt=False` writes plain files instead."
            )

    def close(self) -> None:
        """Closes the stock handlers."""
        for made in (self._usual, self._of_databases):
            if made is not None:
                made.close()


@contextlib.contextmanager
def _nothing_said_of_no_merge() -> Iterator[None]:
    """Orbax warns at every save of plain files that there is no database to merge."""

    def is_news(record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
