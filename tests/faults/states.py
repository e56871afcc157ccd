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


def bits_of(tree: Any) -> Bits:
    """Copies a state to the host, leaf by leaf.

    By way of a copy on the device: `np.asarray` of a leaf itself would leave a view behind, and a
    buffer with a view is copied instead of donated. The next step must be able to destroy it.
    """

    def host(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array):
            key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            leaf = jax.random.key_data(leaf) if key else jnp.copy(leaf)
        return np.array(leaf)

    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): host(x) for path, x in flat}


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


def stock_steps(directory: pathlib.Path) -> list[int]:
    """Returns the steps that a stock manager finds."""
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(directory, options=options) as stock:
        return sorted(stock.all_steps())


def stock_restore(directory: pathlib.Path, step: int, target: Any) -> Bits:
    """Restores item `state` of a step with a stock manager."""
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(directory, options=options) as stock:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        return bits_of(stock.restore(step, args=args)["state"])


def assert_checkpoints(directory: pathlib.Path, want: Mapping[int, Bits], target: Any) -> None:
    """A stock manager finds these steps, no other, and restores each bit for bit."""
    assert stock_steps(directory) == sorted(want)
    for step, bits in want.items():
        assert not differing(stock_restore(directory, step, target), bits), f"step {step}"


def assert_only_whole_steps(directory: pathlib.Path, want: Mapping[int, Bits]) -> None:
    """No directory bears the name of a step that is not committed, and none lacks the marker."""
    named = {int(path.name): path for path in directory.iterdir() if path.name.isdigit()}
    assert sorted(named) == sorted(want)
    for path in named.values():
        assert (path / "_CHECKPOINT_METADATA").exists()
        assert (path / "state" / "_METADATA").exists()
