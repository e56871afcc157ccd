"""Deleting: what is listed is whole, and what is being written is not taken from its writers."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath

import gockpt_jax as gockpt
from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.managing import deleting
from gockpt_jax.storage.managing.deleting import Deleter

from .injection import InjectedError
from .places import at_place
from .trainer import LIMIT_SECS, Trainer, within_limit

step_names = ocp.path.step
Composite = ocp.CompositeCheckpointHandler


@pytest.mark.parametrize("place", ["draining", "just_saved"])
def test_a_save_under_way_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with Trainer(tmp_path) as trainer, at_place(trainer, place, monkeypatch) as release:
        stuck, found = threading.Event(), []
        wait, delete = ocp.CheckpointManager.wait_until_finished, Deleter.delete

        def waits(manager: Any) -> None:
            stuck.set()
            wait(manager)

        def deletes(deleter: Deleter, step: int) -> None:
            found.append(trainer.manager.is_saving_in_progress())
            stuck.set()
            delete(deleter, step)

        monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", waits)
        monkeypatch.setattr(Deleter, "delete", deletes)

        def let_go() -> None:
            assert stuck.wait(LIMIT_SECS)
            release()

        assert within_limit(lambda: trainer.manager.delete(8), meanwhile=let_go) is None
        assert found == [False]
        trainer.given.pop(8)
        trainer.assert_intact()
        trainer.run_past_next_window()
        trainer.assert_intact()


def test_another_checkpoint_is_deleted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trainer(tmp_path) as trainer, at_place(trainer, "draining", monkeypatch) as release:
        assert within_limit(lambda: trainer.manager.delete(4)) is None
        assert trainer.manager.is_saving_in_progress()
        release()
        trainer.given.pop(4)
        trainer.assert_intact()


def test_a_save_that_failed_is_told_and_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Trainer(tmp_path) as trainer,
        at_place(trainer, "sealed_and_failed", monkeypatch) as release,
    ):
        release()
        with pytest.raises(InjectedError):  # on this thread: Orbax tells each of them once
            trainer.manager.delete(8)
        with pytest.raises(FileNotFoundError, match="has no step `8`: found"):
            trainer.manager.delete(8)
        trainer.assert_intact()


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("hidden", [True, False])
def test_what_cannot_be_deleted_is_no_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool, is_async: bool
) -> None:
    """The save is visible, and says so. What is still listed is deleted with the next one."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=is_async)
    with gockpt.GoCkptManager(tmp_path, options=options) as manager:

        def save(step: int) -> None:
            assert manager.save(step, args=gockpt.GoCkptSave({"w": jnp.full(3, step)}))

        save(0)
        manager.wait_until_finished()
        with monkeypatch.context() as context:

            def refuse(*_: Any) -> None:
                raise (RuntimeError if hidden else PermissionError)("injected")

            if hidden:
                context.setattr(manager._gockpt_saves.last.deleter._stock, "delete", refuse)
            else:
                context.setattr(Deleter, "_hide", refuse)
            save(1)
            with pytest.warns(UserWarning, match="save of step 1 is complete.*injected"):
                manager.wait_until_finished()
        assert manager.reports[-1].error is None
        assert manager.all_steps() == ([1] if hidden else [0, 1])
        save(2)
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
        assert [report.error for report in manager.reports] == [None] * 3


def test_what_can_be_neither_deleted_nor_listed_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("injected")

    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with gockpt.GoCkptManager(tmp_path, options=options) as manager:
        assert manager.save(0, args=gockpt.GoCkptSave({"w": jnp.ones(3)}))
        manager.wait_until_finished()
        with monkeypatch.context() as context:
            context.setattr(Deleter, "_hide", refuse)
            context.setattr(manager, "reload", refuse)
            assert manager.save(1, args=gockpt.GoCkptSave({"w": jnp.ones(3)}))
            with pytest.warns(UserWarning, match="save of step 1 is complete.*injected"):
                manager.wait_until_finished()
        assert [report.error for report in manager.reports] == [None] * 2


