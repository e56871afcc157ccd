"""The manager is stock Orbax in all that is not about windows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from window.training_loop import BATCH, SIZE, Options, assert_same, fresh, to_host, train, update

from gockpt_jax import GoCkptManager, GoCkptRestore, GoCkptSave, WindowOptions


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


def test_synchronous_saving(tmp_path):
    options = Options(enable_async_checkpointing=False, save_interval_steps=4)
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=3)) as manager:
        step, state = manager.wrap(update), fresh()
        for label in range(9):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
            assert manager.latest_step() == label - label % 4  # visible at once
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
