"""What is known of stored arrays without reading them: their shapes and dtypes."""

import dataclasses
import functools
from collections.abc import Mapping

from etils import epath

from gockpt_jax.storage.files import checksum_files
from gockpt_jax.storage.inspecting.stored_item import StoredItem, for_each


@dataclasses.dataclass(frozen=True)
class Stored:
    """What is known of a stored array without reading it."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def known_arrays(item: epath.Path) -> dict[str, Stored]:
    """What the checksums of an item tell of its arrays; nothing where there are none, or not all.

    One file per process instead of one read per array; a restore reads them once.
    """
    known: dict[str, Stored] = {}
    try:
        listed = checksum_files.read_item(item)
        processes = () if listed.is_part else listed.processes
        read = functools.partial(checksum_files.read_process, item)
        for file in for_each(processes, read):
            for name, (dtype, chunks) in file.leaves.items():
                corners = [chunk.stop for chunk in chunks]
                if name in known:
                    corners.append(known[name].shape)
                known[name] = Stored(tuple(map(max, zip(*corners, strict=True))), dtype)
    except (OSError, ValueError, TypeError, KeyError):  # none, or damaged
        return {}
    return known


def all_arrays(item: StoredItem, known: Mapping[str, Stored]) -> Mapping[str, Stored]:
    """What an item's arrays are: as it is known, or else from the metadata of each of them."""
    if known.keys() == item.arrays.keys():
        return known

    def look(name: str) -> tuple[str, Stored]:
        store = item.open(name)
        return name, Stored(tuple(store.shape), store.dtype.numpy_dtype.name)

    return dict(for_each(item.arrays, look))