@pytest.mark.parametrize("options", [{}, {"todelete_subdir": "bin"}], ids=["deleted", "moved"])
def test_a_label_is_saved_again_when_its_files_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Stock's thread would take those of the new save, which have the same name until its end."""
    go, gone = threading.Event(), threading.Event()
    delete, finalize = ocp.path.deleter.StandardCheckpointDeleter.delete, Composite.finalize

    def waits(secs: float) -> None:
        """For stock's thread, which begins then."""
        go.set()
        gone.wait(secs)

    def deletes(deleter: Any, step: int) -> None:
        assert go.wait(LIMIT_SECS)
        delete(deleter, step)
        gone.set()

    def finalizes(handler: Any, directory: Any) -> None:
        if deleted:  # and nobody has waited: it comes when the save is written, but for its end
            go.set()
            assert gone.wait(LIMIT_SECS)
        finalize(handler, directory)

    monkeypatch.setattr(deleting, "time", SimpleNamespace(sleep=waits))
    monkeypatch.setattr(ocp.path.deleter.StandardCheckpointDeleter, "delete", deletes)
    monkeypatch.setattr(Composite, "finalize", finalizes)
    manager_options = ocp.CheckpointManagerOptions(enable_background_delete=True, **options)
    deleted = False
    with gockpt.GoCkptManager(tmp_path, options=manager_options) as manager:
        for value in (1.0, 2.0):
            manager.save(3, args=gockpt.GoCkptSave({"w": jnp.full(2, value)}))
            manager.wait_until_finished()
            if not deleted:
                manager.delete(3)
                deleted = True
        assert manager.restore(3)["w"].tolist() == [2.0, 2.0]


def test_closing_waits_for_what_is_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock's thread is a daemon: the end of the script leaves the files that it has not had."""
    going = threading.Event()
    standard = ocp.path.deleter.StandardCheckpointDeleter
    threaded = ocp.path.deleter.ThreadedCheckpointDeleter
    delete, close = standard.delete, threaded.close

    def deletes(stock: Any, step: int) -> None:
        assert going.wait(LIMIT_SECS)
        delete(stock, step)

    def closes(stock: Any) -> None:
        going.set()
        close(stock)

    monkeypatch.setattr(standard, "delete", deletes)
    monkeypatch.setattr(threaded, "close", closes)
    options = ocp.CheckpointManagerOptions(enable_background_delete=True)
    with gockpt.GoCkptManager(tmp_path, options=options) as manager:
        manager.save(3, args=gockpt.GoCkptSave({"w": jnp.ones(2)}))
        manager.wait_until_finished()
        manager.delete(3)
    left = list(tmp_path.iterdir())
    going.set()
    assert left == []


def test_closing_ends_the_thread_of_deletions_where_the_last_save_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(handler: Any, directory: Any) -> None:
        raise OSError("injected")

    options = ocp.CheckpointManagerOptions(enable_background_delete=True)
    manager = gockpt.GoCkptManager(tmp_path, options=options)
    monkeypatch.setattr(Composite, "finalize", fails)
    manager.save(3, args=gockpt.GoCkptSave({"w": jnp.ones(2)}))
    with pytest.raises(gockpt.StorageError, match="injected"):
        manager.close()
    assert not manager._gockpt_saves.last.deleter._thread.is_alive()


class Told:
    """A deleter that notes what lies in a directory when it is told to begin."""

    def __init__(self, root: Path, thread: Any = None):
        self._root, self._delete_thread = root, thread
        self.found: list[list[str]] = []

    def delete(self, step: int) -> None:
        self.delete_steps([step])

    def delete_steps(self, steps: Sequence[int]) -> None:
        self.found.append(sorted(str(p.relative_to(self._root)) for p in self._root.glob("*/*")))


def _step(root: Path, name: str) -> Path:
    (root / name).mkdir()
    (root / name / "commit_success.txt").touch()
    (root / name / "state").touch()
    return root / name


