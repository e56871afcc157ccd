"""The TensorStore specs of a stock Orbax save, from public facts only.

Orbax's own builder of these specs changed its interface between 0.12.4 and 0.12.8, so we keep ours.
`tests/storage` compares what it yields with a stock save, byte for byte: that test decides.
"""

import base64
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from gockpt_jax.storage.files import bucket, grid
from gockpt_jax.storage.files.database import Extent, Extents, files_in
from gockpt_jax.storage.files.literal import literal
from gockpt_jax.storage.files.plain_array import is_stored_as_it_is
from gockpt_jax.storage.writing.array_layout import ArrayLayout, ItemLayout
from gockpt_jax.storage.writing.database_index import PlacedArray
from gockpt_jax.storage.writing.leaf_names import PROCESS_FOLDER

Json = dict[str, Any]


def process_folder(item: ItemLayout) -> str:
    """Returns the folder of this process's database, which Orbax merges with the others'."""
    return f"{item.folder}/{PROCESS_FOLDER}{jax.process_index()}/"


def is_unmerged(folder: epath.Path) -> bool:
    """Whether databases of processes lie in an item's folder, and none of all of them."""
    return (
        any(literal(folder).glob(f"{PROCESS_FOLDER}*")) and not (folder / "manifest.ocdbt").exists()
    )


def database_in(folder: str) -> Json:
    """Returns the store of a database in a folder, as it is."""
    base = bucket.store_of(folder)
    if base["driver"] != "file":
        return {"driver": "ocdbt", "base": base}
    # On a file system data files need no atomic rename; the manifest does.
    unlocked = {**base, "file_io_locking": {"mode": "non_atomic"}}
    return {"driver": "ocdbt", "base": unlocked, "manifest": base}


def process_database(item: ItemLayout) -> Json:
    """Returns the store of the database that this process writes."""
    return {
        **database_in(process_folder(item)),
        "cache_pool": "cache_pool#ocdbt",
        "target_data_file_size": item.written_file_bytes,
        # Only this process writes to this database, so no configuration has to be agreed on.
        "assume_config": True,
        "config": {
            "max_inline_value_bytes": 1024,
            "max_decoded_node_bytes": 100_000_000,
            "manifest_kind": "single",
        },
    }


def _database_of(layout: ArrayLayout) -> Json:
    return process_database(layout.item) | {"path": layout.name}


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
    item, is_zarr3 = layout.item, layout.item.use_zarr3
    spec: Json = {
        "driver": "zarr3" if is_zarr3 else "zarr",
        "kvstore": _database_of(layout) if item.use_ocdbt else bucket.store_of(layout.path),
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


def placed_array(
    layout: ArrayLayout, boxes: Sequence[grid.Box], with_metadata: bool
) -> PlacedArray:
    """Returns what a database has of a leaf: chunks, and what says what it is."""
    spec = array_spec(layout)
    del spec["kvstore"]
    return PlacedArray(
        layout.name,
        spec,
        layout.chunk,
        layout.dtype,
        [cell for box in boxes for cell in grid.cells(box, layout.chunk)],
        metadata_text(spec) if with_metadata else None,
    )


def metadata_extent(layout: ArrayLayout, extents: Extents | None) -> Extent | None:
    """Returns where to write what a leaf is; None where only TensorStore can.

    Args:
      layout: Of the leaf.
      extents: Where its values are written, if without TensorStore.
    """
    if layout.item.use_ocdbt or layout.item.is_in_bucket:
        return extents(".zarray") if extents else None
    return files_in(layout.path)("zarr.json" if layout.item.use_zarr3 else ".zarray")


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


def is_written_as_it_is(layout: ArrayLayout, boxes: Sequence[grid.Box]) -> bool:
    """Whether the values that are stored of a leaf are those of its chunks, and nothing else.

    Args:
      layout: Of the leaf.
      boxes: What this process writes; it must be whole chunks, or the rest of one would be lost.
    """
    return (
        layout.item.has_plain_chunks
        and layout.stored_dtype == layout.dtype
        and is_stored_as_it_is(layout.dtype)
        and all(grid.is_whole(box, layout.chunk) for box in boxes)
    )


def sharding_spec(folder: str) -> Json:
    """Returns the spec of the `_sharding` file."""
    return {"driver": "json", "kvstore": bucket.store_of(f"{folder}/_sharding")}


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
