"""Where stock Orbax would put an array: what one replica writes, and the chunks on disk.

`tests/storage` compares what it yields with a stock save, byte for byte: that test decides.
"""

import dataclasses
import math
import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.writing.host_array import HostArray

Shape = tuple[int, ...]

_GIB = 2**30
# What stock Orbax takes when the user gives no `ocdbt_target_data_file_size`.
_LOCAL_DATA_FILE_BYTES = 2 * _GIB
_BUCKET_DATA_FILE_BYTES = 400 * 2**20
# TensorStore appends to one OCDBT data file at a time until it is full, so stock's 2 GiB make one
# thread write. With files of this size several do.
_PARALLEL_DATA_FILE_BYTES = 128 * 2**20
# Our chunks. Stock's is one per shard, whatever its size: it is written by one thread, is in memory
# as a whole, and is read as a whole by who wants a row of it.
_CHUNK_BYTES = 64 * 2**20
# A chunk that is its values and nothing else is written and read in pieces, by several threads; so
# is a data file of such chunks. Files of 256 MiB are few enough: see docs/storage.md.
_FILE_BYTES = 256 * 2**20


def _stock_replica_parallel() -> bool:
    """Stock's own default: on, unless JAX_PLATFORMS names a GPU."""
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    return "gpu" not in platforms and "cuda" not in platforms


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaLayout:
    """How stock cuts replicated shards into chunks.

    Where stock lets R replicas write 1/R of each shard, a chunk is such a slice. Who writes which
    is settled where it is taken (`transfer/replicas.py`), from `write_shape`.

    Attributes:
      use_replica_parallel: Whether chunks are replica slices.
      min_slice_bytes: Slices smaller than this are not made; the chunk is the shard.
      max_replicas: Cut into at most this many slices.
    """

    use_replica_parallel: bool
    min_slice_bytes: int = 0
    max_replicas: int | None = None

    @classmethod
    def pop_from(cls, options: dict[str, Any]) -> "ReplicaLayout":
        """Takes a handler's options of it, by stock's names; `None` stands for stock's choice."""
        use = options.pop("use_replica_parallel", None)
        return cls(
            use_replica_parallel=_stock_replica_parallel() if use is None else use,
            min_slice_bytes=options.pop("min_slice_bytes_for_replica_parallel", None) or 0,
            max_replicas=options.pop("max_replicas_for_replica_parallel", None),
        )

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
        one_slice = (*shard[:axis], shard[axis] // replicas, *shard[axis + 1 :])
        too_small = math.prod(one_slice) * np.dtype(dtype).itemsize < self.min_slice_bytes
        return shard if too_small else one_slice


def _may_slice(shard: Shape, sharding: jax.sharding.Sharding) -> bool:
    """Stock leaves small arrays in pinned host memory whole: slicing them might hang there."""
    if sharding.memory_kind != "pinned_host":
        return True
    return len(shard) >= 2 and math.prod(shard) % 1024 == 0 and shard[-1] % 128 == 0


def chunk_count(shape: Shape, chunk: Shape) -> int:
    """Returns how many chunks an array has; as plain files, it has one file more.

    Example:
      >>> chunk_count((8192, 28672), (4096, 7168))
      8
    """
    return math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def chunk_shape(
    shape: Shape, write: Shape, itemsize: int, limit_bytes: int, shard_axes: Shape = ()
) -> Shape:
    """Splits `write` into equal chunks of at most `limit_bytes`, as stock does.

    The longest axis that is already cut is shortened to the next smaller divisor of its length, and
    so on; whole axes only when no cut one is left.

    Args:
      shape: The global shape.
      write: The shape of what one process or replica writes at once.
      itemsize: Bytes per element as stored.
      limit_bytes: The largest chunk in bytes.
      shard_axes: Axes to cut to length 1, whatever the limit.

    Raises:
      ValueError: The limit is below one element, or an axis does not exist.
    """
    if any(not 0 <= axis < len(write) for axis in shard_axes):
        raise ValueError(
            f"`shard_axes`: expected axes of a {len(write)}-d array, got {shard_axes}."
        )
    chunk = [1 if axis in shard_axes else n for axis, n in enumerate(write)]
    if limit_bytes < itemsize:
        raise ValueError(f"`chunk_byte_size`: expected at least {itemsize}, got {limit_bytes}.")
    is_cut = [n != w for n, w in zip(shape, write, strict=True)]
    while math.prod(chunk) * itemsize > limit_bytes:
        longest = max((n for n, cut in zip(chunk, is_cut, strict=True) if cut), default=1)
        if longest == 1:
            is_cut = [True] * len(chunk)
            continue
        axis = next(i for i, n in enumerate(chunk) if is_cut[i] and n == longest)
        chunk[axis] = next(n for n in range(longest - 1, 0, -1) if write[axis] % n == 0)
    return tuple(chunk)


@dataclasses.dataclass(frozen=True)
class ItemLayout:
    """How the arrays of one item are stored: what Orbax says of each of its leaves.

    Attributes:
      folder: The item's.
      use_ocdbt: Whether the chunks are in an OCDBT database; else each is a file.
      use_zarr3: Whether the arrays are zarr v3; else v2.
      compressed: Whether TensorStore compresses the chunks.
      given_file_bytes: The size of OCDBT data files that the user has given; 0 for no limit.
    """

    folder: str
    use_ocdbt: bool
    use_zarr3: bool
    compressed: bool
    given_file_bytes: int | None = None

    @classmethod
    def of(cls, info: ocp.type_handlers.ParamInfo) -> "ItemLayout":
        """That of the item to which a leaf belongs."""
        return cls(
            info.parent_dir.as_posix(),
            bool(info.is_ocdbt_checkpoint),
            bool(info.use_zarr3),
            bool(info.use_compression),
            info.ocdbt_target_data_file_size,
        )

    @property
    def is_in_bucket(self) -> bool:
        """Whether the item is in a bucket."""
        return bucket.is_bucket(self.folder)

    @property
    def has_plain_chunks(self) -> bool:
        """Whether a chunk is its values and nothing else, in files that we can write."""
        return not (self.use_zarr3 or self.compressed or self.is_in_bucket)

    @property
    def default_chunk_bytes(self) -> int:
        """The largest chunk where the user says nothing."""
        return _FILE_BYTES if self.has_plain_chunks else _CHUNK_BYTES

    @property
    def data_file_bytes(self) -> int:
        """Stock's target size of OCDBT data files; 0 for no limit."""
        if self.given_file_bytes is not None:
            return self.given_file_bytes
        return _BUCKET_DATA_FILE_BYTES if self.is_in_bucket else _LOCAL_DATA_FILE_BYTES

    @property
    def written_file_bytes(self) -> int:
        """The size at which we begin another data file; of no concern to who reads them."""
        if self.given_file_bytes is not None or self.is_in_bucket:
            return self.data_file_bytes
        return _FILE_BYTES if self.has_plain_chunks else _PARALLEL_DATA_FILE_BYTES


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """Where and how one leaf is stored.

    Attributes:
      item: What it has in common with the other leaves.
      name: The leaf's parameter name (its key prefix).
      shape: The global shape.
      write: What stock calls `write_shape`.
      chunk: The zarr chunk shape.
      dtype: The dtype of the values handed over.
      stored_dtype: The dtype on disk.
      key_impl: The PRNG implementation of typed keys, else None.
    """

    item: ItemLayout
    name: str
    shape: Shape
    write: Shape
    chunk: Shape
    dtype: np.dtype[Any]
    stored_dtype: np.dtype[Any]
    key_impl: str | None

    @property
    def path(self) -> str:
        """The leaf's folder, where it has one of its own."""
        return f"{self.item.folder}/{self.name}"

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
    name: str,
    args: ocp.SaveArgs,
    item: ItemLayout,
    replica_layout: ReplicaLayout,
    chunk_bytes: int | None,
) -> ArrayLayout:
    """Returns where stock would put `array`.

    Args:
      array: The leaf.
      name: Its parameter name.
      args: The user's, for this leaf.
      item: Of the item.
      replica_layout: Of the handler.
      chunk_bytes: The largest chunk where `args` do not say; None for the item's default.
    """
    stored = array.dtype if args.dtype is None else np.dtype(args.dtype)
    write = replica_layout.write_shape(array.shape, array.dtype, array.sharding)
    usual_bytes = max(chunk_bytes or item.default_chunk_bytes, stored.itemsize)
    limit_bytes = args.chunk_byte_size or usual_bytes
    # An OCDBT data file should hold a chunk, so stock splits bigger ones; 0 means no such limit.
    if item.use_ocdbt and item.data_file_bytes:
        limit_bytes = min(limit_bytes, item.data_file_bytes)
    chunk = chunk_shape(
        array.shape, write, stored.itemsize, limit_bytes, tuple(args.shard_axes or ())
    )
    return ArrayLayout(item, name, array.shape, write, chunk, array.dtype, stored, array.key_impl)
