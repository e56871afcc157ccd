"""Invariant 5: what a save that was given up has left behind writes into no other checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from broken_item import Broken, BrokenSave
from etils import epath
from orbax.checkpoint import v1
from orbax.checkpoint._src.path import async_path

import gockpt_jax as gockpt
from gockpt_jax.storage.saving.left import LeftBehind
from gockpt_jax.storage.saving.written import Written
from gockpt_jax.storage.writing import leaf_writer
from gockpt_jax.v1 import GoCkptCheckpointable

WAIT_SECS = 60
LATE = 1.0
"""What the save that is given up has written."""


def tree(value: float) -> Any:
    return {f"w{n}": jnp.full(1000, value) for n in range(3)}


class LateWriter:
    """Stands before its first chunk until the next save waits for it, or has written its own.

    In the latter case it goes on before that save is committed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.may_go_on = threading.Event()
        self._began = threading.Event()
        self._threads: set[threading.Thread] = set()
        check, result = leaf_writer._check_data, Written.result
        wait = LeftBehind.wait

        def late(data: Any, box: Any, dtype: Any) -> None:
            if data.flat[0] == LATE:
                self._threads.add(threading.current_thread())
                self._began.set()
                assert self.may_go_on.wait(WAIT_SECS)
            check(data, box, dtype)

        def last(written: Written, timeout: float | None = None) -> None:
            result(written, timeout)
            self.go_on()

        def waits(left: LeftBehind, label: int | None = None) -> None:
            if left._left:
                self.may_go_on.set()
            wait(left, label)

        monkeypatch.setattr(leaf_writer, "_check_data", late)
        monkeypatch.setattr(Written, "result", last)
        monkeypatch.setattr(LeftBehind, "wait", waits)

    def wait_until_it_is_late(self) -> None:
        assert self._began.wait(WAIT_SECS)

    def go_on(self) -> None:
        """It ends, if it is there, and what of Orbax's waits for it."""
        self.may_go_on.set()
        for thread in threading.enumerate():
            if thread in self._threads or thread.name == "write_metadata_after_commits":
                threading.Thread.join(thread)  # Orbax's own raises what the thread has raised


