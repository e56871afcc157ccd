"""Re-reads a checkpoint and compares every chunk with the checksum made before it was written.

Fails closed: what is missing, foreign, damaged or of an unknown version is a fault. A bounded
number of bytes is read at a time: chunks that are their values and nothing else past TensorStore,
all others through it, which decompresses them.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from etils import epath

from gockpt_jax.errors import VerifyError
from gockpt_jax.storage.files import beside, checksum_files, item_files
from gockpt_jax.storage.files.checksum_files import ChecksumError, ItemFile, LeafChecksums
from gockpt_jax.storage.files.plain_reads import PlainReads
from gockpt_jax.storage.inspecting.directory import Step, look_into
from gockpt_jax.storage.inspecting.stored_item import (
    READ_LIMIT_BYTES,
    READ_THREADS,
    StoredItem,
    StoredItemError,
    for_each,
)
from gockpt_jax.storage.inspecting.verify_chunks import Read, check, open_leaf, reads_of

_log = logging.getLogger("gockpt_jax")

_DELETING_SECS = 1.0
"""Of a step that is being deleted, something goes within that time."""
_DELETING_TRIES = 10
"""To count what is left of it, while it goes."""

_UNKNOWN = ItemFile({}, [0], False, beside.Beside({}, {}), False)

State = Literal["whole", "damaged", "unchecked"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found in one item (or one step, for what lies beside its items).

    Attributes:
      path: The directory.
      state: `whole`: everything is as it was before it was written. `damaged`: see `faults`.
        `unchecked`: nothing is known to be wrong, but not everything has a checksum.
      faults: One line each; every one of them names a file, a leaf or a box.
      notes: What has no checksum, and why.
      chunks: Chunks that were read and digested.
      nbytes: Their bytes, before compression.
    """

    path: str
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    chunks: int = 0
    nbytes: int = 0

    @property
    def state(self) -> State:
        """See above."""
        if self.faults:
            return "damaged"
        return "unchecked" if self.notes else "whole"

    def require_whole(self) -> None:
        """Raises `error` unless the item is whole."""
        if self.state != "whole":
            raise self.error()

    def error(self) -> VerifyError:
        """What to raise where it is not whole: names all faults."""
        lines = "".join(f"\n  {line}" for line in self.faults or self.notes)
        return VerifyError(
            f"{self.path} is {self.state}:{lines}\nRestore another step, or from a copy."
        )


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
        raise VerifyError(f"{path} holds no checkpoint: found {found.describe()}.")
    for step in found.steps[-1:] if newest else found.steps:
        verdicts = [] if found.kind == "item" else [verify_step(step)]
        items = (step.items[name] for name in step.trees)
        of_items = (verify_item(i, limit_bytes=limit_bytes, threads=threads) for i in items)
        for verdict in itertools.chain(verdicts, of_items):
            if found.kind == "root" and _was_deleted(step.path, verdict):
                _log.warning("%s was deleted while it was verified", step.path)
                if newest:
                    yield from verify(path, newest=True, limit_bytes=limit_bytes, threads=threads)
                break
            yield verdict


def _was_deleted(step: epath.Path, verdict: Verdict) -> bool:
    """Whether a step is not whole because somebody deletes it, as retention does."""
    before, now = -1, 0
    while verdict.state == "damaged" and (now := _count_files(step)) not in (0, before):
        before = now
        time.sleep(_DELETING_SECS)
    return verdict.state != "whole" and not step.exists()


def _count_files(step: epath.Path) -> int:
    for _ in range(_DELETING_TRIES):
        with contextlib.suppress(OSError):  # a folder has gone meanwhile, or all of it
            return sum(1 for _ in item_files.files_of(step))
    return 0