def test_all_are_out_of_sight_before_the_first_file_goes(tmp_path: Path) -> None:
    """A process that is killed then leaves saves that never ended, by whatever they are known."""
    stock = Told(tmp_path)
    deleter = Deleter(stock, tmp_path, ocp.CheckpointManagerOptions())
    for name in "123":
        _step(tmp_path, name)
    deleter.delete(3)
    deleter.delete_steps([1, 2, 8])  # somebody has removed the last one
    hidden = [f"{n}.orbax-checkpoint-tmp/state" for n in "123"]
    left = [f"{n}/{file}" for n in "12" for file in ("commit_success.txt", "state")]
    assert stock.found == [sorted([*left, hidden[2]]), hidden]
    assert deleter.failure is None


@pytest.mark.parametrize("moved", [{}, {"todelete_full_path": "bin"}, {"todelete_subdir": "bin"}])
def test_in_a_bucket_the_marker_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: dict[str, str]
) -> None:
    """Nothing is renamed there. What is moved away as a whole keeps it."""
    monkeypatch.setattr(bucket, "is_bucket", lambda path: True)
    stock = Told(tmp_path)
    _step(tmp_path, "1")
    Deleter(stock, tmp_path, ocp.CheckpointManagerOptions(**moved)).delete(1)
    assert stock.found == [["1/commit_success.txt", "1/state"] if moved else ["1/state"]]


def test_one_process_hides_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Told(tmp_path)
    monkeypatch.setattr(ocp.multihost, "is_primary_host", lambda primary: primary == 1)
    for primary, name in ((0, "1"), (1, "1.orbax-checkpoint-tmp")):
        together = ocp.options.MultiprocessingOptions(primary_host=primary)
        options = ocp.CheckpointManagerOptions(multiprocessing_options=together)
        if primary == 0:
            _step(tmp_path, "1")
        Deleter(stock, tmp_path, options).delete(1)
        assert f"{name}/state" in stock.found[-1]


class Background:
    """Stock's thread: does what a test says when it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *then: Callable[[], None]):
        left = list(then)
        monkeypatch.setattr(deleting, "is_running", lambda thread: bool(left))
        monkeypatch.setattr(deleting, "time", SimpleNamespace(sleep=lambda secs: left.pop(0)()))


def test_an_interrupted_wait_is_for_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the files of that one go, which are in the same place."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    def go() -> None:
        shutil.rmtree(tmp_path / "1.orbax-checkpoint-tmp")

    thread = Background(monkeypatch, interrupt, lambda: None, go, pytest.fail)
    deleter = Deleter(Told(tmp_path, thread), tmp_path, ocp.CheckpointManagerOptions())
    _step(tmp_path, "1")
    deleter.delete(1)
    with pytest.raises(KeyboardInterrupt):
        deleter.make_way(1)
    deleter.make_way(1)
    assert not any(tmp_path.iterdir())
    (tmp_path / "1.orbax-checkpoint-tmp").mkdir()
    deleter.make_way(1)  # it is another's by now


def test_nobody_waits_for_what_nobody_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stock's thread has ended by an error, and where it was never told."""
    options = ocp.CheckpointManagerOptions()
    _step(tmp_path, "1")
    deleter = Deleter(Told(tmp_path, Background(monkeypatch)), tmp_path, options)
    deleter.delete(1)
    deleter.make_way(1)
    stock = Told(tmp_path, Background(monkeypatch, pytest.fail))
    deleter = Deleter(stock, tmp_path, options)
    _step(tmp_path, "2")
    rename = type(epath.Path(tmp_path)).rename

    def fails(path: Any, target: Any) -> Any:
        if path.name == "3":
            raise PermissionError(path)
        return rename(path, target)

    _step(tmp_path, "3")
    monkeypatch.setattr(type(epath.Path(tmp_path)), "rename", fails)
    deleter.delete_steps([2, 3])
    assert isinstance(deleter.failure, PermissionError)
    assert stock.found == [[*(f"{n}.orbax-checkpoint-tmp/state" for n in "12"), "3/state"]]
    deleter.make_way(3)


