"""The manager is stock Orbax in all that is not about windows."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gc
import io
import json
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from window.training_loop import BATCH, SIZE, Options, assert_same, fresh, to_host, train, update

from gockpt_jax import GoCkptManager, GoCkptRestore, GoCkptSave, WindowOptions
from gockpt_jax.errors import NoCheckpointError, ProcessError, SnapshotOnlyWarning
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.saving.written import Written


class MySave(ocp.args.PyTreeSave):
    pass


class MyRestore(ocp.args.PyTreeRestore):
    pass


def test_saves_by_policy_keeps_and_restores_as_stock(tmp_path):
    options = Options(save_interval_steps=3, max_to_keep=2, keep_period=6)
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=2)) as manager:
        saved = train(manager, range(13))
        assert list(saved) == [0, 3, 6, 9, 12]
        assert manager.all_steps() == [0, 6, 9, 12]
        assert manager.latest_step() == 12
        assert_same(manager.restore(None), saved[12])
        target = jax.tree.map(jnp.zeros_like, fresh())
        restored = manager.restore(9, args=GoCkptRestore(target))
        assert jax.tree.structure(restored) == jax.tree.structure(target)
        assert_same(restored, saved[9])
        metadata = manager.item_metadata(12)
        assert metadata["params"]["w"].shape == (SIZE,)
    with ocp.CheckpointManager(tmp_path) as stock:
        restored = stock.restore(
            12, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
        )
        assert_same(restored["state"], saved[12])


def test_composite_with_siblings(tmp_path):
    def args(state, label):
        return {"args": ocp.args.Composite(
            state=GoCkptSave(state), data=ocp.args.JsonSave({"at": label}),
        )}  # fmt: skip

    options = Options(save_interval_steps=4)
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=3)) as manager:
        saved = train(manager, range(9), save_args=args)
        restored = manager.restore(
            8, args=ocp.args.Composite(state=GoCkptRestore(fresh()), data=ocp.args.JsonRestore())
        )
        assert restored["data"] == {"at": 8}
        assert_same(restored["state"], saved[8])
        everything = manager.restore(8)
        assert everything["data"] == {"at": 8}
        assert_same(everything["state"], saved[8])
        assert [r.kind for r in manager.reports] == ["snapshot", "window", "window"]


@pytest.mark.parametrize("save", [ocp.args.StandardSave, ocp.args.PyTreeSave, GoCkptSave])
@pytest.mark.parametrize(
    "restore", [ocp.args.StandardRestore, ocp.args.PyTreeRestore, GoCkptRestore]
)
def test_stock_arguments_on_the_same_manager(tmp_path, save, restore):
    state = to_host(update(fresh(), BATCH))
    with GoCkptManager(tmp_path) as manager:
        assert manager.save(0, args=save(update(fresh(), BATCH)))
        manager.wait_until_finished()
        options = {}
        if restore is ocp.args.PyTreeRestore:  # warns where shardings are left out, as in stock
            options["restore_args"] = ocp.checkpoint_utils.construct_restore_args(fresh())
        assert_same(manager.restore(0, args=restore(fresh(), **options)), state)
        assert_same(manager.restore(0), state)


def test_a_checkpoint_of_a_stock_manager(tmp_path):
    state = update(fresh(), BATCH)
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(5, args=ocp.args.StandardSave(state))
    with GoCkptManager(tmp_path) as manager:
        assert manager.latest_step() == 5
        assert_same(manager.restore(None, args=GoCkptRestore(fresh())), state)
        assert_same(manager.restore(5), state)
        assert manager.save(6, args=GoCkptSave(state))
        manager.wait_until_finished()
        assert_same(manager.restore(6), state)


class Tensor:
    """An array of another library."""

    def __array__(self, dtype=None, copy=None):
        return np.arange(3, dtype=np.int16)


@pytest.mark.parametrize("save", [ocp.args.StandardSave, GoCkptSave])
def test_scalars_of_numpy_and_tensors_are_saved_as_arrays(save, tmp_path):
    """As stock's `StandardSave` does."""
    scalars = {"f": np.float32(1.5), "i": np.int64(7), "b": np.bool_(True), "c": np.complex64(1j)}
    state = {**scalars, "tensor": Tensor(), "python": 3, "name": "x", "w": jnp.ones(2)}
    if save is ocp.args.StandardSave:
        del state["name"]  # which stock refuses there
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=save(state))
        restored = manager.restore(0)
        for name, scalar in scalars.items():
            assert (type(restored[name]), restored[name].dtype) == (np.ndarray, scalar.dtype)
            assert restored[name] == scalar
        np.testing.assert_array_equal(restored["tensor"], np.arange(3, dtype=np.int16))
        assert restored["python"] == 3
        target = jax.tree.map(lambda x: x, restored)
        again = manager.restore(0, args=GoCkptRestore(target))
        assert again.get("name") == state.get("name")
        assert_same(again["w"], state["w"])


