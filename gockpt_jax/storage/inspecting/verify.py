"""Re-reads a checkpoint and compares every chunk with the checksum made before it was written.

Fails closed: what is missing, foreign, damaged or of an unknown version is a fault. A bounded
number of bytes is read at a time: chunks that are their values and nothing else past TensorStore,
all others through it, which decompresses them.
"""

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from gockpt_jax.errors import VerifyError
from gockpt_jax.storage.files import checksum_files, item_files
from gockpt_jax.storage.files.checksum_files import ChecksumError, LeafChecksums
from gockpt_jax.storage.files.plain_reads import PlainReads
from gockpt_jax.storage.inspecting.directory import look_into, no_checkpoint
from gockpt_jax.storage.inspecting.stored_item import (
    READ_LIMIT_BYTES,
    READ_THREADS,
    StoredItem,
    StoredItemError,
    for_each,
)
from gockpt_jax.storage.inspecting.verdict import Verdict
from gockpt_jax.storage.inspecting.verify_chunks import Read, check, open_leaf, reads_of
from gockpt_jax.storage.inspecting.verify_files import check_files
from gockpt_jax.storage.inspecting.verify_step import verify_step, was_deleted

_log = logging.getLogger("gockpt_jax")


def verify(
    path: Any,
    *,
    newest: bool = False,
    limit_bytes: int = READ_LIMIT_BYTES,
    threads: int = READ_THREADS,
) -> Iterator[Verdict]:
    """Verifies all checkpoints in a directory, and yields what was found as it goes.

    A job may save there meanwhile: a step that it deletes is left out, and logged.

    Args:
      path: A manager's directory, one step, or one item.
      newest: Only the newest step.
      limit_bytes: As in `verify_item`.
      threads: As in `verify_item`.

    Raises:
      FileNotFoundError: There is no such directory.
      VerifyError: It holds no checkpoint.
    """
    found = look_into(path)
    if not found.steps:
        raise VerifyError(no_checkpoint(path, found))
    for step in found.steps[-1:] if newest else found.steps:
        verdicts = [] if found.kind == "item" else [verify_step(step)]
        items = (step.items[name] for name in step.trees)
        of_items = (verify_item(i, limit_bytes=limit_bytes, threads=threads) for i in items)
        for verdict in itertools.chain(verdicts, of_items):
            if found.kind == "root" and was_deleted(step.path, verdict):
                _log.warning("%s was deleted while it was verified", step.path)
                if newest:
                    yield from verify(path, newest=True, limit_bytes=limit_bytes, threads=threads)
                break
            yield verdict


def verify_item(
    path: Any,
    *,
    limit_bytes: int = READ_LIMIT_BYTES,
    threads: int = READ_THREADS,
    share: tuple[int, int] = (0, 1),
) -> Verdict:
    """Verifies one item of a checkpoint.

    Args:
      path: The item's directory: the one with `_METADATA`.
      limit_bytes: The most bytes of values that are read at one time. TensorStore decompresses
        beside it; a chunk larger than this is read alone.
      threads: The most reads at one time.
      share: (i, n): read only every n-th chunk from the i-th on; the rest is for other processes,
        unless they have storage of their own.
    """
    path = epath.Path(path)
    if not (path / item_files.FOLDER).exists():
        note = "it has no checksums (not written by gockpt_jax, or by a version before they came)"
        return Verdict(str(path), notes=(note,))
    faults, listed = check_files(path)
    found, leaves = _read_processes(path, listed.processes)
    faults += found
    try:
        item = StoredItem(path)
    except StoredItemError as error:
        return Verdict(str(path), (*faults, str(error)))
    found, notes = _check_leaves(item, leaves, is_part=listed.is_part)
    faults += found
    found, jobs = _plan(item, leaves, threads, is_part=listed.is_part)
    faults += found
    mine = jobs if listed.is_part else jobs[share[0] :: share[1]]
    faults += _read(mine, limit_bytes, threads)
    nbytes = sum(job.nbytes for job in mine)
    return Verdict(str(path), tuple(faults), tuple(notes), len(mine), nbytes)


def _plan(
    item: StoredItem, leaves: Mapping[str, LeafChecksums], threads: int, *, is_part: bool
) -> tuple[list[str], list[Read]]:
    """What is to be read of the leaves, and what is wrong with them before anything is.

    They are opened side by side: in a bucket each takes a way there and back.
    """
    names = sorted(leaves.keys() & item.leaves.keys())
    open_one = functools.partial(open_leaf, item)
    stores = for_each(names, open_one, threads=threads)
    faults: list[str] = []
    jobs: list[Read] = []
    for name, store in zip(names, stores, strict=True):
        found, of_leaf = reads_of(item, name, leaves[name], store, is_part=is_part)
        faults += found
        jobs += of_leaf
    return faults, jobs


def _read(jobs: Sequence[Read], limit_bytes: int, threads: int) -> list[str]:
    """Reads what is to be read, and says what is wrong with it."""
    with contextlib.closing(PlainReads(past_cache=True)) as reads:
        work = functools.partial(check, reads)
        found = for_each(
            jobs, work, nbytes=lambda job: job.held_bytes, limit_bytes=limit_bytes, threads=threads
        )
        return list(itertools.chain.from_iterable(found))


def _read_processes(
    item: epath.Path, processes: Sequence[int]
) -> tuple[list[str], dict[str, LeafChecksums]]:
    """Reads the files of all processes; a leaf's chunks may come from several."""
    faults: list[str] = []
    leaves: dict[str, LeafChecksums] = {}
    for process in processes:
        where = checksum_files.process_file(process)
        try:
            found = checksum_files.read_process(item, process)
        except FileNotFoundError:
            faults.append(f"process {process} is missing: there is no `{where}`")
            continue
        except OSError as error:
            faults.append(f"`{where}` cannot be read: {error}")
            continue
        except ChecksumError as error:
            faults.append(str(error))
            continue
        if found.process != process:
            faults.append(f"`{where}` is foreign: process {found.process} wrote it")
        for name, (dtype, chunks) in found.leaves.items():
            leaf = leaves.setdefault(name, LeafChecksums(dtype, []))
            leaf.chunks.extend(chunks)
            if leaf.dtype != dtype:
                faults.append(f"`{name}`: the processes disagree on its dtype")
    return faults, leaves


def _check_leaves(
    item: StoredItem, leaves: Mapping[str, LeafChecksums], *, is_part: bool
) -> tuple[list[str], list[str]]:
    """The leaves with checksums are the tree's leaves; those of unknown types are noted.

    All of them, unless other processes have the rest of the item.
    """
    faults = [
        f"`{name}` was written but is not in the tree's `_METADATA`"
        for name in sorted(leaves.keys() - item.leaves.keys())
    ]
    notes = []
    for name in sorted(item.leaves.keys() - leaves.keys()):
        leaf = item.leaves[name]
        if leaf.is_array and not is_part:
            faults.append(f"`{name}` has no checksums, so it was not written with this checkpoint")
        elif leaf.has_data and not leaf.is_array and leaf.value_type != "string":
            notes.append(f"`{name}` has no checksums: it is a `{leaf.value_type}`")
    return faults, notes
