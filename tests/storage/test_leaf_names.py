"""Trees whose leaves have names that are awkward for files, or one name for two."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import gockpt_jax as gockpt
from gockpt_jax.storage.inspecting.diff import diff_items

AWKWARD = {
    "absolute": ["/nowhere/w"],
    "outside": ["../../w"],
    "dots": [".", ".."],
    "empty": [""],
    "slash": ["/"],
    "backslash": ["a\\b", "a"],
    "twice": ["a//b", "a/b"],
    "at the end": ["a/", "b//"],
    "long": ["x" * 300],
    "taken": ["_METADATA", "_sharding", "manifest.ocdbt"],
    "a process's": ["ocdbt.process_0"],
    "chunk": ["a", "a/0", "a/.zarray"],
    "chunk, not beside it": ["a", "a-b", "a/0"],
    "zero byte": ["a\0b"],
}
FILES = ["a/b", "a/c", "a.b", "a b", "ü", "%2F", "*", "d"]


def tree_of(names):
    return {name: jnp.arange(6.0) + n for n, name in enumerate([*names, "plain"])}


def stock_stores(directory, state):
    """Older ones (0.11.33) miss a leaf whose name is empty, or is in the folder of another."""
    try:
        with ocp.StandardCheckpointer() as stock:
            stock.save(directory, state)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("names", AWKWARD.values(), ids=AWKWARD)
def test_a_name_that_no_file_can_have_is_one_of_a_database(tmp_path, caplog, names):
    state = tree_of(names)
    if not stock_stores(tmp_path.with_name(f"{tmp_path.name}_stock"), state):
        with pytest.raises(ValueError, match="missing"), gockpt.GoCkptManager(tmp_path) as manager:
            manager.save(0, args=gockpt.GoCkptSave(state))
        return
    files = {"use_ocdbt": False}
    with (
        caplog.at_level(logging.WARNING),
        gockpt.GoCkptManager(tmp_path, pytree_options=files) as manager,
    ):
        manager.save(0, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        found = manager.restore(0, args=gockpt.GoCkptRestore(state), verify=True)
    assert [r.levelname for r in caplog.records if "cannot be a file's" in r.message
            or "in the folder of another" in r.message] == ["WARNING"]  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, found, state)
    with ocp.StandardCheckpointer() as stock:
        jax.tree.map(np.testing.assert_array_equal, stock.restore(tmp_path / "0/state"), state)
    assert (tmp_path / "0/state/manifest.ocdbt").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("names", AWKWARD.values(), ids=AWKWARD)
def test_any_name_is_one_of_a_database(tmp_path, names):
    """Which is the default: nothing is said of it, and what stock reads of it is what it is."""
    state = tree_of(names)
    if not stock_stores(tmp_path.with_name(f"{tmp_path.name}_stock"), state):
        return
    with gockpt.GoCkptManager(tmp_path) as manager:
        manager.save(0, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        found = manager.restore(0, args=gockpt.GoCkptRestore(state), verify=True)
    jax.tree.map(np.testing.assert_array_equal, found, state)
    with ocp.StandardCheckpointer() as stock:
        jax.tree.map(np.testing.assert_array_equal, stock.restore(tmp_path / "0/state"), state)


def test_any_other_name_is_a_files(tmp_path):
    state = tree_of(FILES)
    with gockpt.GoCkptManager(tmp_path, pytree_options={"use_ocdbt": False}) as manager:
        manager.save(0, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        found = manager.restore(0, args=gockpt.GoCkptRestore(state), verify=True)
    jax.tree.map(np.testing.assert_array_equal, found, state)
    assert all((tmp_path / "0/state" / name / ".zarray").is_file() for name in state)


@pytest.mark.parametrize(
    "tree", [{"a": {"b": 1.0}, "a.b": 2.0}, {"a": {"": 1.0}, "a.": 2.0}, {"a": 1.0, "a/": 2.0}]
)
@pytest.mark.parametrize("options", [{"use_ocdbt": False}, None], ids=["files", "database"])
def test_two_leaves_of_one_name_are_refused(tmp_path, tree, options):
    state = jax.tree.map(jnp.float32, tree)
    with gockpt.GoCkptManager(tmp_path, pytree_options=options) as manager:
        with pytest.raises(ValueError, match="would both be stored as `a"):
            manager.save(0, args=gockpt.GoCkptSave(state))
        assert manager.save(1, args=gockpt.GoCkptSave({"a": state["a"]}))


EMPTY = {"None": None, "dictionary": {}, "list": []}


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("is_first", [True, False])
def test_an_empty_node_hides_no_array_of_its_name(tmp_path, empty, is_first):
    trees = []
    for value in (1.0, 2.0):
        array, node = {"a": {"b": jnp.full(3, value)}}, {"a.b": empty}
        trees.append({**node, **array} if is_first else {**array, **node})
        root = tmp_path / str(value)
        with gockpt.GoCkptManager(root) as manager:
            manager.save(0, args=gockpt.GoCkptSave(trees[-1]))
            manager.wait_until_finished()
            found = manager.restore(0, args=gockpt.GoCkptRestore(trees[-1], verify=True))
        assert found["a.b"] == empty
        np.testing.assert_array_equal(found["a"]["b"], trees[-1]["a"]["b"])
    (told,) = diff_items(tmp_path / "1.0/0/state", tmp_path / "2.0/0/state")
    assert (told.name, told.kind, told.elements) == ("a.b", "values", 3)


def test_metadata_is_that_of_the_call(tmp_path):
    position = {"batch": [7]}
    with gockpt.GoCkptManager(tmp_path) as manager:
        args = gockpt.GoCkptSave({"w": jnp.ones(3)}, custom_metadata=position)
        manager.save(0, args=args)
        position["batch"][0] = 8  # the loop goes on while the save is written
        manager.wait_until_finished()
        assert manager.item_metadata(0).custom_metadata == {"batch": [7]}