def test_any_other_item_name(tmp_path):
    state = update(fresh(), BATCH)
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(model=GoCkptSave(state)))
        manager.wait_until_finished()
        restored = manager.restore(0, args=ocp.args.Composite(model=GoCkptRestore(fresh())))
        assert_same(restored["model"], state)


def test_metrics_choose_what_is_kept(tmp_path):
    options = Options(best_fn=lambda m: m["loss"], best_mode="min", max_to_keep=2)
    losses = {0: 3.0, 1: 1.0, 2: 2.0, 3: 4.0}
    with GoCkptManager(tmp_path, options=options) as manager:
        saved = train(manager, losses, save_args=lambda state, n: {
            "args": GoCkptSave(state), "metrics": {"loss": losses[n]},
        })  # fmt: skip
        assert manager.best_step() == 1
        assert set(manager.all_steps()) >= {1, 2}
        assert manager.metrics(1) == {"loss": 1.0}
        # As in stock: metrics do not make a bare item a composite.
        assert_same(manager.restore(1), saved[1])
        assert manager.item_metadata(1)["params"]["w"].shape == (SIZE,)


def test_what_the_loop_changes_after_a_save_is_not_in_it(tmp_path, monkeypatch):
    """Stock's handlers write JSON on other threads; these do so when the loop has gone on."""
    go_on, dumps, trainer = threading.Event(), json.dumps, threading.current_thread()

    def later(*args, **kwargs):
        assert threading.current_thread() is trainer or go_on.wait(60)
        return dumps(*args, **kwargs)

    seen = collections.OrderedDict(at=[7], by=("us", [1]))
    notes, metrics, metadata = {"seen": seen}, {"loss": 0.5}, {"by": ["us"]}
    options = ocp.CheckpointManagerOptions(best_fn=lambda found: found["loss"])
    with GoCkptManager(tmp_path, options=options) as manager:
        monkeypatch.setattr(json, "dumps", later)
        args = ocp.args.Composite(
            state=GoCkptSave({"w": jnp.ones(2)}), notes=ocp.args.JsonSave(notes)
        )
        manager.save(7, args=args, metrics=metrics, custom_metadata=metadata)
        seen["at"].append(8)
        seen["by"][1].append(2)
        seen["more"] = True
        metrics["loss"] = 7.0
        metadata["by"].append("them")
        go_on.set()
        manager.wait_until_finished()
        restored = manager.restore(7, args=ocp.args.Composite(notes=ocp.args.JsonRestore()))
        assert restored["notes"] == {"seen": {"at": [7], "by": ["us", [1]]}}
        assert manager.metrics(7) == {"loss": 0.5}
        assert manager.metadata(7).custom_metadata == {"by": ["us"]}


@pytest.mark.parametrize("relative", [False, True])
def test_step_prefix_and_non_ascii_directory(tmp_path, monkeypatch, relative):
    monkeypatch.chdir(tmp_path)
    directory = "běhy/první" if relative else tmp_path / "běhy/první"
    options = Options(step_prefix="krok", step_format_fixed_length=6)
    with GoCkptManager(directory, options=options) as manager:
        saved = train(manager, range(3))
        assert (tmp_path / "běhy/první/krok_000002/state").is_dir()
        assert_same(manager.restore(2), saved[2])
    with GoCkptManager(directory, options=options) as again:
        assert again.all_steps() == [0, 1, 2]


