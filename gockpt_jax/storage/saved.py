"""What a saved checkpoint holds, from its metadata alone: no array is read."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

_METADATA = "_METADATA"  # the file that Orbax writes beside a tree


@dataclasses.dataclass(frozen=True, slots=True)
class SavedLeaf:
    """An array of a checkpoint.

    Attributes:
      path: Keys from the root of the tree.
      elements: Number of elements.
      itemsize: Bytes of one.
    """

    path: tuple[str, ...]
    elements: int
    itemsize: int


def saved_leaves(path: str | Path) -> list[SavedLeaf]:
    """The arrays of a checkpoint that Orbax or gockpt_jax has written.

    Args:
      path: A tree's directory, a step's with one tree in it, or a manager's (the newest step then).

    Raises:
      FileNotFoundError: if no tree is there.
      ValueError: if a step holds several trees.
    """
    tree = _tree_directory(Path(path).resolve())
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(tree)
    metadata = getattr(metadata, "item_metadata", metadata)
    metadata = getattr(metadata, "tree", metadata)
    flat, _ = jax.tree.flatten_with_path(metadata, is_leaf=lambda x: hasattr(x, "dtype"))
    return [
        SavedLeaf(
            tuple(str(_key(k)) for k in keys),
            math.prod(leaf.shape or ()),
            np.dtype(leaf.dtype).itemsize,
        )
        for keys, leaf in flat
        if getattr(leaf, "dtype", None) is not None and hasattr(leaf, "shape")
    ]


def _tree_directory(path: Path) -> Path:
    if not path.is_dir():
        raise FileNotFoundError(f"`{path}` is no directory; give that of a saved checkpoint.")
    if (path / _METADATA).exists():
        return path
    steps = [d for d in path.iterdir() if d.is_dir() and d.name.isdigit()]
    step = max(steps, key=lambda d: int(d.name)) if steps else path
    trees = sorted(d for d in step.iterdir() if (d / _METADATA).exists())
    if (step / _METADATA).exists():
        return step
    if not trees:
        raise FileNotFoundError(
            f"`{path}` holds no tree that Orbax has saved: expected `{_METADATA}` in it, in a "
            "directory of it, or in those of its newest step."
        )
    if len(trees) > 1:
        names = ", ".join(d.name for d in trees)
        raise ValueError(f"`{step}` holds several trees, {names}; give the path of one of them.")
    return trees[0]


def _key(entry: Any) -> Any:
    """What a path's entry is called, of whatever kind it is."""
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return entry
