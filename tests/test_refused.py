"""What cannot be saved: told at once, by name, with nothing made on disk and nothing lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import checkpoint_managers

import gockpt_jax as gockpt
from gockpt_jax.storage.inspecting.verify import verify_item

STATE = {"w": jnp.arange(4.0), "n": np.arange(3)}


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    directory = tmp_path_factory.mktemp("refused")
    with gockpt.GoCkptManager(directory, options=options) as manager:
        assert manager.save(0, args=gockpt.GoCkptSave(STATE), metrics={"loss": 1.0})
        manager.wait_until_finished()
        yield manager


def refused(manager: gockpt.GoCkptManager, **save: Any) -> str:
    """What is said of a save that is not made; what was there is untouched, and no thread left."""
    before, threads = listing(manager.directory), set(threading.enumerate())
    with pytest.raises((TypeError, ValueError)) as error:
        manager.save(1, **{"metrics": {"loss": 2.0}, **save})
    assert listing(manager.directory) == before
    assert set(threading.enumerate()) <= threads
    assert list(manager.all_steps()) == [0]
    assert not manager.is_saving_in_progress()
    return str(error.value)


def listing(directory: Any) -> list[str]:
    return sorted(str(path) for path in Path(directory).rglob("*"))


def deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


NO_HANDLER = "for which Orbax has no handler. Leave it out, make an array of it, or register one"
NO_DTYPE = "which TensorStore does not store. Convert it to another one, or leave it out."
NO_SIZE = "Arrays with zero size cannot be stored"
LEAVES: dict[str, tuple[Any, str]] = {
    "an object": (object(), f"of type `object`, {NO_HANDLER}"),
    "a function": (refused, f"of type `function`, {NO_HANDLER}"),
    "a jitted function": (jax.jit(refused), f"Function`, {NO_HANDLER}"),
    "a set": ({1}, f"of type `set`, {NO_HANDLER}"),
    "a complex number": (1j, f"of type `complex`, {NO_HANDLER}"),
    "a type": (int, f"of type `type`, {NO_HANDLER}"),
    "a placeholder": (ocp.PLACEHOLDER, f"of type `ellipsis`, {NO_HANDLER}"),
    "a shape": (jax.ShapeDtypeStruct((2,), "f4"), f"of type `ShapeDtypeStruct`, {NO_HANDLER}"),
    "objects": (np.array([None, {}]), f"of dtype `object`, {NO_DTYPE}"),
    "strings": (np.array(["a", "bc"]), f"of dtype `<U2`, {NO_DTYPE}"),
    "bytes": (b"ab", f"of dtype `|S2`, {NO_DTYPE}"),
    "dates": (np.array(["2020-01-01"], "M8[D]"), f"of dtype `datetime64[D]`, {NO_DTYPE}"),
    "records": (np.zeros(2, [("a", "i4")]), f"of dtype `[('a', '<i4')]`, {NO_DTYPE}"),
    "no tangents": (np.zeros(2, jax.dtypes.float0), NO_DTYPE),
    "four bits": (jnp.ones(2, jnp.uint4), f"of dtype `uint4`, {NO_DTYPE}"),
    "four bits of NumPy's": (np.ones(2, jnp.uint4), f"of dtype `uint4`, {NO_DTYPE}"),
    "an integer of 81 bits": (2**80, f"of dtype `object`, {NO_DTYPE}"),
    "no elements": (jnp.ones((0, 3)), f"of shape (0, 3). {NO_SIZE}"),
    "no keys": (jax.random.split(jax.random.key(0), 0), f"of shape (0,). {NO_SIZE}"),
    "no elements of NumPy's": (np.ones((2, 0)), f"of shape (2, 0). {NO_SIZE}"),
    "a deleted array": (deleted(), "donated to a later step, or deleted. Save what the step ret"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_that_cannot_be_stored(manager: gockpt.GoCkptManager, name: str) -> None:
    leaf, told = LEAVES[name]
    message = refused(manager, args=gockpt.GoCkptSave({**STATE, "a": {"x": leaf}}))
    assert f"  ['a']['x']: {told}" in message or (told in message and "  ['a']['x']: of" in message)
    assert "nothing of it was; training and earlier checkpoints are as they were" in message
    assert message.count("\n") == 1  # and of no other leaf


def test_all_leaves_are_named_at_once(manager: gockpt.GoCkptManager) -> None:
    bad = {name: leaf for name, (leaf, _) in LEAVES.items()}
    bad |= {f"more {i}": object() for i in range(9)}
    message = refused(manager, args=gockpt.GoCkptSave({**STATE, **bad}), force=True)
    for name in LEAVES:
        assert f"[{name!r}]" in message
    assert "['more 6'] and 2 more: of type `object`" in message
    assert "'w'" not in message


def test_an_array_of_one_of_several_processes(
    manager: gockpt.GoCkptManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process would write its own into the same place."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    message = refused(manager, args=gockpt.GoCkptSave(STATE))
    assert "  ['w']: in one of several processes only. Make a global array of it" in message


@pytest.mark.parametrize("around", [jax.jit, jax.vmap, jax.grad])
def test_a_traced_state(manager: gockpt.GoCkptManager, around: Any) -> None:
    def loss(x: jax.Array) -> jax.Array:
        message = refused(manager, args=gockpt.GoCkptSave({**STATE, "x": x}))
        assert "  ['x']: traced, without a value. Call `save` between the steps" in message
        return x

    around(loss)(jnp.ones(2) if around is jax.vmap else 1.0)


def with_metadata(value: Any) -> gockpt.GoCkptSave:
    return gockpt.GoCkptSave(STATE, custom_metadata=value)


def with_save_args(value: Any) -> gockpt.GoCkptSave:
    return gockpt.GoCkptSave(STATE, save_args=value)


SAVE, NAMED = gockpt.GoCkptSave(STATE), ocp.args.Composite
ITSELF: list = []
ITSELF.append(ITSELF)
NO_JSON = "Convert what it holds, as in `float(loss)` or `array.tolist()`."
NO_NAME = "cannot be an item's name, which is that of a directory. Give it another one."
ARGUMENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({"args": gockpt.GoCkptSave({})}, "nothing in the `dict` given to `save`", "Give"),
    "None": ({"args": gockpt.GoCkptSave(None)}, "nothing in the `NoneType` given to", "Give"),
    "an object alone": ({"args": gockpt.GoCkptSave(object())}, "all of it: of type", "Leave it"),
    "no item": ({"args": NAMED()}, "`args` holds no item", "Write `ocp.args.Composite(state="),
    "an empty name": ({"args": NAMED(**{"": SAVE})}, "`args`: '' ", NO_NAME),
    "a name above": ({"args": NAMED(**{"..": SAVE})}, "`args`: '..' ", NO_NAME),
    "a path as a name": ({"args": NAMED(**{"a/b": SAVE})}, "`args`: 'a/b' ", NO_NAME),
    "a backslash in a name": ({"args": NAMED(**{"a\\b": SAVE})}, "`args`: 'a\\\\b' ", NO_NAME),
    "a backup's name": ({"args": NAMED(**{"a~": SAVE})}, "`args`: 'a~' ", NO_NAME),
    "a bare item": (
        {"args": NAMED(state=STATE)}, "item `state` must be arguments of a save, got a `dict`",
        "Write `GoCkptSave(state)`.",
    ),
    "a target": (
        {"args": gockpt.GoCkptRestore(STATE)}, "be arguments of a save, got a `GoCkptRestore`",
        "Write `GoCkptSave(state)`.",
    ),
    "arguments' class": (
        {"args": gockpt.GoCkptSave}, "`args` must be checkpoint arguments, got a `type`",
        "Write `args=GoCkptSave(state)`",
    ),
    "an array among the metrics": (
        {"args": SAVE, "metrics": {"loss": jnp.float32(1)}}, "`metrics` must be JSON", NO_JSON,
    ),
    "a lock in the metadata": (
        {"args": with_metadata({"a": threading.Lock()})}, "`custom_metadata` must be JSON", NO_JSON,
    ),
    "an object in the step's metadata": (
        {"args": SAVE, "custom_metadata": {"a": object()}}, "`custom_metadata` must be", NO_JSON,
    ),
    "a list that holds itself": (
        {"args": with_metadata({"a": ITSELF})}, "`custom_metadata` must be JSON", NO_JSON,
    ),
    "save_args of another tree": (
        {"args": with_save_args({"w": ocp.SaveArgs()})}, "`save_args` must be a tree of `ocp.Save",
        "such as `jax.tree.map(lambda _: ocp.SaveArgs(), state)`",
    ),
    "save_args of no dtype": (
        {"args": with_save_args({"w": ocp.SaveArgs(dtype="f5"), "n": ocp.SaveArgs()})},
        "`save_args` asks for the dtype 'f5', which TensorStore does not store", "Ask for another",
    ),
    "no metrics, forced": (
        {"args": SAVE, "force": True, "metrics": object()}, "`metrics` must be JSON", NO_JSON,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_cannot_be_saved(manager: gockpt.GoCkptManager, name: str) -> None:
    save, told, advice = ARGUMENTS[name]
    message = refused(manager, **save)
    assert told in message
    assert advice in message


UNRANKED: dict[str, tuple[Any, type[Exception], str]] = {
    "another's": ({"accuracy": 1.0}, KeyError, "'loss'"),
    "None": ({"loss": None}, TypeError, "`best_fn` returned None for the `metrics` given to"),
    "several": ({"loss": [1, 2]}, TypeError, "`best_fn` returned array.*compared.*Have it return"),
}  # fmt: skip


def by_loss(metrics: Any) -> Any:
    loss = metrics["loss"]
    return np.asarray(loss) if isinstance(loss, list) else loss


@pytest.mark.parametrize("is_asynchronous", [True, False])
@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
@pytest.mark.parametrize("name", UNRANKED)
def test_metrics_that_rank_no_checkpoint(
    tmp_path: Path, name: str, on_save_error: Any, is_asynchronous: bool
) -> None:
    """Before anything of them is made, which every save that follows would be asked of."""
    metrics, kind, told = UNRANKED[name]
    options = ocp.CheckpointManagerOptions(
        best_fn=by_loss, max_to_keep=1, enable_async_checkpointing=is_asynchronous
    )
    window = gockpt.WindowOptions(on_save_error=on_save_error)
    with gockpt.GoCkptManager(tmp_path, options=options, window=window) as manager:
        assert manager.save(0, args=SAVE, metrics={"loss": 1.0})
        manager.wait_until_finished()
        for force in (False, True):
            with pytest.raises(kind, match=told):
                manager.save(1, args=SAVE, metrics=metrics, force=force)
        assert [path.name for path in tmp_path.iterdir()] == ["0"]
        assert manager.save(1, args=SAVE, metrics={"loss": 2.0})
        manager.wait_until_finished()
        assert (list(manager.all_steps()), manager.best_step()) == ([1], 1)
        assert [(report.step, report.error) for report in manager.reports] == [(0, None), (1, None)]


NOT_ASKED: dict[str, tuple[dict[str, Any], Any, list[int]]] = {
    "all kept": ({}, {"accuracy": 1.0}, [0, 1, 2]),
    "a policy": (
        {"preservation_policy": checkpoint_managers.LatestN(2)}, {"accuracy": 1.0}, [1, 2],
    ),
    "no metrics": ({"max_to_keep": 1}, None, [0, 1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ASKED)
def test_metrics_by_which_nothing_is_ranked(tmp_path: Path, name: str) -> None:
    """Stock asks `best_fn` in no save then, so metrics may be others."""
    given, metrics, kept = NOT_ASKED[name]
    options = ocp.CheckpointManagerOptions(best_fn=by_loss, **given)
    with gockpt.GoCkptManager(tmp_path, options=options) as manager:
        for step in range(3):
            assert manager.save(step, args=SAVE, metrics=metrics)
        manager.wait_until_finished()
        assert list(manager.all_steps()) == kept


TREE = {"w": jnp.arange(6.0)}
OTHERS: dict[str, tuple[dict[str, Any], list[ocp.args.CheckpointArgs]]] = {
    "a name of stock's": ({}, [ocp.args.StandardSave(TREE)]),
    "a user's handler": (
        {"item_handlers": {"x": ocp.JsonCheckpointHandler()}}, [gockpt.GoCkptSave(TREE)],
    ),
    "another kind before": ({}, [ocp.args.JsonSave({"a": 1}), ocp.args.PyTreeSave(TREE)]),
}  # fmt: skip


def assert_is_whole(item: Path) -> None:
    verdict = verify_item(item)
    assert (verdict.faults, verdict.notes) == ((), ()), verdict


@pytest.mark.filterwarnings("ignore::gockpt_jax.SnapshotOnlyWarning")
@pytest.mark.parametrize("is_asynchronous", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_a_tree_that_another_handler_would_end(
    tmp_path: Path, name: str, is_asynchronous: bool
) -> None:
    """Orbax ends an item by the first handler under its name: nobody could read ours."""
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=is_asynchronous)
    given, saves = OTHERS[name]
    item = "metrics" if name == "a name of stock's" else "x"
    *before, last = enumerate(saves)
    with gockpt.GoCkptManager(tmp_path, options=options, **given) as manager:
        for step, args in before:
            assert manager.save(step, args=ocp.args.Composite(**{item: args}))
            manager.wait_until_finished()
        step, args = last
        both = {"state": gockpt.GoCkptSave(TREE), item: args}
        with pytest.raises(ValueError, match=f"item `{item}` is a tree of arrays, but under that"):
            manager.save(step, args=ocp.args.Composite(**both))
        assert list(manager.all_steps()) == [step for step, _ in before]
        assert manager.save(step, args=ocp.args.Composite(state=both["state"], y=args))
    assert_is_whole(tmp_path / str(step) / "y")


@pytest.mark.filterwarnings("ignore::gockpt_jax.SnapshotOnlyWarning")
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(
    "handler", [gockpt.GoCkptHandler, ocp.StandardCheckpointHandler, ocp.PyTreeCheckpointHandler]
)
def test_a_tree_that_another_handler_of_trees_ends_can_be_read(
    tmp_path: Path, handler: Any
) -> None:
    """Where it is ours, with checksums."""
    others = {gockpt.GoCkptHandler, ocp.PyTreeCheckpointHandler} - {handler}
    save = ocp.args.StandardSave if len(others) == 1 else ocp.args.PyTreeSave
    with gockpt.GoCkptManager(tmp_path, item_handlers={"x": handler()}) as manager:
        assert manager.save(0, args=ocp.args.Composite(x=save(TREE)))
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "0/x")
    np.testing.assert_array_equal(restored["w"], TREE["w"])
    if handler is gockpt.GoCkptHandler:
        assert_is_whole(tmp_path / "0/x")


@pytest.mark.parametrize("save", [gockpt.GoCkptSave, ocp.args.StandardSave, ocp.args.PyTreeSave])
@pytest.mark.parametrize("item", ["state", "x"])
def test_a_restore_leaves_trees_to_our_handler(tmp_path: Path, item: str, save: Any) -> None:
    args = ocp.args.Composite(**{item: save(TREE)})
    for step in range(2):
        with gockpt.GoCkptManager(tmp_path) as manager:
            if step:
                manager.restore(0)
            assert manager.save(step, args=args)
            manager.wait_until_finished()
            assert_is_whole(tmp_path / str(step) / item)


def test_what_is_not_saved_is_not_looked_at(manager: gockpt.GoCkptManager) -> None:
    """A loop calls `save` at every step: only an accepted one has its arguments refused."""
    assert not manager.save(0, args=gockpt.GoCkptSave({"x": object()}), metrics={"loss": object()})
    assert not refused(manager, args=gockpt.GoCkptSave({})).startswith("the state")
    with pytest.raises(TypeError, match="`args` must be checkpoint arguments, got a `dict`"):
        manager.save(0, args=STATE)  # of no save can these be
    assert manager.should_save(1)  # what was offered to `save` is of no concern to a question


@pytest.mark.parametrize("tree", [jnp.arange(3.0), np.arange(3), 2.5, {"a": None}])
def test_what_stock_stores_is_not_refused(tmp_path: Path, tree: Any) -> None:
    """A leaf alone, and a tree without any; nor metrics that nobody writes."""
    with gockpt.GoCkptManager(tmp_path) as manager:
        assert manager.save(0, args=gockpt.GoCkptSave(tree), metrics={"loss": object()})
        restored = manager.restore(0)
    jax.tree.map(np.testing.assert_array_equal, restored, tree)


def test_after_all_that_saves_go_on(manager: gockpt.GoCkptManager) -> None:
    assert manager.save(1, args=SAVE, metrics={"loss": 2.0})
    manager.wait_until_finished()
    restored = manager.restore(1, verify=True)
    np.testing.assert_array_equal(restored["w"], STATE["w"])
    manager.delete(1)


@jax.tree_util.register_pytree_node_class
class ArraysOnly:
    """As `jmp.DynamicLossScale` does, it looks at what it is given."""

    def __init__(self, value: Any):
        self.value, self.kind = value, jax.eval_shape(lambda: value).dtype

    def tree_flatten(self) -> Any:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


def test_a_node_that_takes_arrays_only(tmp_path: Path) -> None:
    """Stock refuses it, too. What it holds can be saved."""
    node = ArraysOnly(jnp.ones(3))
    with gockpt.GoCkptManager(tmp_path) as manager:
        with pytest.raises(TypeError, match="a node whose class looks at its leaves"):
            manager.save(0, args=gockpt.GoCkptSave({"scale": node}))
        manager._gockpt_session.resources.worker.wait_until_idle()
        assert manager._gockpt_session.host.used_bytes == 0
        assert manager.save(0, args=gockpt.GoCkptSave({"scale": node.value}))
        manager.wait_until_finished()
        assert manager.restore(0)["scale"].tolist() == [1, 1, 1]