def test_users_handlers_are_kept(tmp_path):
    registry = ocp.DefaultCheckpointHandlerRegistry()
    notes = ocp.JsonCheckpointHandler(filename="notes.json")
    for args in (ocp.args.JsonSave, ocp.args.JsonRestore):
        registry.add("notes", args, notes)
    with GoCkptManager(tmp_path, handler_registry=registry) as manager:
        args = ocp.args.Composite(state=GoCkptSave(fresh()), notes=ocp.args.JsonSave({"a": 1}))
        manager.save(0, args=args)
        manager.wait_until_finished()
        assert manager.restore(0)["notes"] == {"a": 1}
    assert (tmp_path / "0/notes/notes.json").is_file()


@pytest.mark.parametrize("bare", [True, False])
def test_handlers_by_item(bare, tmp_path):
    """As loops give them to stock: one for the bare item, or by name."""
    notes = ocp.JsonCheckpointHandler(filename="notes.json")
    handlers = notes if bare else {"notes": notes}
    save, restore = ocp.args.JsonSave({"a": 1}), ocp.args.JsonRestore()
    if not bare:
        save, restore = ocp.args.Composite(notes=save), ocp.args.Composite(notes=restore)
    with GoCkptManager(tmp_path, item_handlers=handlers) as manager:
        manager.save(0, args=save)
        want = {"a": 1} if bare else ocp.args.Composite(notes={"a": 1})
        assert manager.restore(0, args=restore) == manager.restore(0) == want
    assert (tmp_path / "0" / ("state" if bare else "notes") / "notes.json").is_file()


def test_a_stock_handler_of_trees_is_used_and_warned_of(tmp_path):
    handlers = {"items": ocp.PyTreeCheckpointHandler(use_zarr3=True)}
    with pytest.warns(SnapshotOnlyWarning, match=r"`items` know nothing.*pytree_options"):
        manager = GoCkptManager(tmp_path, item_handlers=handlers)
    with manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(fresh())))
        args = ocp.args.PyTreeRestore(
            fresh(), restore_args=ocp.checkpoint_utils.construct_restore_args(fresh())
        )
        assert_same(manager.restore(0, args=ocp.args.Composite(items=args))["items"], fresh())
    assert json.loads((tmp_path / "0/items/_METADATA").read_text())["use_zarr3"]


def test_no_windows_are_opened_for_what_others_handlers_take(tmp_path):
    """tunix gives its own; armed steps and staged copies would be for nothing."""
    handlers, options = {"items": ocp.PyTreeCheckpointHandler()}, Options(save_interval_steps=4)
    with pytest.warns(SnapshotOnlyWarning):
        manager = GoCkptManager(
            tmp_path, options=options, item_handlers=handlers, window=WindowOptions(steps=2)
        )
    with manager:
        step, state, seen = manager.wrap(update), fresh(), []
        for label in range(14):
            state = step(state, BATCH)
            seen.append(manager.window_status)
            item = ocp.args.PyTreeSave(state)
            manager.save(label, args=ocp.args.Composite(items=item))
        assert manager.all_steps() == [0, 4, 8, 12]
        assert set(seen) == {"idle"}
        told = io.StringIO()
        manager.explain(told)
        assert "no windows: the handlers given to the manager" in told.getvalue()
        manager.save(14, args=GoCkptSave(state), force=True)  # a tree for ours, after all
        manager.explain(told)
        assert "windows of 2 steps" in told.getvalue()


def test_a_state_in_an_item_within_an_item_has_no_windows_and_is_told_of(tmp_path):
    """Orbax saves what is inside by its own handlers; saves are synchronous, as others may fail."""
    options = Options(save_interval_steps=4, enable_async_checkpointing=False)
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=2)) as manager:
        step, state = manager.wrap(update), fresh()
        for label in range(9):
            state = step(state, BATCH)
            inside = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
            manager.save(label, args=ocp.args.Composite(agent=inside))
        told = io.StringIO()
        manager.explain(told)
        assert "its trees are in a `Composite` within a `Composite`" in told.getvalue()
        assert manager.reports == ()


