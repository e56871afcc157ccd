"""What lies beside an item in its step: the items of other handlers, and the step's metadata.

An item's `item.json` keeps their digests too, so that `verify` knows of a step what it knows of a
tree. They are made on the primary process when every process has written its part of all items,
which is before the first of them is committed.
"""

import contextlib
import json
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import xxhash
from etils import epath

from gockpt_jax.storage.files.item_files import STEP_METADATA, TEMPORARY, file_digests, files_of

Json = dict[str, Any]

# Their files are what they will be before any item is finalized; of the user's own nobody knows.
_WRITTEN_BY_THEN = frozenset(
    {
        ("orbax", "JsonCheckpointHandler"),
        ("orbax", "ProtoCheckpointHandler"),
        ("grain", "CheckpointHandler"),  # of data iterators
    }
)
BEGUN = "init_timestamp_nsecs"
"""When the step was begun: no other step has the same."""
# Orbax adds the time of the commit to the others.
_OF_METADATA = ("custom_metadata", "item_handlers", BEGUN)


class Beside(NamedTuple):
    """What an item knows of its step.

    Attributes:
      items: Of other items, by name: size and digest of each file.
      metadata: Digests of parts of the step's metadata, by their key in it.
    """

    items: Mapping[str, Mapping[str, tuple[int, str]]]
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, content: Json) -> "Beside":
        """From what `item.json` says."""
        items = {
            name: {file: (size, made) for file, (size, made) in files.items()}
            for name, files in content.get("items", {}).items()
        }
        return cls(items, dict(content.get("metadata", {})))


def what_lies_beside(item: epath.Path) -> Beside:
    """Looks around in the step, if the item is part of one.

    Args:
      item: Its directory, which is not visible yet.
    """
    step, metadata, handlers = item.parent, {}, None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be no step
        metadata = json.loads((step / STEP_METADATA).read_text())
        handlers = metadata.get("item_handlers")
    if not isinstance(handlers, Mapping) or _final_name(item, handlers) not in handlers:
        return Beside({}, {})
    folders = {_final_name(path, handlers): path for path in step.iterdir()}
    items = {}
    for name, handler in handlers.items():
        package, *_, kind = str(handler).split(".")
        if (package, kind) in _WRITTEN_BY_THEN and name in folders:
            sizes = dict(files_of(folders[name]))
            digests = file_digests(folders[name], list(sizes))
            items[name] = {file: (size, digests[file]) for file, size in sizes.items()}
    return Beside(items, metadata_digests(metadata))


def metadata_digests(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Of those parts of a step's metadata that are final before its commit."""
    return {
        key: str(xxhash.xxh3_128_hexdigest(json.dumps(metadata[key], sort_keys=True).encode()))
        for key in _OF_METADATA
        if key in metadata
    }


def _final_name(path: epath.Path, items: Container[str]) -> str:
    name = str(path.name)
    return name if name in items else name.rpartition(TEMPORARY)[0]
