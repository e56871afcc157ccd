"""The stock PyTree handler, with host arrays among its leaf types."""

from __future__ import annotations

from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from gockpt_jax.storage.host_array import HostArray
from gockpt_jax.storage.registry import RegistryView
from gockpt_jax.storage.write_budget import DEFAULT_WRITE_LIMIT_BYTES
from gockpt_jax.storage.writer import HostArrayHandler
from gockpt_jax.transfer.budget import ByteBudget


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
