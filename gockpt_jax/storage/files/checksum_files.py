"""The files in which an item keeps its checksums: what they say, and how they are read.

An item of a checkpoint holds, beside what stock Orbax wrote:

    _gockpt_checksums/process_N.json   of each process: leaf, box, dtype and digest of its chunks
    _gockpt_checksums/item.json        of the primary one, before the commit: every file of the
                                       item with its size; the digest of those that are not data,
                                       and of what lies beside the item in its step

Stock never looks into this folder.
"""

import dataclasses
import json
import operator
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import xxhash
from etils import epath

from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.files.beside import Beside, what_lies_beside
from gockpt_jax.storage.files.grid import Box
from gockpt_jax.storage.files.item_files import (
    FOLDER,
    ITEM_FILE,
    file_digests,
    files_of,
    holds_chunks,
    sync_small,
)

VERSION = 1
ALGORITHM = "xxh3_128"
_FORMAT = "gockpt_jax checksums"

Json = dict[str, Any]


class ChecksumError(ValueError):
    """The checksums of a checkpoint are damaged or of a version that is not known."""


@dataclasses.dataclass(frozen=True)
class Checksum:
    """That of one chunk: a box of a leaf.

    Attributes:
      start: Its first index in each dimension.
      stop: The index after its last one.
      digest: Hexadecimal, of the values in C order.
      process: Who wrote it.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    digest: str
    process: int = 0

    @property
    def box(self) -> Box:
        """The chunk as an index of the leaf."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


class ItemFile(NamedTuple):
    """What `item.json` says.

    Attributes:
      files: Size and digest of every file of the item; no digest of those that hold chunks.
      processes: Those that wrote chunks.
      is_intact: Whether it has its own digest.
      beside: What it knows of its step.
      is_part: Whether other processes have the rest, in storage of their own.
    """

    files: Mapping[str, tuple[int, str | None]]
    processes: list[int]
    is_intact: bool
    beside: Beside
    is_part: bool


class LeafChecksums(NamedTuple):
    """What is known of a leaf: the dtype it is stored with, and the checksums of its chunks."""

    dtype: str
    chunks: list[Checksum]


class ProcessFile(NamedTuple):
    """What `process_N.json` says.

    Attributes:
      process: Who wrote it.
      leaves: What it wrote, by parameter name.
    """

    process: int
    leaves: Mapping[str, LeafChecksums]


def process_file(index: int) -> str:
    """A process's file, within the item."""
    return f"{FOLDER}/process_{index}.json"


def write_process(item: Any, leaves: Json) -> None:
    """Writes this process's file into an item.

    Args:
      item: The item's directory, which is not visible yet.
      leaves: By parameter name their `dtype`, and `chunks`: start, stop and digest of each.
    """
    item, index = epath.Path(item), jax.process_index()
    content = {
        "format": _FORMAT,
        "version": VERSION,
        "algorithm": ALGORITHM,
        "process_index": index,
        "process_count": jax.process_count(),
        "leaves": leaves,
    }
    # The item itself is made by nobody but Orbax: where somebody has removed it, the save fails.
    (item / FOLDER).mkdir(parents=bucket.is_bucket(item), exist_ok=True)
    (item / process_file(index)).write_text(json.dumps(content))


def write_item_file(item: Any, sharing: Collection[int] | None) -> None:
    """Writes `item.json`, when everything else of the item is there: just before its commit.

    Args:
      item: The item's directory; one without checksums is left as it is.
      sharing: The processes that write into this directory; `None`: this one alone, and others
        have the rest, in storage of their own.

    Raises:
      RuntimeError: The checksums of a process are not there, so its chunks may not be either.
    """
    item = epath.Path(item)
    if not (item / FOLDER).exists():
        return
    processes = sorted({jax.process_index()} if sharing is None else sharing)
    missing = [n for n in processes if not (item / process_file(n)).exists()]
    if missing:
        raise RuntimeError(
            f"{item}: processes {missing} of {len(processes)} have left no checksums. The save"
            " fails; do all processes write into the same file system?"
        )
    sizes = dict(files_of(item))
    small = [name for name in sizes if not holds_chunks(name)]
    digests = file_digests(item, small)
    files = {name: [length, digests.get(name)] for name, length in sizes.items()}
    content = {
        "format": _FORMAT,
        "version": VERSION,
        "processes": processes,
        "is_part": sharing is None and jax.process_count() > 1,
        "files": files,
        "beside": what_lies_beside(item)._asdict(),
    }
    content["digest"] = self_digest(content)
    (item / ITEM_FILE).write_text(json.dumps(content))
    sync_small(item)


def self_digest(content: Mapping[str, Any]) -> str:
    """The digest of `item.json`'s content, without the entry that holds it."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return str(xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode()))


def read_item(item: epath.Path) -> ItemFile:
    """Reads an item's own file.

    Raises:
      FileNotFoundError: There is none.
      ChecksumError: It is damaged, or of another version.
    """
    content = _read(item, ITEM_FILE)
    try:
        files = {
            name: (operator.index(size), made) for name, (size, made) in content["files"].items()
        }
        is_intact = self_digest(content) == content["digest"]
        beside = Beside.of(content.get("beside", {}))
        is_part = bool(content.get("is_part"))
        return ItemFile(files, list(content["processes"]), is_intact, beside, is_part)
    except _MALFORMED as error:
        raise ChecksumError(f"`{ITEM_FILE}` is damaged: {error!r}") from error


def read_process(item: epath.Path, index: int) -> ProcessFile:
    """Reads a process's file.

    Raises:
      FileNotFoundError: There is none.
      ChecksumError: It is damaged, or of another version.
    """
    content = _read(item, process_file(index))
    try:
        process = content["process_index"]
        leaves = {
            name: LeafChecksums(
                leaf["dtype"],
                [_checksum(start, stop, made, process) for start, stop, made in leaf["chunks"]],
            )
            for name, leaf in content["leaves"].items()
        }
        return ProcessFile(process, leaves)
    except _MALFORMED as error:
        raise ChecksumError(f"`{process_file(index)}` is damaged: {error!r}") from error


def _checksum(start: Any, stop: Any, made: Any, process: Any) -> Checksum:
    first, end = (tuple(operator.index(bound) for bound in corner) for corner in (start, stop))
    return Checksum(first, end, made, process)


_MALFORMED = (ValueError, TypeError, KeyError, AttributeError)


def _read(item: epath.Path, name: str) -> Json:
    text = (item / name).read_bytes()
    try:
        content = json.loads(text)
        found = (content["format"], content["version"])
    except _MALFORMED as error:
        raise ChecksumError(f"`{name}` is damaged: {error!r}") from error
    if found[0] != _FORMAT:
        raise ChecksumError(f"`{name}` is damaged: expected the format {_FORMAT!r}.")
    if found[1] != VERSION or content.get("algorithm", ALGORITHM) != ALGORITHM:
        raise ChecksumError(
            f"`{name}` has version {found[1]} and algorithm {content.get('algorithm')}; this"
            f" gockpt_jax reads version {VERSION} and {ALGORITHM}. Install the one that wrote it."
        )
    return dict(content)
