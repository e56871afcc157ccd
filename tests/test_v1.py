"""Windows under Orbax's v1 `Checkpointer`."""

from __future__ import annotations

import asyncio
import gc
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1
from patience import writers_have_no_patience
from window.training_loop import BATCH, WAIT_SECS, assert_same, fresh, to_host, update

import gockpt_jax as gockpt
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.saving.written import Written
from gockpt_jax.v1 import GoCkptCheckpointable

pytestmark = pytest.mark.skipif(
    not hasattr(v1.training.Checkpointer, "load"), reason="an older v1 (docs/integrations.md)"
)
EVERY = v1.training.save_decision_policies.FixedIntervalPolicy(6)
LABELS = range(1, 25)  # 6, 12, 18 and 24 are saved
WINDOW = gockpt.WindowOptions(steps=4)


def save_all(checkpointer, windows, save):
    step, state, given = windows.wrap(update), fresh(), {}
    for label in LABELS:
        state = step(state, BATCH)
        if save(checkpointer, label, {"state": windows(state)}):
            given[label] = to_host(state)
    return given


def in_the_background(checkpointer, label, items):
    response = checkpointer.save_checkpointables_async(label, items)
    if response is not None and label == LABELS[-1]:
        response.result()  # loading does not wait for it
    return response is not None


@pytest.mark.parametrize(
    "save", [v1.training.Checkpointer.save_checkpointables, in_the_background],
    ids=["blocking", "async"],
)  # fmt: skip
def test_v1_saves_are_windows_and_anybody_loads_them(save, tmp_path):
    with (
        v1.training.Checkpointer(tmp_path, save_decision_policy=EVERY) as checkpointer,
        GoCkptCheckpointable(window=WINDOW, save_decision_policy=EVERY) as windows,
    ):
        given = save_all(checkpointer, windows, save)
        for label, want in given.items():
            loaded = checkpointer.load_checkpointables(label, {"state": windows(fresh())})
            assert_same(loaded["state"].item, want)
    # Two saves tell which update bears which label.
    kinds = [(6, "snapshot"), (12, "snapshot"), (18, "window"), (24, "window")]
    assert [(r.step, r.kind) for r in windows.reports] == kinds
    with v1.training.Checkpointer(tmp_path) as stock:
        assert_same(
            stock.load(18, jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh())), given[18]
        )
    with ocp.CheckpointManager(tmp_path) as older:
        target = ocp.args.Composite(state=ocp.args.StandardRestore(fresh()))
        assert_same(older.restore(24, args=target).state, given[24])


def test_other_checkpointables_beside_it(tmp_path):
    with (
        v1.training.Checkpointer(tmp_path) as checkpointer,
        GoCkptCheckpointable() as windows,
    ):
        state = windows.wrap(update)(fresh(), BATCH)
        items = {"state": windows(state), "cursor": {"position": 7}}
        assert checkpointer.save_checkpointables(0, items)
        loaded = checkpointer.load_checkpointables(
            0, {"state": windows(fresh()), "cursor": {"position": 0}}
        )
        assert loaded["cursor"]["position"] == 7
        assert_same(loaded["state"].item, to_host(state))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # there is no target