def test_what_is_no_tree_is_named_as_stock_names_it(tmp_path):
    save, restore = ocp.args.JsonSave({"a": 1}), ocp.args.JsonRestore()
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=save)
        manager.save(1, args=GoCkptSave(fresh()))
        assert manager.restore(0, args=restore) == manager.restore(0) == {"a": 1}
        assert_same(manager.restore(1), fresh())
        with pytest.raises(NoCheckpointError, match="no item `default`; it has `state`"):
            manager.restore(1, args=restore)
    with ocp.CheckpointManager(tmp_path) as stock:
        assert stock.restore(0, args=restore) == {"a": 1}


@pytest.mark.parametrize("writer", [GoCkptManager, ocp.CheckpointManager])
def test_an_item_that_the_user_has_named_default(writer, tmp_path):
    """As Kauldron names its state, beside others: no item without a name, which Orbax calls so."""
    state, timer = ocp.args.StandardSave(fresh()), ocp.args.JsonSave({"a": 1})
    names = ["default", "timer"]
    with writer(tmp_path, item_names=names) as manager:
        manager.save(0, args=ocp.args.Composite(default=state, timer=timer))
    wanted = ocp.args.Composite(
        default=ocp.args.StandardRestore(fresh()), timer=ocp.args.JsonRestore()
    )
    with GoCkptManager(tmp_path) as manager:
        assert_same(manager.restore(0), fresh())  # stock has no other idea of it, either
        restored = manager.restore(0, args=wanted)
        assert_same(restored["default"], fresh())
        assert restored["timer"] == {"a": 1}
    with GoCkptManager(tmp_path, item_names=names) as manager:
        assert set(manager.restore(0).keys()) == set(names)
        assert set(manager.item_metadata(0).keys()) == set(names)
        assert_same(manager.restore(0, args=GoCkptRestore(fresh())), fresh())


def test_a_bare_item_beside_one_that_was_named_default_is_ours(tmp_path):
    both = ocp.args.Composite(default=GoCkptSave({"w": jnp.ones(2)}), state=GoCkptSave(fresh()))
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=both)
        assert_same(manager.restore(0, args=GoCkptRestore(fresh())), fresh())


@pytest.mark.parametrize("named", [True, False])
def test_a_users_handler_finalizes_what_it_has_written(named, tmp_path):
    """Under no name, it takes items of all names. Unfinished, its item could not be read."""
    ended = []

    class Users(ocp.PyTreeCheckpointHandler):
        def finalize(self, directory):
            ended.append(directory.name)
            super().finalize(directory)

    registry = ocp.DefaultCheckpointHandlerRegistry()
    for args in (MySave, MyRestore):
        registry.add(None, args, Users(use_ocdbt=True))
    save, restore = (
        MySave(fresh()),
        MyRestore(fresh(), ocp.checkpoint_utils.construct_restore_args(fresh())),
    )
    if named:
        save, restore = ocp.args.Composite(state=save), ocp.args.Composite(state=restore)
    with pytest.warns(SnapshotOnlyWarning):
        manager = GoCkptManager(tmp_path, handler_registry=registry)
    with manager:
        manager.save(0, args=save)
        manager.wait_until_finished()
        assert [name.partition(".")[0] for name in ended] == ["state" if named else "default"]
        restored = manager.restore(0, args=restore)
        assert_same(restored["state"] if named else restored, fresh())
        manager.save(1, args=GoCkptSave(fresh()))
        assert_same(manager.restore(1, args=GoCkptRestore(fresh())), fresh())
    names = [[item.name for item in (tmp_path / step).iterdir() if item.is_dir()] for step in "01"]
    assert names == [["state" if named else "default"], ["state"]]


def test_a_users_handler_of_stocks_arguments_is_kept(tmp_path):
    registry, users = ocp.DefaultCheckpointHandlerRegistry(), ocp.PyTreeCheckpointHandler()
    for args in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
        registry.add(None, args, users)
    with pytest.warns(SnapshotOnlyWarning, match="`None` know nothing"):
        manager = GoCkptManager(tmp_path, handler_registry=registry)
    with manager:
        found = manager._gockpt_naming.registry
        assert found.get(None, ocp.args.PyTreeSave) is users
        assert isinstance(found.get(None, ocp.args.StandardSave), StateHandler)


