r"""The names under which leaves are stored: as Orbax makes them, the keys on the way, with dots.

Not every tree has a name for each of its leaves: `{"a": {"b": x}, "a.b": y}` has one for two. Stock
writes both to one place, and restores the one that came last for both. And not every name can be a
file's: `/w` lies outside of the checkpoint, TensorStore takes `a\b` for `a/b`, and a name may be
too long. As keys of an OCDBT database, which is stock's own layout, they are names like others.
"""

import collections
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from gockpt_jax.storage.files.item_files import FOLDER

_MAX_BYTES = 255  # of a file's name, on all file systems that we write plain files to
# What else lies in an item, beside the leaves.
_TAKEN = frozenset(
    {"_METADATA", "_sharding", "_strings.json", "array_metadatas", "manifest.ocdbt", FOLDER}
)
PROCESS_FOLDER = "ocdbt.process_"
"""With the number of a process: where its database is until Orbax merges all of them."""


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
    found = collections.defaultdict(list)
    for name, path in _leaves(tree):
        found[name.removesuffix("/")].append(path)  # `a/` and `a` are one folder
    for name, paths in found.items():
        if len(paths) > 1:
            raise ValueError(
                f"{' and '.join(f'`{path}`' for path in paths)} would both be stored as `{name}`, "
                "and one of them would be lost (with stock Orbax, too). Rename one of them."
            )


def why_no_files(tree: Any) -> str | None:
    """Why the leaves of a tree cannot be files under their names; `None` if they can.

    Example:
      >>> why_no_files({"w": 1.0, "blocks/0/w": 2.0})
      >>> why_no_files({"/w": 1.0})
      "a leaf's name, `/w`, cannot be a file's"
    """
    names = [name for name, _ in _leaves(tree)]
    for name in names:
        parts = name.split("/")
        is_taken = parts[0] in _TAKEN or parts[0].startswith(PROCESS_FOLDER)
        if is_taken or not all(map(_is_file_name, parts)):
            return f"a leaf's name, `{name}`, cannot be a file's"
    # The files in it might be of one name with those of the other's chunks.
    for folder, following in itertools.pairwise(sorted(f"{name}/" for name in names)):
        if following.startswith(folder):
            return f"a leaf, `{following[:-1]}`, would lie in the folder of another"
    return None


def _is_file_name(part: str) -> bool:
    is_short = len(part.encode("utf-8", "surrogatepass")) <= _MAX_BYTES
    return is_short and part not in ("", ".", "..") and not {"\\", "\0"} & set(part)


_known: dict[Any, Sequence[tuple[str, str]]] = {}  # a run saves trees of a few structures


def _leaves(tree: Any) -> Sequence[tuple[str, str]]:
    """Name and path of each leaf."""
    structure = jax.tree.structure(tree)
    with contextlib.suppress(TypeError, KeyError):  # something in it cannot be hashed, or is new
        return _known[structure]
    found = [
        (".".join(ocp.tree.str_keypath(path)), jax.tree_util.keystr(path))
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    with contextlib.suppress(TypeError):
        if len(_known) > 8:
            _known.clear()
        _known[structure] = found
    return found
