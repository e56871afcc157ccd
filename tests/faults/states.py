"""States as bits: copies that no later step can touch, and comparison by path."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from bits import Bits, differing


@jax.jit
def _copies(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copies in one dispatch: leaf by leaf they would be a quarter of these tests' time."""
    return [jnp.copy(array) for array in arrays]


def bits_of(tree: Any) -> Bits:
    """Copies a state to the host, leaf by leaf.

    By way of a copy on the device: `np.asarray` of a leaf itself would leave a view behind, and a
    buffer with a view is copied instead of donated. The next step must be able to destroy it.
    """

    def plain(leaf: Any) -> Any:
        is_key = jnp.issubdtype(jax.dtypes.result_type(leaf), jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(at, simple=True, separator="/"): plain(x) for at, x in flat}
    arrays = [path for path, leaf in leaves.items() if isinstance(leaf, jax.Array)]
    leaves.update(zip(arrays, _copies([leaves[path] for path in arrays]), strict=True))
    return {path: np.array(leaf) for path, leaf in leaves.items()}


def digest_of(bits: Bits) -> str:
    """Returns one hash of all leaves: of paths, dtypes, shapes and bits."""
    text = hashlib.sha256()
    for path in sorted(bits):
        array = bits[path]
        text.update(f"{path} {array.dtype} {array.shape}\n".encode() + array.tobytes())
    return text.hexdigest()


def abstract(tree: Any, sharding: Any = None) -> Any:
    """Returns a restore target: shapes, dtypes and `sharding`, or the tree's own."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree
    )


def stock_manager(directory: pathlib.Path) -> ocp.CheckpointManager:
    """Returns a stock manager that only reads."""
    options = ocp.CheckpointManagerOptions(read_only=True)
    return ocp.CheckpointManager(directory, options=options)


def stock_steps(directory: pathlib.Path) -> list[int]:
    """Returns the steps that a stock manager finds."""
    with stock_manager(directory) as stock:
        return sorted(stock.all_steps())


def stock_restore(directory: pathlib.Path, step: int, target: Any) -> Bits:
    """Restores item `state` of a step with a stock manager."""
    with stock_manager(directory) as stock:
        return _restored(stock, step, target)


def _restored(stock: ocp.CheckpointManager, step: int, target: Any) -> Bits:
    """Into numpy arrays, which is faster; `test_stock_readable.py` restores to devices."""

    def on_host(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf if is_key else np.empty(leaf.shape, leaf.dtype)

    args = ocp.args.StandardRestore(jax.tree.map(on_host, target))
    return bits_of(stock.restore(step, args=ocp.args.Composite(state=args))["state"])


def assert_checkpoints(directory: pathlib.Path, want: Mapping[int, Bits], target: Any) -> None:
    """A stock manager finds these steps, no other, and restores each bit for bit."""
    with stock_manager(directory) as stock:
        assert sorted(stock.all_steps()) == sorted(want)
        for step, bits in want.items():
            assert not differing(_restored(stock, step, target), bits), f"step {step}"


def assert_only_whole_steps(directory: pathlib.Path, want: Mapping[int, Bits]) -> None:
    """No directory bears the name of a step that is not committed, and none lacks the marker."""
    named = {int(path.name): path for path in directory.iterdir() if path.name.isdigit()}
    assert sorted(named) == sorted(want)
    for path in named.values():
        assert (path / "_CHECKPOINT_METADATA").exists()
        assert (path / "state" / "_METADATA").exists()
