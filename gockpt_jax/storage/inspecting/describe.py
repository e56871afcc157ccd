"""What a stored tree is, without reading its values: leaves, layout, placement, metadata."""

import base64
import binascii
import functools
import json
from collections.abc import Mapping
from typing import Any

from gockpt_jax.storage.files import checksum_files, grid, item_files
from gockpt_jax.storage.files.checksum_files import ChecksumError
from gockpt_jax.storage.inspecting.stored_item import (
    StoredItem,
    StoredLeaf,
    chunk_shape,
    for_each,
    nbytes_of,
)

Json = dict[str, Any]


def describe_item(path: Any) -> Json:
    """Returns a description that JSON can hold.

    Args:
      path: The item's directory.

    Returns:
      `path`, `layout`, `checksums`, `files` and `bytes_on_disk` of the item, its
      `custom_metadata`, and its `leaves`: name, type, dtype, shape, chunk shape, bytes before
      compression, the placement that it was saved from, and the algorithm of random keys.

    Raises:
      StoredItemError: It is no tree that Orbax has saved.
      StoredLeafError: A leaf's own metadata cannot be read; see `gockpt_jax verify`.
    """
    item = StoredItem(path)
    describe = functools.partial(_leaf, item, _placements(item))
    leaves = list(for_each(item.leaves.values(), describe))
    sizes = [size for _, size in item_files.files_of(item.path)]
    return {
        "path": str(item.path),
        "layout": {
            "store": "ocdbt" if item.use_ocdbt else "files",
            "zarr": 3 if item.use_zarr3 else 2,
        },
        "checksums": _checksums(item),
        "files": len(sizes),
        "bytes_on_disk": sum(sizes),
        "bytes": sum(leaf.get("bytes", 0) for leaf in leaves),
        "custom_metadata": item.custom_metadata,
        "leaves": leaves,
    }


def _leaf(item: StoredItem, placements: Mapping[str, str], stored: StoredLeaf) -> Json:
    told: Json = {"name": stored.name, "type": stored.value_type}
    if stored.is_array:
        store = item.open(stored.name)
        told |= {
            "dtype": store.dtype.numpy_dtype.name,
            "shape": list(store.shape),
            "chunk": list(chunk_shape(store)),
            "bytes": nbytes_of(store, grid.whole(store.shape)),
            "placement": placements.get(stored.name),
        }
        if told["dtype"] == "uint32" and (algorithm := item.key_algorithms.get(stored.name)):
            told["random_key"] = algorithm
    elif stored.has_data and stored.value_type == "string":
        told["value"] = item.text(stored.name)
    return told


def _checksums(item: StoredItem) -> Json | None:
    """Their version, and which processes made them; `None` if there are none."""
    try:
        processes = checksum_files.read_item(item.path).processes
    except FileNotFoundError:
        return None
    except ChecksumError as error:
        return {"error": str(error)}
    version, algorithm = checksum_files.VERSION, checksum_files.ALGORITHM
    return {"version": version, "algorithm": algorithm, "processes": processes}


def _placements(item: StoredItem) -> dict[str, str]:
    """Mesh and partition of each array, as stock has recorded them."""
    try:
        recorded = json.loads((item.path / "_sharding").read_text())
        return {
            base64.urlsafe_b64decode(name).decode(): _placement(json.loads(text))
            for name, text in recorded.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, binascii.Error):
        return {}


def _placement(sharding: Json) -> str:
    if sharding.get("sharding_type") != "NamedSharding":
        return str(sharding.get("device_str", sharding.get("sharding_type")))
    axes = zip(sharding["axis_names"], sharding["shape"], strict=True)
    mesh = ", ".join(f"{name}={size}" for name, size in axes)
    spec = ", ".join(
        "+".join(part) if isinstance(part, list) else str(part or "-")
        for part in sharding["partition_spec"]
    )
    return f"({spec}) on {mesh}"