def verify_step(step: Step) -> Verdict:
    """Verifies a step's metadata, and those of its items that are no trees.

    By what its trees know of them; a checkpoint that was written before they knew is `unchecked`.
    """
    faults, notes = list(step.faults), []
    if not step.trees:
        faults.append("it holds no tree of arrays")
    known = beside.Beside.together(_known_by(step))
    made = beside.metadata_digests(step.metadata)
    faults += [
        f"`{item_files.STEP_METADATA}` is damaged: its `{key}` has changed"
        for key, digest in known.metadata.items()
        if step.metadata and made.get(key) != digest
    ]
    for name in sorted(step.items.keys() - set(step.trees)):
        if name in known.items:
            faults += _compare(step.items[name], known.items[name], f"{name}/")
        else:
            notes.append(f"the item `{name}` has no checksums")
    return Verdict(str(step.path), tuple(faults), tuple(notes))


def _known_by(step: Step) -> Iterator[beside.Beside]:
    for name in step.trees:
        with contextlib.suppress(OSError, ChecksumError):  # it is told of the tree
            yield checksum_files.read_item(step.items[name]).beside


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
    stores = for_each(((1, name) for name in names), open_one, threads=threads)
    faults: list[str] = []
    jobs: list[Read] = []
    for name, store in zip(names, stores, strict=True):
        found, of_leaf = reads_of(item, name, leaves[name], store, is_part=is_part)
        faults += found
        jobs += of_leaf
    return faults, jobs


def _read(jobs: Sequence[Read], limit_bytes: int, threads: int) -> list[str]:
    """Reads what is to be read, and says what is wrong with it."""
    sized = ((job.held_bytes, job) for job in jobs)
    with contextlib.closing(PlainReads(past_cache=True)) as reads:
        work = functools.partial(check, reads)
        found = for_each(sized, work, limit_bytes=limit_bytes, threads=threads)
        return list(itertools.chain.from_iterable(found))


def check_files(item: epath.Path) -> tuple[list[str], ItemFile]:
    """Compares the item's files with the list made at its commit; returns what that says, too.

    Reads the small ones. Of those that hold chunks only the sizes are compared.
    """
    try:
        listed = checksum_files.read_item(item)
    except FileNotFoundError:
        return [f"`{item_files.ITEM_FILE}` is missing"], _UNKNOWN
    except OSError as error:
        return [f"`{item_files.ITEM_FILE}` cannot be read: {error}"], _UNKNOWN
    except ChecksumError as error:
        return [str(error)], _UNKNOWN
    if listed.is_intact:
        return _compare(item, listed.files), listed
    return [f"`{item_files.ITEM_FILE}` is damaged: it does not have its own digest"], listed


def _compare(
    item: epath.Path, listed: Mapping[str, tuple[int, str | None]], below: str = ""
) -> list[str]:
    """What has become of an item's files; `below` stands before their names."""
    sizes = dict(item_files.files_of(item))
    faults = [f"`{below}{name}` is missing" for name in sorted(listed.keys() - sizes.keys())]
    faults += [
        f"`{below}{name}` is foreign: it was not there when the checkpoint was committed"
        for name in sorted(sizes.keys() - listed.keys())
    ]
    of_size = []
    for name in sorted(listed.keys() & sizes.keys()):
        if sizes[name] == listed[name][0]:
            of_size.append(name)
        else:
            had = f"{sizes[name]} bytes, {listed[name][0]} were written"
            faults.append(f"`{below}{name}` has {had}")
    small = [name for name in of_size if listed[name][1]]
    for name, digest in zip(small, _digests(item, small), strict=True):
        if isinstance(digest, OSError):
            faults.append(f"`{below}{name}` cannot be read: {digest}")
        elif digest != listed[name][1]:
            faults.append(f"`{below}{name}` is damaged: its content has changed")
    return faults


def _digests(item: epath.Path, names: Sequence[str]) -> Sequence[str | OSError]:
    """Of small files; where one cannot be read, of each alone."""
    try:
        return item_files.file_digests(item, names)
    except OSError as error:
        if len(names) == 1:
            return [error]
        return [digest for name in names for digest in _digests(item, [name])]


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