def test_a_handler_may_have_the_same_arguments_for_both(tmp_path):
    class Notes(ocp.JsonCheckpointHandler):
        pass

    @ocp.args.register_with_handler(Notes, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class NotesArgs(ocp.args.CheckpointArgs):
        item: dict[str, int] | None = None

    with GoCkptManager(tmp_path, item_handlers={"notes": Notes()}) as manager:
        manager.save(0, args=ocp.args.Composite(notes=NotesArgs({"a": 1})))
        assert manager.restore(0)["notes"] == {"a": 1}


def test_a_handler_without_arguments_is_refused(tmp_path):
    class Unregistered(ocp.JsonCheckpointHandler):
        pass

    with pytest.raises(ValueError, match="item `notes` needs a handler with checkpoint arguments"):
        GoCkptManager(tmp_path, item_handlers={"notes": Unregistered()})


def test_who_names_items_gets_names_back(tmp_path):
    """A bare item is named `state` on disk, and so may be one that the caller named."""
    bare, named = GoCkptSave(fresh()), ocp.args.Composite(state=GoCkptSave(fresh()))
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=named)
        assert_same(manager.restore(0)["state"], fresh())
        assert set(manager.metadata(0).item_metadata.keys()) == {"state"}
        manager.save(1, args=bare)
        assert_same(manager.restore(0), fresh())
    handlers = {"notes": ocp.JsonCheckpointHandler()}
    for names in ({"item_names": ("state",)}, {"item_handlers": handlers}):
        with GoCkptManager(tmp_path, **names) as manager:
            assert_same(manager.restore(1)["state"], fresh())
    with GoCkptManager(tmp_path) as manager:
        assert_same(manager.restore(0), fresh())
        assert manager.metadata(1).item_metadata["params"]["w"].shape == (SIZE,)


@pytest.mark.parametrize("metrics", [None, {"loss": 0.5}])
def test_a_look_at_an_unnamed_item_of_stock_binds_nothing(tmp_path, metrics):
    options = Options(best_fn=(lambda found: found["loss"]) if metrics else None)
    with ocp.CheckpointManager(tmp_path, options=options) as stock:
        args = ocp.args.StandardSave(fresh())
        stock.save(5, args=args, metrics=metrics, custom_metadata={"a": 1})
        stock.wait_until_finished()
        expected = stock.metadata(5).metrics
    with GoCkptManager(tmp_path, options=options) as manager:
        assert manager.metadata(5).custom_metadata == {"a": 1}
        assert manager.metadata(5).metrics == expected == (metrics or {})
        assert manager.item_metadata(5)["params"]["w"].shape == (SIZE,)
        assert manager.save(6, args=ocp.args.Composite(state=GoCkptSave(fresh())))
        assert_same(manager.restore(6)["state"], fresh())


@pytest.mark.parametrize("metrics", [None, {"loss": 0.5}])
@pytest.mark.parametrize("names", [None, ("state",)])
def test_an_unnamed_item_of_stock_alone_is_what_is_meant(tmp_path, names, metrics):
    """By who names items, too; and the manager goes on to name its own."""
    options = Options(best_fn=(lambda found: found["loss"]) if metrics else None)
    for label, args in enumerate((ocp.args.JsonSave({"a": 1}), ocp.args.StandardSave(fresh()))):
        with ocp.CheckpointManager(tmp_path, options=options) as stock:  # one takes one kind
            stock.save(label, args=args, metrics=metrics)
    with GoCkptManager(tmp_path, options=options, item_names=names) as manager:
        assert manager.restore(0, args=ocp.args.JsonRestore()) == {"a": 1}
        assert_same(manager.restore(1), fresh())
        assert manager.save(2, args=GoCkptSave(fresh()), metrics=metrics)
        restored = manager.restore(2, args=ocp.args.Composite(state=GoCkptRestore(fresh())))
        assert_same(restored["state"], fresh())


def test_what_are_no_arguments_is_told_where_nothing_is_saved_too(tmp_path):
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=5)) as manager:
        manager.save(0, args=GoCkptSave(fresh()))
        with pytest.raises(TypeError, match="must be checkpoint arguments, got a `dict`"):
            manager.save(1, args=fresh())


