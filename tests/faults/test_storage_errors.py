"""Storages that refuse: a named error or a warning, nothing half-visible, earlier saves intact."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import shutil
import threading
import warnings
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from bits import differing

import gockpt_jax as gockpt
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.storage.files.checksums import Checksums
from gockpt_jax.storage.inspecting.directory import look_into
from gockpt_jax.storage.inspecting.verify import verify
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.writing import leaf_writer
from gockpt_jax.storage.writing.leaf_writer import LeafWriter
from gockpt_jax.window.seal import Seal

from .injection import Fault, InjectedError
from .states import assert_only_whole_steps, bits_of
from .trainer import WINDOW_STEPS, Trainer, chain_of

KIB = 1024


def window(how: str) -> gockpt.WindowOptions:
    return gockpt.WindowOptions(steps=WINDOW_STEPS, on_save_error=how)  # type: ignore[arg-type]


@contextlib.contextmanager
def no_large_files(*_: Any) -> Any:
    """The kernel refuses to let a file grow, as a full disk would: EFBIG for ENOSPC."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def read_only(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file system lets nobody make a directory there, not even root."""
    make = os.mkdir

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).startswith(f"{directory}/"):
            raise OSError(30, "Read-only file system", str(path))
        make(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        yield


@contextlib.contextmanager
def vanishing(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Somebody removes the save's directory while it is written."""
    write = LeafWriter._write_chunk

    async def remove(self: LeafWriter, *args: Any) -> None:
        for entry in directory.glob("*tmp*"):
            shutil.rmtree(entry, ignore_errors=True)
        await write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LeafWriter, "_write_chunk", remove)
        yield


@contextlib.contextmanager
def vanished(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Somebody has removed it when all that is missing are the checksums."""
    write = Checksums.write

    def remove(self: Checksums, item: Any) -> None:
        for entry in directory.glob("*tmp*"):
            shutil.rmtree(entry)
        write(self, item)

    with monkeypatch.context() as patch:
        patch.setattr(Checksums, "write", remove)
        yield


@contextlib.contextmanager
def no_rename(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The commit itself is refused: everything is written, nothing may be visible."""
    for name in ("rename", "replace"):
        move = getattr(os, name)

        def refuse(source: Any, target: Any, *args: Any, move: Any = move, **kw: Any) -> None:
            if str(target) == f"{directory}/8":
                raise OSError(28, "No space left on device", str(target))
            move(source, target, *args, **kw)

        monkeypatch.setattr(os, name, refuse)
    yield


TROUBLES = {
    "full": no_large_files, "read_only": read_only, "vanishing": vanishing, "vanished": vanished,
    "no_rename": no_rename,
}  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_refused_save_is_raised(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    directory = tmp_path / "běh s mezerou"
    with Trainer(directory, window=window("raise")) as trainer:
        trainer.run_undisturbed(7)
        with (
            monkeypatch.context() as patch,
            TROUBLES[trouble](directory, patch),
            pytest.raises(gockpt.StorageError) as raised,
        ):
            save_and_wait(trainer)
        trainer.given.pop(8, None)
        assert isinstance(raised.value, OSError)
        assert "Nothing of this save is visible" in str(raised.value)
        assert len(chain_of(raised.value)) > 1
        assert_goes_on(trainer)


def save_and_wait(trainer: Trainer) -> None:
    trainer.run(8)
    trainer.manager.wait_until_finished()


def assert_goes_on(trainer: Trainer) -> None:
    """The bytes are given back, what was there is intact, and the next window works."""
    trainer.settle()
    assert trainer.bytes_in_flight() == (0, 0)
    assert trainer.manager.latest_step() == 4
    assert_only_whole_steps(trainer.directory, trainer.given)
    assert {v.state for v in verify(trainer.directory)} == {"whole"}
    trainer.label = max(trainer.label, 9)
    trainer.run_past_next_window()
    trainer.assert_intact()
    trainer.manager.reload()
    assert trainer.manager.latest_step() == max(trainer.given)


@pytest.mark.parametrize("trouble", ["full", "read_only", "no_rename"])
def test_a_refused_save_is_warned_of(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    with Trainer(tmp_path, window=window("warn")) as trainer:
        trainer.run_undisturbed(7)
        with (
            monkeypatch.context() as patch,
            TROUBLES[trouble](tmp_path, patch),
            pytest.warns(gockpt.SaveFailedWarning, match="StorageError: .*failed"),
        ):
            save_and_wait(trainer)
        trainer.run(9)
        trainer.given.pop(8, None)
        assert trainer.report(8).error
        assert_goes_on(trainer)


def test_no_thread_waits_for_a_directory_that_save_itself_could_not_make(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default one does, for up to 300 s (docs/guarantees.md)."""
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    with Trainer(tmp_path, async_options=at_once) as trainer:
        trainer.run_undisturbed(7)
        before = set(threading.enumerate())
        trainer.update()
        with read_only(tmp_path, monkeypatch), pytest.raises(gockpt.StorageError):
            trainer.save()
        assert [t.name for t in {*threading.enumerate()} - before if "write" in t.name] == []
        trainer.run(9)  # with the next step goes the window that nobody has sealed
        assert_goes_on(trainer)


def test_a_save_that_could_not_begin_is_not_accepted(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CheckpointManagerOptions(async_options=at_once)
    args = gockpt.GoCkptSave({"w": jnp.ones(4)})
    with gockpt.GoCkptManager(tmp_path, options=options, window=window("warn")) as manager:
        with (
            read_only(tmp_path, monkeypatch),
            pytest.warns(gockpt.SaveFailedWarning, match="Read-only file system"),
        ):
            assert not manager.save(0, args=args)
        assert manager.save(0, args=args)


@pytest.mark.parametrize(
    "error", [gockpt.AuditError, gockpt.ReplayError, gockpt.DeviceMemoryError], ids=str
)
def test_what_a_window_is_to_blame_for_is_warned_of(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Found while Orbax is given the save: in the seal, or as it is written, if that is waited for.

    Where saves are synchronous, it is.
    """

    def fail(*args: object, **kwargs: object) -> None:
        raise error("as it is sealed")

    args = gockpt.GoCkptSave({"w": jnp.ones(4)})
    with gockpt.GoCkptManager(tmp_path, window=window("warn")) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(ocp.CheckpointManager, "save", fail)
            with pytest.warns(gockpt.SaveFailedWarning, match=f"{error.__name__}: as it is sealed"):
                assert not manager.save(0, args=args)
        assert manager.save(0, args=args)


def test_a_failed_window_is_warned_of(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    injected = Fault(monkeypatch, Replayer, "apply")
    with Trainer(tmp_path, window=window("warn")) as trainer:
        trainer.run_undisturbed(6)
        injected.arm()
        trainer.update()
        trainer.settle()
        assert injected.fired
        with pytest.warns(gockpt.SaveFailedWarning, match=r"ReplayError: .*InjectedError"):
            trainer.run(8)
        trainer.assert_intact()
        assert trainer.report(8).error is None


def test_what_the_caller_did_wrong_is_raised_all_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trainer(tmp_path, window=window("warn")) as trainer, warnings.catch_warnings():
        trainer.run(1)
        old = trainer.state
        trainer.update()
        with pytest.raises(ValueError, match="donated"):
            trainer.manager.save(4, args=gockpt.GoCkptSave(old))
        with pytest.raises(ValueError, match="already exists"):
            trainer.manager.save(0, args=gockpt.GoCkptSave(trainer.state), force=True)
        interrupt = Fault(monkeypatch, Seal, "take", error=KeyboardInterrupt())
        interrupt.arm()
        with pytest.raises(KeyboardInterrupt):
            trainer.manager.save(4, args=gockpt.GoCkptSave(trainer.state))


def test_a_call_that_fails_leaves_the_save_in_flight_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it gives back is what it has begun itself."""
    go_on, check = threading.Event(), leaf_writer._check_data
    monkeypatch.setattr(leaf_writer, "_check_data", lambda *a: go_on.wait(60) and check(*a))

    def decide(step: int, latest: int | None = None) -> bool:
        if step:
            raise OSError("injected")
        return True

    options = ocp.CheckpointManagerOptions(should_save_fn=decide)
    with gockpt.GoCkptManager(tmp_path, options=options) as manager:
        args = gockpt.GoCkptSave({"w": jnp.ones(4)})
        assert manager.save(0, args=args)
        with pytest.raises(OSError, match="injected"):
            manager.save(1, args=args)
        go_on.set()
        manager.wait_until_finished()
        assert manager.restore(0)["w"].tolist() == [1.0] * 4


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_save_without_arrays_fails_under_its_own_label(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """The report is that of the save before, which is on the disk; be it listed anew or not."""

    def refuse(*_: Any) -> None:
        raise OSError("injected")

    def refuse_to_list() -> None:
        raise OSError("nothing can be listed")

    with gockpt.GoCkptManager(tmp_path) as manager:
        assert manager.save(3, args=gockpt.GoCkptSave({"w": jnp.ones(4)}))
        manager.wait_until_finished()
        monkeypatch.setattr(ocp.JsonCheckpointHandler, "finalize", refuse, raising=False)
        args = ocp.args.Composite(notes=ocp.args.JsonSave({"loss": 1.0}))
        assert manager.save(4, args=args)
        if not is_listed:
            monkeypatch.setattr(manager, "reload", refuse_to_list)
        with pytest.raises(gockpt.StorageError, match=r"the save of step 4 in .* injected"):
            manager.wait_until_finished()
        assert [(report.step, report.error) for report in manager.reports] == [(3, None)]
        with pytest.raises(gockpt.NoCheckpointError, match="has no step `4`"):
            manager.metadata(4)  # nor is a save of it under way any more
        assert manager.all_steps() == [3]


# --- Retention ---------------------------------------------------------------------------------


RETENTION = {
    "max_to_keep=1": {"max_to_keep": 1},
    "keep_period": {"max_to_keep": 1, "keep_period": 8},
    "best_fn": {"max_to_keep": 1, "best_fn": lambda m: m["loss"], "best_mode": "min"},
    "best_fn, others kept": {
        "max_to_keep": 1, "best_fn": lambda m: m["loss"], "keep_checkpoints_without_metrics": True,
    },
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("stage", ["write", "commit"])
@pytest.mark.parametrize("options", RETENTION)
def test_the_last_good_step_survives_failing_saves(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: str, stage: str
) -> None:
    """Orbax forgets the old step when a save begins; on disk it must stay until the commit."""
    place = (Checksums, "write") if stage == "write" else (StateHandler, "finalize")
    injected = Fault(monkeypatch, *place)
    metrics = {"best_fn" in RETENTION[options] and "metrics": {"loss": 1.0}}
    kwargs = {key: value for key, value in metrics.items() if key}
    with Trainer(tmp_path, **RETENTION[options]) as trainer:
        while trainer.label <= 4:
            trainer.update()
            trainer.save(**kwargs)
        trainer.manager.wait_until_finished()
        good = trainer.manager.latest_step()
        assert good == 4 or "best_fn" in options
        for _ in range(2):  # the second failure must not forget it either
            injected.arm()
            while True:
                trainer.update()
                if trainer.save(**kwargs):
                    break
            with pytest.raises(InjectedError):
                trainer.manager.wait_until_finished()
            failed = trainer.label - 1
            assert trainer.manager.latest_step() == good
            trainer.manager.reload()
            assert trainer.manager.latest_step() == good
            del trainer.given[failed]
            restored = trainer.manager.restore(None, args=gockpt.GoCkptRestore(trainer.target))
            assert not differing(bits_of(restored), trainer.given[good])
        assert str(good) in [step.path.name for step in look_into(tmp_path).steps]
