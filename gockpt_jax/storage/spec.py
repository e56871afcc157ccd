"""The TensorStore specs of a stock Orbax save, from public facts only.

Orbax's own builder of these specs changed its interface between 0.12.4 and 0.12.8, so we keep ours.
`tests/storage` compares what it yields with a stock save, byte for byte: that test decides.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts

from gockpt_jax.storage import bucket, grid
from gockpt_jax.storage.array_layout import ArrayLayout
from gockpt_jax.storage.plain_array import is_stored_as_it_is

Json = dict[str, Any]


def _kvstore(directory: str) -> Json:
    """Returns the base store of a directory."""
    if bucket.is_bucket(directory):
        return bucket.kvstore(directory)
    return {"driver": "file", "path": directory}


def _ocdbt(layout: ArrayLayout) -> Json:
    base = _kvstore(f"{layout.item.folder}/ocdbt.process_{jax.process_index()}/")
    spec: Json = {"driver": "ocdbt", "base": base, "path": layout.name}
    if base["driver"] == "file":
        # On a file system data files need no atomic rename; the manifest does.
        spec["base"] = {**base, "file_io_locking": {"mode": "non_atomic"}}
        spec["manifest"] = base
    return spec | {
        "cache_pool": "cache_pool#ocdbt",
        "target_data_file_size": layout.item.written_file_bytes,
        # Only this process writes to this database, so no configuration has to be agreed on.
        "assume_config": True,
        "config": {
            "max_inline_value_bytes": 1024,
            "max_decoded_node_bytes": 100_000_000,
            "manifest_kind": "single",
        },
    }


def _zarr2(layout: ArrayLayout) -> Json:
    compressor = {"id": "zstd", "level": 1} if layout.item.compressed else None
    return {"shape": layout.shape, "chunks": layout.chunk, "compressor": compressor}


def _zarr3(layout: ArrayLayout) -> Json:
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd = {"name": "zstd", "configuration": {"level": 3}}
    sharding = {
        "chunk_shape": layout.chunk,
        "codecs": [little_endian, zstd] if layout.item.compressed else [little_endian],
        "index_codecs": [little_endian, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "shape": layout.shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": layout.chunk}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }


def array_spec(layout: ArrayLayout) -> Json:
    """Returns the TensorStore spec under which this process writes one leaf."""
    is_zarr3 = layout.item.use_zarr3
    spec: Json = {
        "driver": "zarr3" if is_zarr3 else "zarr",
        "kvstore": _ocdbt(layout) if layout.item.use_ocdbt else _kvstore(layout.path),
        "dtype": layout.stored_dtype.name,
        "metadata": _zarr3(layout) if is_zarr3 else _zarr2(layout),
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        # A chunk of zeros is written too: its absence on disk then always means lost data.
        "store_data_equal_to_fill_value": True,
    }
    if layout.stored_dtype == layout.dtype:
        return spec
    return {"driver": "cast", "base": spec, "dtype": layout.dtype.name}


def metadata_file(layout: ArrayLayout) -> str | None:
    """Returns the file that says what a leaf is; None where it is no file of its own."""
    if layout.item.use_ocdbt or layout.item.is_in_bucket:
        return None
    return f"{layout.path}/{'zarr.json' if layout.item.use_zarr3 else '.zarray'}"


def metadata_text(spec: Json) -> bytes:
    """Returns what TensorStore writes into that file, for an array of this spec."""
    array = spec.get("base", spec)
    rest = {name: value for name, value in array.items() if name != "kvstore"}
    return _metadata_text(json.dumps(rest))


@functools.lru_cache(maxsize=4096)  # a model has many leaves of few shapes
def _metadata_text(array: str) -> bytes:
    spec = json.loads(array) | {"kvstore": "memory://"}
    memory = ts.open(spec, create=True, context=ts.Context()).result().kvstore
    assert memory is not None
    (name,) = memory.list().result()
    return bytes(memory.read(name).result().value)


def plain_folder(layout: ArrayLayout, boxes: Sequence[grid.Box]) -> str | None:
    """Returns the folder of a leaf whose chunks are plain files of its values; None otherwise.

    Args:
      layout: Of the leaf.
      boxes: What this process writes; it must be whole chunks, or the rest of one would be lost.
    """
    is_plain = (
        layout.item.has_plain_chunks
        and not layout.item.is_in_bucket
        and layout.stored_dtype == layout.dtype
        and is_stored_as_it_is(layout.dtype)
        and all(grid.is_whole(box, layout.chunk) for box in boxes)
    )
    return layout.path if is_plain else None


def sharding_spec(folder: str) -> Json:
    """Returns the spec of the `_sharding` file."""
    return {"driver": "json", "kvstore": _kvstore(f"{folder}/_sharding")}


def sharding_key(name: str) -> str:
    """Returns the name of a leaf's entry in the `_sharding` file."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def sharding_text(sharding: jax.sharding.Sharding) -> str | None:
    """Returns a sharding as stock records it; None for kinds that stock does not record."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        kind = ocp.metadata.NamedShardingMetadata
    elif isinstance(sharding, jax.sharding.SingleDeviceSharding):
        kind = ocp.metadata.SingleDeviceShardingMetadata
    else:
        return None
    return str(kind.from_jax_sharding(sharding).to_serialized_string())