def test_a_misspelt_argument_is_told_where_nothing_is_saved_too(tmp_path):
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=5)) as manager:
        manager.save(0, args=GoCkptSave(fresh()))
        with pytest.raises(TypeError, match="unexpected keyword argument 'metric'"):
            manager.save(1, args=GoCkptSave(fresh()), metric={"loss": 1.0})


def test_metadata_of_the_directory_is_stocks(tmp_path):
    with GoCkptManager(tmp_path, metadata={"run": 7}) as manager:
        assert manager.metadata().custom_metadata == {"run": 7}
    with ocp.CheckpointManager(tmp_path) as stock:
        assert stock.metadata().custom_metadata == {"run": 7}


def test_the_newest_step_of_another_directory(tmp_path):
    with (
        ocp.CheckpointManager(tmp_path / "stock") as stock,
        GoCkptManager(tmp_path / "ours") as ours,
    ):
        for label in range(2):
            stock.save(label, args=ocp.args.StandardSave({"label": label}))
            ours.save(label, args=ocp.args.StandardSave({"label": label}))
    with GoCkptManager(tmp_path / "mine") as manager:
        for name in ("stock", "ours"):
            directory = tmp_path / name
            assert manager.restore(None, directory=directory) == {"label": 1}
            args = ocp.args.StandardRestore({"label": 0})
            assert manager.restore(None, args=args, directory=directory) == {"label": 1}
        with pytest.raises(NoCheckpointError, match="to restore: it does not exist"):
            manager.restore(None, directory=tmp_path / "nowhere")
        assert manager.save(2, args=ocp.args.Composite(state=GoCkptSave(fresh())))


def test_steps_that_were_written_under_another_name(tmp_path):
    names = [ocp.path.step.standard_name_format(step_prefix=p) for p in ("new", "old")]
    with GoCkptManager(tmp_path, options=Options(step_name_format=names[1])) as manager:
        manager.save(0, args=GoCkptSave(fresh()))
    both = Options(step_name_format=ocp.path.step.composite_name_format(names[0], names))
    with GoCkptManager(tmp_path, options=both) as manager:
        manager.save(1, args=GoCkptSave(fresh()))
        assert sorted(manager.all_steps()) == [0, 1]
        for label in (0, 1):
            assert_same(manager.restore(label), fresh())
            assert manager.item_metadata(label)["params"]["w"].shape == (SIZE,)
    assert (tmp_path / "new_1/state").is_dir()


def test_synchronous_saving(tmp_path):
    options = Options(enable_async_checkpointing=False, save_interval_steps=4)
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=3)) as manager:
        step, state = manager.wrap(update), fresh()
        for label in range(9):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
            assert manager.latest_step() == label - label % 4  # visible at once
            assert len(manager.reports) == label // 4 + 1  # and told of
        assert [r.kind for r in manager.reports] == ["snapshot", "window", "window"]
        assert_same(manager.restore(8), state)


def test_read_only_managers_restore_and_do_not_save(tmp_path):
    with GoCkptManager(tmp_path) as manager:
        saved = train(manager, range(2))
    with GoCkptManager(tmp_path, options=Options(read_only=True)) as reader:
        assert_same(reader.restore(None), saved[1])
        assert not reader.save(2, args=GoCkptSave(fresh()))
        assert reader.all_steps() == [0, 1]


def test_nothing_to_restore(tmp_path):
    with GoCkptManager(tmp_path) as manager:
        assert manager.latest_step() is None
        with pytest.raises(FileNotFoundError):
            manager.restore(None, args=GoCkptRestore(fresh()))


def test_a_save_of_plain_files_says_nothing_of_a_merge(tmp_path, caplog):
    with GoCkptManager(tmp_path, pytree_options={"use_ocdbt": False}) as manager:
        manager.save(0, args=GoCkptSave({"w": jnp.ones(3)}))
        manager.wait_until_finished()
    assert "merge" not in caplog.text


@pytest.mark.parametrize("has_begun", [False, True])
def test_each_attempt_at_a_save_is_voted_on(tmp_path, has_begun):
    """The second one is in the same directory as the first, which was refused."""

    class Votes:
        def __init__(self):
            self.begun = []

        def begin(self, label):
            self.begun.append(label)

    gone = jnp.ones(2)
    gone.delete()
    handler = StateHandler()
    handler.begun.label = 7
    votes = handler.votes = Votes()
    item = tmp_path / "7.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp"
    for _ in range(2):
        with pytest.raises(ValueError, match="donated to a later step, or deleted"):
            asyncio.run(handler.async_save(item, GoCkptSave({"w": gone})))
        if has_begun:
            handler.begun.give_up(OSError())  # as a manager does then
    assert votes.begun == [7, 7]
    handler.close()


