"""A step as a whole: what lies beside its trees, and whether somebody deletes it meanwhile."""

import contextlib
import time
from collections.abc import Iterator

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.storage.files import beside, checksum_files, item_files
from gockpt_jax.storage.files.checksum_files import ChecksumError
from gockpt_jax.storage.inspecting.directory import Step
from gockpt_jax.storage.inspecting.verdict import Verdict
from gockpt_jax.storage.inspecting.verify_files import compare

_DELETING_SECS = 1.0
"""Of a step that is being deleted, something goes within that time."""
_DELETING_TRIES = 10
"""To count what is left of it, while it goes."""


def verify_step(step: Step) -> Verdict:
    """Verifies a step's metadata, and those of its items that are no trees.

    By what its trees know of them; a checkpoint that was written before they knew is `unchecked`.
    """
    faults, notes = list(step.faults), []
    if step.metadata:
        faults += _what_orbax_says(step.path)
    if not step.trees:
        faults.append("it holds no tree of arrays")
    known: list[beside.Beside] = []
    for tree, one in _known_by(step):
        changed = _changed(one, step)
        if beside.BEGUN in changed:  # then it knows of that step
            told = f"is of another save than this step, as its `{item_files.STEP_METADATA}` says"
            faults.append(f"the item `{tree}` {told}")
        else:
            known.append(one)
            what = f"`{item_files.STEP_METADATA}` is damaged"
            faults += [f"{what}: its `{key}` has changed" for key in changed]
    for name in sorted(step.items.keys() - set(step.trees)):
        lists = [one.items[name] for one in known if name in one.items]
        faults += [x for files in lists for x in compare(step.items[name], files, f"{name}/")]
        if not lists:
            notes.append(f"the item `{name}` has no checksums")
    return Verdict(str(step.path), tuple(dict.fromkeys(faults)), tuple(notes))


def _what_orbax_says(step: epath.Path) -> list[str]:
    """Of metadata that it cannot read; then no manager can be made in the directory."""
    try:
        _ = ocp.path.step.Metadata(step=0, path=step).commit_timestamp_nsecs  # reads all of it
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return [f"`{item_files.STEP_METADATA}` is damaged: {error}"]
    return []


def _known_by(step: Step) -> Iterator[tuple[str, beside.Beside]]:
    for name in step.trees:
        with contextlib.suppress(OSError, ChecksumError):  # it is told of the tree
            yield name, checksum_files.read_item(step.items[name]).beside


def _changed(known: beside.Beside, step: Step) -> list[str]:
    """Keys of a step's metadata, where there is any, that are not as a tree has known them."""
    if not step.metadata:
        return []
    made = beside.metadata_digests(step.metadata)
    return [key for key, digest in known.metadata.items() if made.get(key) != digest]


def was_deleted(step: epath.Path, verdict: Verdict) -> bool:
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
