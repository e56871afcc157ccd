"""The files of an item: their names and sizes, and the digests of those that hold no chunks."""

import concurrent.futures
import os
import pathlib
from collections.abc import Iterator, Sequence

import xxhash
from etils import epath

from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.files.syncs import Syncs

FOLDER = "_gockpt_checksums"
ITEM_FILE = f"{FOLDER}/item.json"

STEP_METADATA = "_CHECKPOINT_METADATA"
TEMPORARY = ".orbax-checkpoint-tmp"
"""In the names of directories that Orbax has not renamed yet: their saves are not committed."""

# Orbax writes these into the item itself, after its commit, where the item is no part of a step.
LATER_FILES = frozenset({STEP_METADATA, bucket.MARKER})
# Files in the folders of leaves, and of OCDBT's databases, that hold no chunks.
_SMALL_FILES = frozenset({".zarray", ".zattrs", "zarr.json", "manifest.ocdbt"})
_SMALL_FOLDERS = frozenset({"", "array_metadatas", FOLDER})
_READ_THREADS = 16  # of small files, of which a bucket takes its time for each


def file_digests(item: epath.Path, names: Sequence[str]) -> dict[str, str]:
    """The digests of small files, by their names."""
    folder = item.as_posix()
    if not bucket.is_bucket(folder):  # `epath` takes longer
        return {name: _digest_of(pathlib.Path(f"{folder}/{name}")) for name in names}
    with concurrent.futures.ThreadPoolExecutor(_READ_THREADS) as pool:
        return dict(zip(names, pool.map(_digest_of, [item / n for n in names]), strict=True))


def _digest_of(file: epath.Path | pathlib.Path) -> str:
    return str(xxhash.xxh3_128_hexdigest(file.read_bytes()))


def sync_small(item: epath.Path) -> None:
    """Makes durable what lies beside the arrays, and what Orbax leaves to the system when it does.

    Raises:
      OSError: A file could not be written after all.
    """
    if bucket.is_bucket(item.as_posix()):
        return
    syncs = Syncs()
    try:
        for folder in sorted(_SMALL_FOLDERS):
            path = f"{item.as_posix()}/{folder}".rstrip("/")
            for name, nbytes in _entries(path) if os.path.isdir(path) else ():
                if nbytes is not None:
                    syncs.add(os.open(f"{path}/{name}", os.O_RDONLY), f"{path}/{name}")
        syncs.finish()
    finally:
        syncs.close()


def files_of(item: epath.Path, below: str = "") -> Iterator[tuple[str, int]]:
    """Names all files of an item, relative to it, with their sizes in bytes."""
    for entry, nbytes in sorted(_entries(f"{item.as_posix()}/{below}")):
        name = f"{below}{entry}"
        if nbytes is None:
            yield from files_of(item, f"{name}/")
        elif name not in LATER_FILES and name != ITEM_FILE:
            yield name, nbytes


def _entries(folder: str) -> Iterator[tuple[str, int | None]]:
    """Names in a folder, with the sizes of files; None for folders."""
    if bucket.is_bucket(folder):
        for path in epath.Path(folder).iterdir():
            yield path.name, None if path.is_dir() else path.stat().length
        return
    with os.scandir(folder) as entries:  # `epath` takes ten times as long
        for entry in entries:
            yield entry.name, _size(entry)


def _size(entry: os.DirEntry[str]) -> int | None:
    """In bytes; of a link that leads nowhere, its own. `None` for a folder."""
    try:
        return None if entry.is_dir() else entry.stat().st_size
    except OSError:
        return entry.stat(follow_symlinks=False).st_size


def holds_chunks(name: str) -> bool:
    """Whether a file's content is chunks, which have digests of their own."""
    folders, _, file = name.rpartition("/")
    return folders not in _SMALL_FOLDERS and file not in _SMALL_FILES