def test_votes_are_cancelled_with_a_refused_save_and_have_the_last_word(tmp_path, monkeypatch):
    """What fails here is why; what is raised is what the other processes raise."""

    class Votes:
        failure = None
        cancelled = 0

        def begin(self, label):
            pass

        def cancel(self):
            self.cancelled += 1

    def fail(*_):
        raise RuntimeError("injected")

    def fail_with(error):
        def result(*_):
            raise error

        return result

    args = GoCkptSave({"w": jnp.ones(2)})
    with GoCkptManager(tmp_path) as manager:
        votes = manager._gockpt_handler.votes = Votes()
        manager.save(0, args=args)
        manager.wait_until_finished()
        assert votes.cancelled == 0
        with pytest.raises(ValueError, match="already exists"):
            manager.save(0, args=args, force=True)
        assert votes.cancelled == 1
        monkeypatch.setattr(Written, "result", fail)
        for label, failure in ((1, None), (2, ProcessError("process 1 has failed"))):
            votes.failure = failure
            manager.save(label, args=args)
            with pytest.raises(RuntimeError, match="process 1" if failure else "injected") as told:
                manager.wait_until_finished()
            assert str(told.value if failure is None else told.value.__cause__) == "injected"
        votes.failure = why = RuntimeError("injected")  # the one that was told is this one's own
        monkeypatch.setattr(Written, "result", fail_with(why))
        manager.save(3, args=args)
        with pytest.raises(RuntimeError, match="injected") as told:
            manager.wait_until_finished()
        assert told.value.__cause__ is None
        # Without arrays nobody votes: the last word was on another save.
        monkeypatch.setattr(ocp.JsonCheckpointHandler, "finalize", fail, raising=False)
        manager.save(4, args=ocp.args.Composite(notes=ocp.args.JsonSave({})))
        with pytest.raises(RuntimeError, match="injected"):
            manager.wait_until_finished()
        assert manager.all_steps() == [0]


@pytest.mark.usefixtures("its_own_garbage")
def test_a_restore_holds_no_state_that_the_loop_has_dropped(tmp_path):
    """On a full device there is no room for two: that of the last step, and the restored one."""
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=4)) as manager:
        step, state = manager.wrap(update), fresh()
        for label in range(7):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
        manager.wait_until_finished()
        dropped = weakref.ref(state["params"]["w"])
        target = jax.eval_shape(fresh)
        del state
        assert dropped() is not None  # a window would go on from it
        state = manager.restore(4, args=GoCkptRestore(target))
        gc.collect()
        assert dropped() is None
        for label in range(5, 13):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 4, 8, 12]
        assert_same(manager.restore(12), to_host(state))


@pytest.mark.parametrize(
    "wait", ["save", "restore", "restore_older", "delete", "wait_until_finished", "close"]
)
def test_the_users_own_callback_cannot_wait_for_its_save(tmp_path, wait):
    """It would wait for itself: told so at once, and the save is made."""
    told = []
    calls = {
        "save": lambda: manager.save(2, args=GoCkptSave(fresh()), force=True),
        "restore": lambda: manager.restore(1),
        "restore_older": lambda: manager.restore(0),
        "delete": lambda: manager.delete(1),
        "wait_until_finished": lambda: manager.wait_until_finished(),
        "close": lambda: manager.close(),
    }

    def callback():
        if manager.latest_step() == 1:
            with pytest.raises(RuntimeError, match="it cannot wait for that save"):
                calls[wait]()
            told.append(manager.all_steps())

    options = Options(async_options=ocp.AsyncOptions(post_finalization_callback=callback))
    with GoCkptManager(tmp_path, options=options) as manager:
        saved = train(manager, range(2))
        assert told == [[0, 1]]
        for label, state in saved.items():
            assert_same(manager.restore(label), state)
