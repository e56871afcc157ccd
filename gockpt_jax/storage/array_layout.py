"""Where stock Orbax would put an array: the pieces that are written, and the chunks on disk.

`tests/storage` compares what it yields with a stock save, byte for byte: that test decides.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gockpt_jax.storage import bucket
from gockpt_jax.storage.host_array import HostArray

Shape = tuple[int, ...]

_GIB = 2**30
# What stock Orbax takes when the user gives no `ocdbt_target_data_file_size`.
_LOCAL_DATA_FILE_BYTES = 2 * _GIB
_BUCKET_DATA_FILE_BYTES = 400 * 2**20
# Our chunks. Stock's is one per shard, whatever its size: it is written by one thread, is in memory
# as a whole, and is read as a whole by who wants a row of it.
_CHUNK_BYTES = 64 * 2**20
# A chunk that is a file of its values is written and read in pieces, by several threads. Files of
# 256 MiB are few enough: see docs/storage.md.
_FILE_CHUNK_BYTES = 256 * 2**20


def _stock_replica_parallel() -> bool:
    """Stock's own default: on, unless JAX_PLATFORMS names a GPU."""
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    return "gpu" not in platforms and "cuda" not in platforms


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaLayout:
    """How stock cuts replicated shards into chunks; the fields are those of its `ArrayHandler`.

    Where stock lets R replicas write 1/R of each shard, a chunk is such a slice. Who writes which
    is settled where it is taken (`transfer/replicas.py`), from `write_shape`.

    Attributes:
      use_replica_parallel: Whether chunks are replica slices.
      min_slice_bytes: Slices smaller than this are not made; the chunk is the shard.
      max_replicas: Cut into at most this many slices.
    """

    use_replica_parallel: bool = dataclasses.field(default_factory=_stock_replica_parallel)
    min_slice_bytes: int = 0
    max_replicas: int | None = None

    def write_shape(self, shape: Shape, dtype: Any, sharding: jax.sharding.Sharding) -> Shape:
        """Returns the shape of what one replica writes under stock: the chunk before splitting."""
        shard = tuple(sharding.shard_shape(shape))
        if not self.use_replica_parallel or not _may_slice(shard, sharding):
            return shard
        replicas = len(sharding.device_set) * math.prod(shard) // math.prod(shape)
        replicas = min(replicas, self.max_replicas or replicas)
        axis = next((i for i, n in enumerate(shard) if n % replicas == 0), None)
        if replicas <= 1 or axis is None:
            return shard
        piece = (*shard[:axis], shard[axis] // replicas, *shard[axis + 1 :])
        too_small = math.prod(piece) * np.dtype(dtype).itemsize < self.min_slice_bytes
        return shard if too_small else piece


def _may_slice(shard: Shape, sharding: jax.sharding.Sharding) -> bool:
    """Stock leaves small arrays in pinned host memory whole: slicing them might hang there."""
    if sharding.memory_kind != "pinned_host":
        return True
    return len(shard) >= 2 and math.prod(shard) % 1024 == 0 and shard[-1] % 128 == 0


def replica_layout(
    use_replica_parallel: bool | None, min_slice_bytes: int | None, max_replicas: int | None
) -> ReplicaLayout:
    """Returns the layout for stock's arguments, in which None stands for stock's own choice."""
    given: dict[str, Any] = {
        "use_replica_parallel": use_replica_parallel,
        "min_slice_bytes": min_slice_bytes,
        "max_replicas": max_replicas,
    }
    return ReplicaLayout(**{name: value for name, value in given.items() if value is not None})


def replica_layout_of(options: Mapping[str, Any]) -> ReplicaLayout:
    """Returns the layout of a handler with these options, by `ArrayHandler`'s names for them."""
    return replica_layout(
        options.get("use_replica_parallel"),
        options.get("min_slice_bytes_for_replica_parallel"),
        options.get("max_replicas_for_replica_parallel"),
    )


def default_chunk_bytes(info: ocp.type_handlers.ParamInfo) -> int:
    """Returns the largest chunk, in bytes, where the user says nothing."""
    is_plain = not (info.is_ocdbt_checkpoint or info.use_zarr3 or _is_compressed(info))
    return _FILE_CHUNK_BYTES if is_plain else _CHUNK_BYTES


def chunk_count(shape: Shape, chunk: Shape) -> int:
    """Returns how many chunks an array has; as plain files, it has one file more.

    Example:
      >>> chunk_count((8192, 28672), (4096, 7168))
      8
    """
    return math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def _is_compressed(info: ocp.type_handlers.ParamInfo) -> bool:
    return bool(getattr(info, "use_compression", True))


def chunk_shape(
    shape: Shape, write: Shape, itemsize: int, limit_bytes: int | None, shard_axes: Shape = ()
) -> Shape:
    """Splits `write` into equal chunks of at most `limit_bytes`, as stock does.

    The longest axis that is already cut is shortened to the next smaller divisor of its length, and
    so on; whole axes only when no cut one is left.

    Args:
      shape: The global shape.
      write: The shape of what one process or replica writes at once.
      itemsize: Bytes per element as stored.
      limit_bytes: The largest chunk in bytes; None for no limit.
      shard_axes: Axes to cut to length 1, whatever the limit.

    Raises:
      ValueError: The limit is below one element, or an axis does not exist.
    """
    chunk = list(write)
    if any(not 0 <= axis < len(chunk) for axis in shard_axes):
        raise ValueError(
            f"`shard_axes`: expected axes of a {len(chunk)}-d array, got {shard_axes}."
        )
    chunk = [1 if axis in shard_axes else n for axis, n in enumerate(write)]
    if limit_bytes is None:
        return tuple(chunk)
    if limit_bytes < itemsize:
        raise ValueError(f"`chunk_byte_size`: expected at least {itemsize}, got {limit_bytes}.")
    is_cut = [n != w or i in shard_axes for i, (n, w) in enumerate(zip(shape, write, strict=True))]
    while math.prod(chunk) * itemsize > limit_bytes:
        longest = max((n for n, cut in zip(chunk, is_cut, strict=True) if cut), default=1)
        if longest == 1:
            is_cut = [True] * len(chunk)
            continue
        axis = next(i for i, n in enumerate(chunk) if is_cut[i] and n == longest)
        chunk[axis] = next(n for n in range(longest - 1, 0, -1) if write[axis] % n == 0)
    return tuple(chunk)


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """Where and how one leaf is stored.

    Attributes:
      name: The leaf's parameter name (its key prefix).
      write: What stock calls `write_shape`.
      chunk: The zarr chunk shape.
      dtype: The dtype of the values handed over.
      stored_dtype: The dtype on disk.
      key_impl: The PRNG implementation of typed keys, else None.
      compressed: Whether TensorStore compresses the chunks.
    """

    name: str
    write: Shape
    chunk: Shape
    dtype: np.dtype[Any]
    stored_dtype: np.dtype[Any]
    key_impl: str | None
    compressed: bool

    def metadata(self) -> dict[str, Any]:
        """Returns the leaf's entry in `array_metadatas/process_N`."""
        entry = {
            "param_name": self.name,
            "write_shape": self.write,
            "chunk_shape": self.chunk,
            "ext_metadata": {"random_key_impl": self.key_impl} if self.key_impl else None,
        }
        return {"array_metadata": entry}


def array_layout(
    array: HostArray,
    info: ocp.type_handlers.ParamInfo,
    folder: str,
    args: ocp.SaveArgs,
    replica_layout: ReplicaLayout,
    chunk_bytes: int,
) -> ArrayLayout:
    """Returns where stock would put `array`, given the save's `info` and the user's `args`.

    `folder` is the item's.
    `chunk_bytes` is what `args.chunk_byte_size` is taken for where it is not given.
    """
    stored = array.dtype if args.dtype is None else np.dtype(args.dtype)
    write = replica_layout.write_shape(array.shape, array.dtype, array.sharding)
    limit_bytes = args.chunk_byte_size or max(chunk_bytes, stored.itemsize)
    target_bytes = data_file_bytes(info, folder)
    # An OCDBT data file should hold a chunk, so stock splits bigger ones; 0 means no such limit.
    if info.is_ocdbt_checkpoint and target_bytes:
        limit_bytes = min(limit_bytes, target_bytes)
    chunk = chunk_shape(
        array.shape, write, stored.itemsize, limit_bytes, tuple(args.shard_axes or ())
    )
    return ArrayLayout(
        info.name, write, chunk, array.dtype, stored, array.key_impl, _is_compressed(info)
    )


def data_file_bytes(info: ocp.type_handlers.ParamInfo, folder: str) -> int:
    """Returns stock's target size of OCDBT data files, in bytes; 0 for no limit."""
    given = getattr(info, "ocdbt_target_data_file_size", None)
    if given is not None:
        return int(given)
    return _BUCKET_DATA_FILE_BYTES if bucket.is_bucket(folder) else _LOCAL_DATA_FILE_BYTES
