"""Where the values of an OCDBT database lie: TensorStore's format, and stock Orbax's layout.

Such a database is an index (a manifest, and the nodes of a B+tree) and data files, in which values
follow one another, just as they are. Who knows their extents can read and write them without
TensorStore, which does both through the page cache. `ts.ocdbt.dump` tells them.
"""

import dataclasses
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorstore as ts


@dataclasses.dataclass(frozen=True)
class Extent:
    """Where the bytes of a value lie.

    Attributes:
      path: Of the file.
      offset: Of their first one in it.
      nbytes: How many they are; 0 where that is not said.
    """

    path: str
    offset: int = 0
    nbytes: int = 0

    def is_before(self, other: "Extent") -> bool:
        """Whether another one begins where this one ends."""
        return self.path == other.path and self.offset + self.nbytes == other.offset


Extents = Callable[[str], Extent]
"""Where an array's values lie, by their keys: a chunk's, or `.zarray`."""


def files_in(folder: str) -> Extents:
    """Where values lie that are files of a folder."""
    return lambda key: Extent(f"{folder}/{key}")


Values = Mapping[str, Extent | bytes]
"""By key: where a value lies; or the value, where it is in the index itself."""


def values_of(files: ts.KvStore, folder: str = "") -> Values:
    """Looks up the values of a database.

    Args:
      files: The store of its files.
      folder: What the paths of extents begin with.

    Returns:
      All of them: nothing where there is no database, or it is none that we can read.

    Example:
      >>> store = ts.KvStore.open({"driver": "ocdbt", "base": "memory://"}).result()
      >>> store["w/.zarray"], store["w/0"] = b"{}", bytes(4096)
      >>> values = values_of(store.base, "run/")
      >>> values["w/.zarray"], values["w/0"].nbytes, values["w/0"].path[:6]
      (b'{}', 4096, 'run/d/')
    """
    try:
        manifest: Any = ts.ocdbt.dump(files).result()
        root = manifest["versions"][-1]["root"]
        return dict(_below(files, root["location"], b"", folder))
    except (ValueError, KeyError, IndexError):
        return {}


def values_by_array(folder: str) -> Mapping[str, Values]:
    """Looks up the values of the database in a local folder: by array, and by key in it."""
    files = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    found: dict[str, dict[str, Extent | bytes]] = {}
    for name, value in values_of(files, f"{folder}/").items():
        array, _, key = name.rpartition("/")
        found.setdefault(array, {})[key] = value
    return found


def _below(
    files: ts.KvStore, node: str, prefix: bytes, folder: str
) -> Iterator[tuple[str, Extent | bytes]]:
    """The values below a node of the tree, whose keys lack a prefix."""
    for entry in ts.ocdbt.dump(files, node).result()["entries"]:
        if (below := entry.get("location")) is not None:
            yield from _below(files, below, prefix + entry["subtree_common_prefix"], folder)
            continue
        key = (prefix + entry["key"]).decode(errors="surrogateescape")
        inline = entry.get("inline_value")
        yield key, _extent(entry["indirect_value"], folder) if inline is None else inline


def _extent(reference: str, folder: str) -> Extent:
    """Parses "value:<database that was merged into this one>:<file of it>:<offset>:<length>"."""
    _, database, file, offset, nbytes = reference.split(":")
    return Extent(folder + urllib.parse.unquote(database + file), int(offset), int(nbytes))
