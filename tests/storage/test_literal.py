"""Directories and items whose names Orbax takes for patterns: stock loses what is saved there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import gockpt_jax as gockpt
from gockpt_jax.storage.files.literal import literal
from gockpt_jax.storage.inspecting.verify import verify
from gockpt_jax.storage.writing import tree_handler
from gockpt_jax.v1 import GoCkptCheckpointable

NAMES = ["run[lr=1]", "run[", "run*", "run?"]


W = np.arange(4, dtype=np.float32)


def state():
    return {"w": jnp.asarray(W), "key": jax.random.key(3)}


def is_whole(restored):
    is_key = jnp.issubdtype(restored["key"].dtype, jax.dtypes.prng_key)
    return is_key and restored["key"] == jax.random.key(3) and bool((restored["w"] == W).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}], ids=["database", "files"])
def test_directories_may_have_names_of_patterns(tmp_path, name, options):
    root = tmp_path / name
    with gockpt.GoCkptManager(root, pytree_options=options) as manager:
        manager.save(0, args=gockpt.GoCkptSave(state()))
    assert [verdict.state for verdict in verify(root)] == ["whole", "whole"]
    with gockpt.GoCkptManager(root) as manager:
        assert is_whole(manager.restore(0, args=gockpt.GoCkptRestore(state())))
        assert is_whole(manager.restore(0))
    # Stock reads what it could not have written; of the key it finds the data alone.
    with ocp.CheckpointManager(root) as stock:
        restored = stock.restore(0, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    np.testing.assert_array_equal(restored["state"]["w"], W)


def test_what_was_not_merged_is_not_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(tree_handler, "literal", epath.Path)
    with gockpt.GoCkptManager(tmp_path / "run[lr=1]") as manager:
        manager.save(0, args=gockpt.GoCkptSave(state()))
        with pytest.raises(RuntimeError, match="Orbax has not merged the databases"):
            manager.wait_until_finished()
        assert manager.all_steps() == []


def test_items_may_have_names_of_patterns(tmp_path):
    args = ocp.args.Composite(**{"ema[slow]": gockpt.GoCkptSave(state())})
    with gockpt.GoCkptManager(tmp_path) as manager:
        manager.save(0, args=args)
    with gockpt.GoCkptManager(tmp_path) as manager:
        args = ocp.args.Composite(**{"ema[slow]": gockpt.GoCkptRestore(state())})
        assert is_whole(manager.restore(0, args=args)["ema[slow]"])


def test_a_stock_manager_with_our_handler(tmp_path):
    root = tmp_path / "run[lr=1]"
    with ocp.CheckpointManager(root, item_handlers=gockpt.GoCkptHandler()) as manager:
        manager.save(0, args=gockpt.GoCkptSave(state()))
        manager.wait_until_finished()
        assert is_whole(manager.restore(0, args=gockpt.GoCkptRestore(state())))


def test_nothing_of_another_run_is_found(tmp_path):
    for name in ("run1", "run[1]"):
        for folder in ("ocdbt.process_0", "array_metadatas/process_0", "state"):
            (tmp_path / name / folder).mkdir(parents=True)
    path = epath.Path(tmp_path / "run[1]")
    assert list(path.glob("ocdbt.process_*")) == [epath.Path(tmp_path / "run1/ocdbt.process_0")]
    for pattern, found in {
        "ocdbt.process_*": ["ocdbt.process_0"],
        "array_metadatas/process_*": ["array_metadatas/process_0"],
        "nothing/process_*": [],
    }.items():
        assert list(literal(path).glob(pattern)) == [path / name for name in found]
    inside = literal(path) / "array_metadatas"  # so is all that Orbax makes of it
    assert list(inside.glob("*")) == [path / "array_metadatas/process_0"]


# --- Backslashes, which TensorStore takes for slashes --------------------------------------------


def by_a_stock_manager(root, item):
    # Or a thread of Orbax's waits 300 s for the directory of what was refused.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CheckpointManagerOptions(async_options=at_once)
    handlers = {item: gockpt.GoCkptHandler()}
    with ocp.CheckpointManager(root, options=options, item_handlers=handlers) as manager:
        manager.save(0, args=ocp.args.Composite(**{item: gockpt.GoCkptSave(state())}))


def by_v1(root, item):
    """As its `Checkpointer` calls it."""
    with GoCkptCheckpointable() as windows:
        asyncio.run(windows(state()).save(SimpleNamespace(path=epath.Path(root / "0" / item))))


@pytest.mark.parametrize("save", [by_a_stock_manager, by_v1])
@pytest.mark.parametrize(("folder", "item"), [("a\\b", "state"), ("run", "a\\b")])
def test_a_backslash_is_refused_whoever_saves(tmp_path, save, folder, item):
    with pytest.raises(ValueError, match=r"a\\b.*: TensorStore takes a backslash for a slash, so"):
        save(tmp_path / folder, item)
    assert {path.name for path in tmp_path.iterdir()} <= {folder}
    written = {"manifest.ocdbt", "ocdbt.process_0", "_METADATA"}
    assert not [path for path in tmp_path.rglob("*") if path.name in written]
