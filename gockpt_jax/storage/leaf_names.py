r"""The names under which leaves are stored: as Orbax makes them, the keys on the way, with dots.

Not every tree has a name for each of its leaves: `{"a": {"b": x}, "a.b": y}` has one for two. Stock
writes both to one place, and restores the one that came last for both. And not every name can be a
file's: `/w` lies outside of the checkpoint, TensorStore takes `a\b` for `a/b`, and a name may be
too long. As keys of an OCDBT database, which is stock's own layout, they are names like others.
"""

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from gockpt_jax.storage.item_files import FOLDER

_MAX_BYTES = 255  # of a file's name, on all file systems that we write plain files to
# What else lies in an item, beside the leaves.
_TAKEN = frozenset(
    {"_METADATA", "_sharding", "_strings.json", "array_metadatas", "manifest.ocdbt", FOLDER}
)


def refuse_shared(tree: Any) -> None:
    """Refuses a tree of which two leaves would be stored in one place.

    Raises:
      ValueError: if it is one; names the leaves.

    Example:
      >>> refuse_shared({"a": {"b": 1.0}, "a.c": 2.0})
      >>> refuse_shared({"a": {"b": 1.0}, "a.b": 2.0})
      Traceback (most recent call last):
      ...
      ValueError: `['a']['b']` and `['a.b']` would both be stored as `a.b`, ...
    """
    _ask(_refuse_shared, tree)


def why_no_files(tree: Any) -> str | None:
    """Why the leaves of a tree cannot be files under their names; `None` if they can.

    Example:
      >>> why_no_files({"w": 1.0, "blocks/0/w": 2.0})
      >>> why_no_files({"/w": 1.0})
      "a leaf's name, `/w`, cannot be a file's"
    """
    reason: str | None = _ask(_why_no_files, tree)
    return reason


def _ask(question: Any, tree: Any) -> Any:
    structure = jax.tree.structure(tree)
    try:
        return question(structure)
    except TypeError:  # something in it cannot be hashed: each save asks anew
        return question.__wrapped__(structure)


@functools.lru_cache(maxsize=8)  # a run saves trees of one structure, or of a few
def _refuse_shared(structure: Any) -> None:
    found = collections.defaultdict(list)
    for name, path in zip(_names(structure), _paths(structure), strict=True):
        found[name.removesuffix("/")].append(path)  # `a/` and `a` are one folder
    for name, paths in found.items():
        if len(paths) > 1:
            raise ValueError(
                f"{' and '.join(f'`{path}`' for path in paths)} would both be stored as `{name}`, "
                "and one of them would be lost (with stock Orbax, too). Rename one of them."
            )


@functools.lru_cache(maxsize=8)
def _why_no_files(structure: Any) -> str | None:
    names = _names(structure)
    for name in names:
        parts = name.split("/")
        if parts[0] in _TAKEN or not all(map(_is_file_name, parts)):
            return f"a leaf's name, `{name}`, cannot be a file's"
    # The files in it might be of one name with those of the other's chunks.
    for folder, following in itertools.pairwise(sorted(f"{name}/" for name in names)):
        if following.startswith(folder):
            return f"a leaf, `{following[:-1]}`, would lie in the folder of another"
    return None


def _names(structure: Any) -> Sequence[str]:
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    names: list[str] = jax.tree.leaves(ocp.tree.get_param_names(tree, include_empty_nodes=False))
    return names


def _paths(structure: Any) -> Sequence[str]:
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _is_file_name(part: str) -> bool:
    is_short = len(part.encode("utf-8", "surrogatepass")) <= _MAX_BYTES
    return is_short and part not in ("", ".", "..") and not {"\\", "\0"} & set(part)