def test_v1_knows_a_tree_by_any_name(tmp_path):
    """As MaxText's `items`: without a target v1 goes by the handler that it says has written."""
    state = to_host(fresh())
    with (
        v1.training.Checkpointer(tmp_path / "ours") as checkpointer,
        GoCkptCheckpointable() as windows,
    ):
        checkpointer.save_checkpointables(0, {"items": windows(fresh()), "cursor": {"at": 7}})
    with v1.training.Checkpointer(tmp_path / "stock") as checkpointer:
        checkpointer.save_checkpointables(0, {"items": fresh(), "cursor": {"at": 7}})
    v1.save_checkpointables(tmp_path / "alone" / "0", {"items": GoCkptCheckpointable()(fresh())})
    told = [
        json.loads((tmp_path / name / "0" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
        for name in ("ours", "stock", "alone")
    ]
    assert told[0] == told[1] == {**told[2], "cursor": told[1]["cursor"]}
    for name in ("ours", "stock", "alone"):
        path = tmp_path / name / "0"
        assert_same(v1.load(path, checkpointable_name="items"), state)
        assert_same(v1.load_checkpointables(path)["items"], state)
        leaves = jax.tree.leaves(v1.metadata(path, checkpointable_name="items").metadata)
        assert [x.shape for x in leaves] == [x.shape for x in jax.tree.leaves(state)]
        with GoCkptCheckpointable() as windows:
            loaded = v1.load_checkpointables(path, {"items": windows(fresh())})["items"]
            assert loaded is windows
            assert_same(loaded.item, state)


def test_a_target_as_v1_describes_it(tmp_path):
    """By types of scalars, by what has a shape and a dtype, and by v1's own metadata."""

    class Abstract:
        shape, dtype = (2,), np.dtype(np.int32)

    state = {"w": jnp.arange(4.0), "n": 3, "numpy": np.arange(2, dtype=np.int32)}
    target = {"w": jax.eval_shape(lambda: state["w"]), "n": int, "numpy": Abstract()}
    target["w"] = target["w"].update(sharding=state["w"].sharding)
    with v1.training.Checkpointer(tmp_path) as checkpointer, GoCkptCheckpointable() as windows:
        checkpointer.save_checkpointables(0, {"state": windows(state)})
        known = checkpointer.checkpointables_metadata(0).metadata["state"]
        for given in (target, known):
            loaded = checkpointer.load_checkpointables(0, {"state": windows(given)})["state"].item
            assert_same(loaded, state)
            assert [type(loaded[x]) for x in ("n", "numpy")] == [int, np.ndarray]


def test_saves_that_overlap_are_told_apart(tmp_path, monkeypatch):
    """v1 takes a save for over whose end no thread had begun to wait for at the next call."""
    may_hear, may_end = threading.Event(), threading.Event()
    start, result = threading.Thread.start, Written.result

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "save_finalize":
            run = thread.run
            thread.run = lambda: may_hear.wait(WAIT_SECS) and run()
        start(thread)

    def end_late(written: Written, timeout: float | None = None) -> None:
        result(written, timeout)
        assert written._record.step != 2 or may_end.wait(WAIT_SECS)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    monkeypatch.setattr(Written, "result", end_late)
    every = v1.training.save_decision_policies.FixedIntervalPolicy(2)
    with (
        v1.training.Checkpointer(tmp_path, save_decision_policy=every) as checkpointer,
        GoCkptCheckpointable(window=WINDOW) as windows,
    ):
        step, state, given, responses, saves = windows.wrap(update), fresh(), {}, {}, {}
        for label in (2, 3, 4):
            state = step(state, BATCH)
            given[label] = to_host(state)
            items = {"state": windows(state)}
            responses[label] = checkpointer.save_checkpointables_async(label, items)
            saves[label] = checkpointer._manager._checkpointer
            if label == 3:
                may_hear.set()
        assert responses[3] is None
        responses[4].result()
        assert [r.step for r in windows.reports] == [4]
        may_end.set()
        saves[2].wait_until_finished()
        assert [r.step for r in windows.reports] == [4, 2]
        for label in (2, 4):
            loaded = checkpointer.load_checkpointables(label, {"state": windows(fresh())})
            assert_same(loaded["state"].item, given[label])


def test_saves_that_overlap_are_all_written(tmp_path, monkeypatch):
    """The next one gave back what the one before had not begun to write."""
    may_write, write = threading.Event(), StateHandler._begin_writing

    async def write_late(*args):
        assert await asyncio.to_thread(may_write.wait, WAIT_SECS)
        return await write(*args)

    monkeypatch.setattr(StateHandler, "_begin_writing", write_late)
    with GoCkptCheckpointable() as windows:
        step, state, given, responses = windows.wrap(update), fresh(), [], []
        for label in range(3):
            state = step(state, BATCH)
            given.append(to_host(state))
            items = {"state": windows(state)}
            responses.append(v1.save_checkpointables_async(tmp_path / f"{label}", items))
        may_write.set()
        for response in responses:
            response.result()
        assert sorted((r.step, r.error) for r in windows.reports) == [(n, None) for n in range(3)]
        for label, want in enumerate(given):
            loaded = v1.load_checkpointables(tmp_path / f"{label}", {"state": windows(fresh())})
            assert_same(loaded["state"].item, want)


@pytest.mark.usefixtures("its_own_garbage")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # v1's coroutines
@pytest.mark.parametrize("of", ["PathAwaitingCreation.create", "_Sub.await_creation"])
def test_a_save_without_a_directory_gives_its_bytes_back(of, tmp_path, monkeypatch):
    """v1 may drop what was to write it, or has it wait in vain."""

    async def fail(*_):
        raise OSError("no directory")

    of = of.replace("_Sub.", "_SubdirectoryAwaitingCreation.")
    with GoCkptCheckpointable() as windows:
        resources = windows._gockpt_session.resources
        with writers_have_no_patience(monkeypatch) as patch:
            patch.setattr(f"orbax.checkpoint.experimental.v1._src.path.async_utils.{of}", fail)
            response = v1.save_checkpointables_async(tmp_path / "1", {"state": windows(fresh())})
            with pytest.raises(OSError, match="no directory"):
                response.result()
        resources.worker.wait_until_idle()
        assert (resources.host.used_bytes > 0) == of.startswith("Path")
        v1.save_checkpointables(tmp_path / "2", {"state": windows(fresh())})
        resources.worker.wait_until_idle()
        assert resources.host.used_bytes == 0
        assert [(r.step, r.error is None) for r in windows.reports] == [(1, False), (2, True)]
    del response
    gc.collect()  # here, where these are expected


def test_what_fails_when_it_is_finalized_fails_the_save(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is gone")

    with GoCkptCheckpointable() as windows:
        checkpointer = v1.training.Checkpointer(tmp_path)
        monkeypatch.setattr(StateHandler, "finalize", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            checkpointer.save_checkpointables(0, {"state": windows(fresh())})
        with pytest.raises(OSError, match="the disk is gone"):
            checkpointer.close()
    assert not (tmp_path / "0").exists()


def test_a_failed_write_fails_the_save_and_the_next_one_is_whole(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is gone")

    with GoCkptCheckpointable() as windows:
        step = windows.wrap(update)
        state = step(fresh(), BATCH)
        # Orbax raises the error of a failed save again from whatever is called next, so the
        # checkpointer goes with it.
        failing = v1.training.Checkpointer(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr("gockpt_jax.storage.writing.leaf_writer._check_data", fail)
            with pytest.raises(OSError, match="the disk is gone"):
                failing.save_checkpointables(0, {"state": windows(state)})
        with pytest.raises(OSError, match="the disk is gone"):
            failing.close()
        state = step(state, BATCH)
        with v1.training.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.save_checkpointables(1, {"state": windows(state)})
            assert [c.step for c in checkpointer.checkpoints] == [1]
            loaded = checkpointer.load_checkpointables(1, {"state": windows(fresh())})
            assert_same(loaded["state"].item, to_host(state))