def test_what_has_gone_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next commit, or with the thread; what is not known to have gone is waited for."""
    deleter = Deleter(
        Told(tmp_path, threading.current_thread()), tmp_path, ocp.CheckpointManagerOptions()
    )
    exists = type(epath.Path(tmp_path)).exists

    def fails(path: Any) -> bool:
        if path.name.startswith("2"):
            raise PermissionError(path)
        return bool(exists(path))

    for name in "1234":
        _step(tmp_path, name)
    deleter.delete_steps([1, 2, 3])
    deleter.delete(4)
    for name in "124":
        shutil.rmtree(tmp_path / f"{name}.orbax-checkpoint-tmp")
    with monkeypatch.context() as context:
        context.setattr(type(epath.Path(tmp_path)), "exists", fails)
        deleter.delete_steps([])
    assert list(deleter._leaving) == [2, 3]
    deleter._thread = threading.Thread()
    deleter.delete_steps([])
    assert deleter._leaving == {}
    assert deleter.failure is None


NAMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix": {"step_prefix": "run", "step_format_fixed_length": 6},
    "format": {
        "step_name_format": step_names.composite_name_format(
            step_names.standard_name_format(step_prefix="new"),
            [step_names.standard_name_format(step_prefix=p) for p in ("new", "old")],
        )
    },
    "background": {"enable_background_delete": True},
    "marked": {"temporary_path_class": ocp.path.atomicity.CommitFileTemporaryPath},
    "moved away": {"todelete_subdir": "bin"},
}


@pytest.mark.parametrize("options", NAMES.values(), ids=NAMES)
def test_nothing_is_left_of_it(tmp_path: Path, options: dict[str, Any]) -> None:
    """By whatever names steps are read and written; also where a save had been killed before."""

    def open_manager(**given: Any) -> gockpt.GoCkptManager:
        return gockpt.GoCkptManager(tmp_path, options=ocp.CheckpointManagerOptions(**given))

    def save(manager: gockpt.GoCkptManager, step: int) -> None:
        manager.save(step, args=gockpt.GoCkptSave({"w": jnp.ones(2) * step}))
        manager.wait_until_finished()

    if "step_name_format" in options:
        with open_manager(step_prefix="old") as old:
            save(old, 1)
    with open_manager(max_to_keep=2, **options) as manager:
        for step in set(range(1, 5)) - set(manager.all_steps()):
            save(manager, step)
        name = step_names.build_step_path(tmp_path, _names(options), 4).name
        (tmp_path / f"{name}.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
        assert manager.all_steps() == [3, 4]
        manager.delete(4)
        assert manager.restore(None)["w"].tolist() == [3.0, 3.0]
    expected = {step_names.build_step_path(tmp_path, _names(options), 3).name}
    if "todelete_subdir" in options:
        expected.add("bin")
        assert sorted(p.name for p in (tmp_path / "bin").iterdir()) == ["1", "2", "4"]
        moved, kept = ({p.name for p in (tmp_path / x).iterdir()} for x in ("bin/4", "3"))
        assert moved == kept  # all of it, with what says that it was committed
    assert {p.name for p in tmp_path.iterdir()} == expected


def _names(options: dict[str, Any]) -> Any:
    return options.get("step_name_format") or step_names.standard_name_format(
        **{k: v for k, v in options.items() if k.startswith("step_")}
    )


def test_a_save_in_a_deleted_ones_place_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes vote for each save on its own, also where its items have other names."""
    state = {"w": jnp.ones(3)}
    with gockpt.GoCkptManager(tmp_path) as manager:
        began: list[str] = []
        monkeypatch.setattr(manager._gockpt_handler, "_begin", began.append)
        for item in ("model", "ema"):
            manager.save(5, args=ocp.args.Composite(**{item: gockpt.GoCkptSave(state)}))
            manager.wait_until_finished()
            manager.delete(5)
    assert len(began) == 2