@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_label_is_saved_again_while_its_failed_save_is_written(
    kind: str, use_ocdbt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another item has failed: Orbax waits for no more of them, and takes the same directory."""
    late, layout = LateWriter(monkeypatch), {"use_ocdbt": use_ocdbt}
    items = {"broken": Broken()}
    manager: Any
    if kind == "ours":
        manager = gockpt.GoCkptManager(tmp_path, pytree_options=layout, item_handlers=items)
    else:
        items["state"] = gockpt.GoCkptHandler(**layout)
        manager = ocp.CheckpointManager(tmp_path, item_handlers=items)

    def save(value: float, *, works: bool = True) -> None:
        state = gockpt.GoCkptSave(tree(value))
        args = ocp.args.Composite(broken=BrokenSave(works=works), state=state)
        manager.save(5, args=args, force=True)

    with manager:
        save(LATE, works=False)
        late.wait_until_it_is_late()
        with pytest.raises(OSError, match="the disk is gone"):
            manager.wait_until_finished()
        if kind == "stock":  # Orbax has made the directory before we know of it
            with pytest.raises(gockpt.StorageError, match="was still being written"):
                save(2.0)
        save(3.0)
        manager.wait_until_finished()
        late.go_on()
        target = gockpt.GoCkptRestore(tree(0.0), verify=True)
        restored = manager.restore(5, args=ocp.args.Composite(state=target))["state"]
    for leaf in restored.values():
        np.testing.assert_array_equal(leaf, 3.0)


@pytest.mark.parametrize("kind", ["managers", "checkpointers", "prefixes"])
def test_what_others_of_its_handler_write_is_none_of_a_savers_affair(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is closed, or saves, while the other's healthy save is being written."""
    late, handler = LateWriter(monkeypatch), gockpt.GoCkptHandler()
    savers: list[Any]
    if kind == "checkpointers":
        savers = [ocp.AsyncCheckpointer(handler) for _ in range(2)]
    else:
        roots = [tmp_path / name for name in ("a", "b")] if kind == "managers" else [tmp_path] * 2
        options = [ocp.CheckpointManagerOptions(step_prefix=prefix) for prefix in ("best", "last")]
        savers = [
            ocp.CheckpointManager(root, options=given, item_handlers=handler)
            for root, given in zip(roots, options, strict=True)
        ]
    labels = [tmp_path / "a_0", tmp_path / "b_0"] if kind == "checkpointers" else [0, 0]
    savers[0].save(labels[0], args=gockpt.GoCkptSave(tree(LATE)))
    late.wait_until_it_is_late()
    if kind == "prefixes":
        savers[1].save(labels[1], args=gockpt.GoCkptSave(tree(2.0)))
        assert not late.may_go_on.is_set()
    else:
        savers[1].close()
    late.may_go_on.set()
    savers[0].wait_until_finished()
    np.testing.assert_array_equal(savers[0].restore(labels[0])["w2"], LATE)
    for saver in savers:
        saver.close()
    assert {r.error for r in handler.reports} == {None}


class MadeTwice:
    """A step's directory that two of Orbax's threads find missing, and make."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.may_be_made, self._is_made, self._calls = threading.Event(), threading.Event(), 0
        mkdir, wait = async_path.mkdir, LeftBehind.wait_for_directory

        async def make(path: epath.Path, **options: Any) -> None:
            if path.parent.name != "run":
                return await mkdir(path, **options)
            self._calls += 1
            if self._calls == 1:
                assert self.may_be_made.wait(WAIT_SECS)
            else:
                self.may_be_made.set()
                assert self._is_made.wait(WAIT_SECS)
            await mkdir(path, **options)
            self._is_made.set()

        def waits(left: LeftBehind) -> None:
            self.may_be_made.set()
            wait(left)

        monkeypatch.setattr(async_path, "mkdir", make)
        monkeypatch.setattr(LeftBehind, "wait_for_directory", waits)


@pytest.mark.parametrize("kind", ["manager", "checkpointer"])
def test_a_label_is_saved_again_while_orbax_makes_its_directory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a save that was refused meanwhile; it made it for the second time, and failed."""
    root, handler = tmp_path / "run", gockpt.GoCkptHandler()
    root.mkdir()
    MadeTwice(monkeypatch)
    saver: Any
    if kind == "manager":
        saver = ocp.CheckpointManager(root, item_handlers=handler)
    else:
        saver = ocp.AsyncCheckpointer(handler)
    where: Any = 0 if kind == "manager" else root / "0"
    with saver:
        with pytest.raises(ValueError, match="cannot be stored"):
            saver.save(where, args=gockpt.GoCkptSave({"w": object()}))
        saver.save(where, args=gockpt.GoCkptSave(tree(2.0)))
        saver.wait_until_finished()
        np.testing.assert_array_equal(saver.restore(where)["w2"], 2.0)


def chunks_written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    write, written = leaf_writer.LeafWriter._written, []
    monkeypatch.setattr(
        leaf_writer.LeafWriter, "_written", lambda *args: written.append(args) or write(*args)
    )
    return written


def test_what_was_given_up_stops_at_its_next_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save waits for it."""
    late, written = LateWriter(monkeypatch), chunks_written(monkeypatch)
    with gockpt.GoCkptManager(tmp_path, item_handlers={"broken": Broken()}) as manager:
        args = ocp.args.Composite(broken=BrokenSave(), state=gockpt.GoCkptSave(tree(LATE)))
        manager.save(0, args=args)
        late.wait_until_it_is_late()
        with pytest.raises(OSError, match="the disk is gone"):
            manager.wait_until_finished()
        late.go_on()
        assert written == []
        resources = manager._gockpt_session.resources
        resources.worker.wait_until_idle()
        assert resources.host.used_bytes == 0


@pytest.mark.skipif(not hasattr(ocp.AsyncCheckpointer, "cancel"), reason="an older Orbax")
@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_a_save_that_is_cancelled(
    use_ocdbt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, handler = LateWriter(monkeypatch), gockpt.GoCkptHandler(use_ocdbt=use_ocdbt)
    written = chunks_written(monkeypatch)
    with ocp.AsyncCheckpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "0", args=gockpt.GoCkptSave(tree(LATE)))
        late.wait_until_it_is_late()
        checkpointer.cancel()
        late.go_on()
        checkpointer.wait_until_finished()
        assert written == []
        assert not (tmp_path / "0").exists()
        checkpointer.save(tmp_path / "0", args=gockpt.GoCkptSave(tree(2.0)))
        checkpointer.wait_until_finished()
        np.testing.assert_array_equal(checkpointer.restore(tmp_path / "0")["w2"], 2.0)
        told = [(r.step, r.error) for r in handler.reports]
    assert told == [(0, "CancelledError: "), (0, None)]


@pytest.mark.skipif(not hasattr(v1.training.Checkpointer, "cancel"), reason="an older v1")
def test_a_save_of_v1_that_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateWriter(monkeypatch)
    with v1.training.Checkpointer(tmp_path) as checkpointer, GoCkptCheckpointable() as windows:
        checkpointer.save_checkpointables_async(0, {"state": windows(tree(LATE))})
        late.wait_until_it_is_late()
        checkpointer.cancel(0)
        late.go_on()
        assert not (tmp_path / "0").exists()
        assert checkpointer.save_checkpointables(1, {"state": windows(tree(2.0))})
        loaded = checkpointer.load_checkpointables(1, {"state": windows(tree(0.0))})
        np.testing.assert_array_equal(loaded["state"].item["w2"], 2.0)
    assert [(r.step, r.error is None) for r in windows.reports] == [(0, False), (1, True)]
