"""Whether a checkpoint and the target to restore it into fit together, leaf by leaf."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from gockpt_jax.errors import TargetError
from gockpt_jax.storage.inspecting.stored_item import StoredItem
from gockpt_jax.storage.restoring.placed import lies_nowhere
from gockpt_jax.storage.restoring.stored import Stored, all_arrays
from gockpt_jax.transfer.chunks import is_key_type

_NARROWER = {
    "int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64",
}  # fmt: skip
"""What JAX makes of what it is given, unless `jax_enable_x64` is on; without a word."""
_IS_OFF = "`jax_enable_x64` is off"
_OF_ANOTHER_DTYPE = "of another dtype"
_NO_DEVICES = "on an `AbstractMesh`, as `jax.eval_shape` has it: name devices, by a `Mesh` of them"


def check_target(
    directory: Any,
    target: Any,
    known: Mapping[str, Stored],
    *,
    strict: bool = True,
    cast: bool = False,
    partial: bool = False,
    leaves_out: bool = False,
) -> None:
    """Compares a target's leaves with a checkpoint's.

    Args:
      directory: The item's.
      target: A tree of arrays, `ShapeDtypeStruct`s or numbers.
      known: What `known_arrays` tells of the item.
      strict: Whether other shapes are errors.
      cast: Whether other dtypes are none.
      partial: Whether leaves that the target does not name are none.
      leaves_out: Whether `PLACEHOLDER` may stand for a leaf that shall not be restored.

    Raises:
      TargetError: They do not fit; the message names all leaves.
    """
    item = StoredItem(directory)
    stored = all_arrays(item, known)
    kept = {name for name, leaf in item.leaves.items() if leaf.has_data}
    named = _named(target)
    wanted = {name: leaf for name, leaf in named.items() if leaf is not ocp.PLACEHOLDER}
    branches = {".".join(x.path[:n]) for x in item.leaves.values() for n in range(len(x.path))}
    found = {
        "in the target, but not in the checkpoint": [
            f"{name}: {_told(wanted[name])}" for name in sorted(wanted.keys() - kept)
        ],
        "in the checkpoint, but not in the target": [
            f"{name}: {stored.get(name, item.leaves[name].value_type)}"
            for name in sorted(kept - named.keys())
            if not partial
        ],
        "left out by `PLACEHOLDER`": [
            name or "all of it"
            for name in sorted(named.keys() - wanted.keys())
            if not leaves_out or name in branches
        ],
    }
    found |= _others(item, stored, wanted, strict=strict, cast=cast)
    found["that cannot lie as the target says"] = _misplaced(wanted)
    if any(found.values()):
        raise TargetError(_message(item.path, found))


def _others(
    item: StoredItem,
    stored: Mapping[str, Stored],
    wanted: Mapping[str, Any],
    *,
    strict: bool,
    cast: bool,
) -> dict[str, list[str]]:
    """The leaves that are there, but not as the target has them."""
    kinds = [
        f"{name}: string in the checkpoint, {_told(wanted[name])} in the target"
        for name in sorted(wanted.keys() & item.texts)
        if not isinstance(wanted[name], str)
    ]
    shapes: list[str] = []
    dtypes: list[str] = []
    for name in sorted(wanted.keys() & stored.keys()):
        leaf, have, saved_as = wanted[name], stored[name], item.leaves[name].value_type
        want = _as_stored(leaf)
        if saved_as == "np.ndarray" and lies_nowhere(leaf) and not _is_key(leaf):
            # Made of NumPy's by `ocp.utils.to_shape_dtype_struct`: NumPy's again, of any dtype.
            want = Stored(tuple(leaf.shape), np.dtype(leaf.dtype).name)
        line = f"{name}: {have} in the checkpoint, {_told(leaf)} in the target"
        is_number = want is None or saved_as == "scalar"
        if want is None:
            number = next((ty for ty in (bool, int, float) if isinstance(leaf, ty)), None)
            if have.shape or number is None:
                kinds.append(line)
                continue
            want = Stored((), number.__name__)
        if strict and want.shape != have.shape:
            (kinds if _is_key(leaf) else shapes).append(line)
        elif not cast and (_loses(have, want) if is_number else want.dtype != have.dtype):
            dtypes.append(line)
    if not cast:
        told = {line.partition(":")[0] for line in (*kinds, *shapes)}
        kinds += [line for name, line in _other_keys(item, stored, wanted) if name not in told]
    return {"of another kind": sorted(kinds), "of another shape": shapes, _OF_ANOTHER_DTYPE: dtypes}


def _other_keys(
    item: StoredItem, stored: Mapping[str, Stored], wanted: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Typed random keys that the target has as arrays, or of another algorithm, or the reverse.

    Their data are alike, and stock restores what was saved, whatever the target says; but for an
    array of NumPy, which may be a key's data and gets those. What is no array gets the key, too:
    `ocp.utils.to_shape_dtype_struct` makes of one an abstract array of its data.
    """
    names = [
        name
        for name in sorted(wanted.keys() & stored.keys())
        if stored[name].dtype == "uint32" and _as_stored(wanted[name]) is not None
    ]
    known = item.key_algorithms if names else {}
    for name in (x for x in names if x in known):
        impl, want = known[name], str(wanted[name].dtype)
        have = stored[name].dtype if impl is None else _key_dtype(impl)
        is_key, is_array = _is_key(wanted[name]), isinstance(wanted[name], jax.Array)
        if have != want and (is_key or (is_array and impl is not None)):
            yield name, f"{name}: {have} in the checkpoint, {want} in the target"


