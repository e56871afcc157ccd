"""Compares checkpoints with stock Orbax only: nothing here knows how they were written."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """How far one leaf is from the reference."""

    name: str
    differing: int
    elements: int
    relative: float  # Largest absolute difference over the largest absolute value of the leaf.


def saved_labels(checkpoints: Path) -> list[int]:
    """Return the labels of the committed checkpoints, oldest first."""
    return sorted(ocp.utils.checkpoint_steps(checkpoints))


def restore_as_numpy(checkpoints: Path, label: int) -> Any:
    """Restore a whole checkpoint into host arrays, whatever devices wrote it."""
    # The one item of a checkpoint is the folder that holds a tree's metadata.
    (metadata_file,) = (checkpoints / str(label)).glob("*/_METADATA")
    name = metadata_file.parent.name
    handlers = {name: ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(checkpoints, item_handlers=handlers) as manager:
        tree = manager.item_metadata(label)[name].tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        item = ocp.args.PyTreeRestore(restore_args=as_numpy)
        return manager.restore(label, args=ocp.args.Composite(**{name: item}))[name]


def named_leaves(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves by their path in the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def compare_leaf(name: str, expected: np.ndarray, got: np.ndarray) -> LeafDifference:
    """Compare bits first, so that NaNs and signed zeros count; then say how far apart."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        raise ValueError(
            f"`{name}`: expected {expected.dtype}{list(expected.shape)}, "
            f"got {got.dtype}{list(got.shape)}"
        )
    raw = np.dtype(f"V{expected.dtype.itemsize}")
    differing = int((np.atleast_1d(expected).view(raw) != np.atleast_1d(got).view(raw)).sum())
    if not differing:
        return LeafDifference(name, 0, expected.size, 0.0)
    distance = np.abs(expected.astype(np.float64) - got.astype(np.float64)).max()
    scale = np.abs(expected.astype(np.float64)).max() or 1.0
    # A NaN on either side must not pass any later `<=`.
    relative = float(distance / scale) if np.isfinite(distance) else float("inf")
    return LeafDifference(name, differing, expected.size, relative)


def compare_checkpoints(expected: Path, got: Path, label: int) -> list[LeafDifference]:
    """Compare every leaf that two runs saved under the same label."""
    left = named_leaves(restore_as_numpy(expected, label))
    right = named_leaves(restore_as_numpy(got, label))
    if left.keys() != right.keys():
        raise ValueError(
            f"checkpoint {label}: these leaves are in one run only: "
            + ", ".join(f"`{name}`" for name in sorted(left.keys() ^ right.keys()))
        )
    return [compare_leaf(name, left[name], right[name]) for name in left]