def _key_dtype(impl: str) -> str:
    try:
        return str(jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype)
    except (ValueError, TypeError):  # one that JAX does not know here
        return f"key<{impl}>"


def _misplaced(wanted: Mapping[str, Any]) -> list[str]:
    """The leaves that their shardings do not divide, or put on no devices; JAX names none."""
    wrong = []
    for name, leaf in sorted(wanted.items()):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
            wrong.append(f"{name}: {_told(leaf)}: {_NO_DEVICES}")
        elif isinstance(sharding, jax.sharding.Sharding):
            try:
                sharding.shard_shape(tuple(leaf.shape))
            except ValueError as error:
                wrong.append(f"{name}: {_told(leaf)}: {error}")
    return wrong


def _is_key(leaf: Any) -> bool:
    """Whether it is a random key: of another size it is another algorithm's."""
    return is_key_type(getattr(leaf, "dtype", np.void))


def refuse_to_narrow(directory: Any, known: Mapping[str, Stored]) -> None:
    """Refuses what would come back with fewer bits, where no target says what is wanted.

    Args:
      directory: The item's.
      known: Its arrays.

    Raises:
      TargetError: some have 64 bits, and `jax_enable_x64` is off; names all of them.
    """
    wide = [name for name, have in known.items() if _as_jax_makes_it(have.dtype) != have.dtype]
    if wide:
        item = StoredItem(directory)
        made = [name for name in sorted(wide) if item.leaves[name].value_type == "jax.Array"]
        lines = [f"{name}: {known[name]} in the checkpoint, {_IS_OFF}" for name in made]
        if lines:
            raise TargetError(_message(item.path, {_OF_ANOTHER_DTYPE: lines}))


def _loses(have: Stored, want: Stored) -> bool:
    """Whether a number is of a kind that has more of them, as floats have more than integers."""
    kinds = (jnp.number, jnp.inexact, jnp.complexfloating)
    had, got = (sum(jnp.issubdtype(x.dtype, kind) for kind in kinds) for x in (have, want))
    return had > got


def _message(path: Any, found: Mapping[str, Sequence[str]]) -> str:
    advice = {
        "in the checkpoint, but not in the target": "`partial_restore=True` leaves out what the"
        " target does not name",
        "left out by `PLACEHOLDER`": "`partial_restore=True` lets it stand for a leaf, one for"
        " each",
        "of another shape": "`strict=False` pads or truncates",
        _OF_ANOTHER_DTYPE: "`cast=True` converts",
    }
    text = [f"The checkpoint {path} does not fit the target."]
    for what, leaves in found.items():
        if leaves:
            text.append(f"{len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'} {what}:")
            text += [f"  {line}" for line in leaves]
    hints = [hint for what, hint in advice.items() if found.get(what)]
    text.append("Build the target from the model and optimizer that were saved" + (
        f"; or in `GoCkptRestore`: {', '.join(hints)}." if hints else "."
    ))  # fmt: skip
    return "\n".join(text)


def _named(target: Any) -> dict[str, Any]:
    """The target's leaves by parameter name."""
    names = jax.tree.leaves(ocp.tree.get_param_names(target, include_empty_nodes=False))
    return dict(zip(names, jax.tree.leaves(target), strict=True))


def _as_stored(leaf: Any) -> Stored | None:
    """How a target's leaf would lie on disk; `None` for what has no dtype of its own."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return None
    if isinstance(leaf, jax.core.Tracer):
        return None
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    dtype = np.dtype(leaf.dtype).name
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        dtype = _as_jax_makes_it(dtype)
    return Stored(tuple(leaf.shape), dtype)


def _as_jax_makes_it(dtype: str) -> str:
    """The dtype of an array of JAX's that is to have this one."""
    is_wide = getattr(jax.config, "jax_enable_x64", False)  # its stubs do not know it
    return dtype if is_wide else _NARROWER.get(dtype, dtype)


def _told(leaf: Any) -> str:
    stored = _as_stored(leaf)
    if stored is None:
        return type(leaf).__name__
    is_asked_for = _NARROWER.get(str(leaf.dtype)) == stored.dtype
    return f"{stored} here: {_IS_OFF}" if is_asked_for else str(stored)


@contextlib.contextmanager
def explained(
    directory: Any, target: Any, known: Mapping[str, Stored], **rules: bool
) -> Iterator[None]:
    """Has stock's error about a target that does not fit say of all leaves why."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        if target is not None:
            try:
                check_target(directory, target, known, **rules)
            except TargetError as explained:
                raise explained from error
            except ValueError:
                pass  # Not a tree that we can read: stock's own error says more.
        raise
