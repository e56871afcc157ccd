"""Invariant 5: only a whole checkpoint is ever visible, and the trainer hears of what failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from bits import differing
from programs import PROGRAMS

import gockpt_jax as gockpt
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.storage.files.checksums import Checksums
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.writing import leaf_writer
from gockpt_jax.storage.writing.array_handler import HostArrayHandler
from gockpt_jax.storage.writing.leaf_writer import LeafWriter
from gockpt_jax.storage.writing.tree_writer import TreeWriter
from gockpt_jax.training.program import StepProgram
from gockpt_jax.transfer import staging
from gockpt_jax.transfer.block import Block
from gockpt_jax.transfer.pull import Pull
from gockpt_jax.window import early, slots
from gockpt_jax.window.open_window import OpenWindow

from .injection import Fault, Gate, InjectedError
from .processes import run_child, said
from .states import abstract, bits_of, digest_of, stock_restore, stock_steps
from .trainer import DEVICES, PROGRAM, Trainer, chain_of, finish_save, within_limit

BEFORE_SEAL = {
    "pull_of_a_block": {"owner": Pull, "name": "result"},
    "pull_of_a_cut": {
        "owner": Pull, "name": "result", "only_in": (early.EarlyChunks, "land_cut"),
    },
    "replay": {"owner": Replayer, "name": "apply"},
}  # fmt: skip
A_BUG = {"owner": Replayer, "name": "apply", "error": AssertionError("a bug")}

AFTER_SEAL = {
    "checksums": {"owner": Checksums, "name": "add_values"},
    "orbax_handler": {"owner": HostArrayHandler, "name": "serialize"},
    "pull_of_a_late_leaf": {"owner": Pull, "name": "result"},
    "end_of_replay": {"owner": slots, "name": "fill"},
    "write_of_a_shard": {"owner": LeafWriter, "name": "write_shard"},
    "tensorstore": {"owner": leaf_writer, "name": "to_the_end"},
    "shardings_file": {"owner": TreeWriter, "name": "_write_shardings"},
    "array_metadatas": {"owner": TreeWriter, "name": "_write_array_metadatas"},
    "commit": {"owner": StateHandler, "name": "finalize"},
}

INSIDE_SAVE = {
    "stage_of_the_late_leaves": {"owner": staging, "name": "stage"},
    "pull_of_the_late_leaves": {"owner": Block, "name": "start_pull"},
}

ON_THE_TRAINER = {
    "stage": {"owner": staging, "name": "stage"},
    "start_of_pull": {"owner": Block, "name": "start_pull"},
    "start_of_pull_of_a_cut": {
        "owner": Block,
        "name": "start_pull",
        "only_in": (OpenWindow, "follow"),
    },
}


def assert_goes_on(trainer: Trainer) -> None:
    """The next window works, every checkpoint but the failed one is right, and no byte is lost."""
    trainer.run_past_next_window()
    trainer.assert_intact()
    trainer.settle()
    assert trainer.bytes_in_flight() == (0, 0)  # or no window would have room some day


# --- Before the seal -----------------------------------------------------------------------------


def fail_inside_the_window(trainer: Trainer, injected: Fault) -> None:
    """Label 7 opens that of save 8; the trainer does not know yet."""
    trainer.run_undisturbed(6)
    injected.arm()
    trainer.update()
    trainer.settle()
    assert injected.fired


@contextlib.contextmanager
def told_of(injected: Fault) -> Iterator[None]:
    """What is called inside raises what the worker has met."""
    with pytest.raises(gockpt.ReplayError) as raised:
        yield
    assert raised.value.__cause__ is injected.error


@pytest.mark.parametrize("fault", [*BEFORE_SEAL, "a_bug"])
def test_error_before_the_seal_reaches_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    injected = Fault(monkeypatch, **BEFORE_SEAL.get(fault, A_BUG))
    with Trainer(tmp_path) as trainer:
        fail_inside_the_window(trainer, injected)
        before = bits_of(trainer.state)
        with told_of(injected):
            trainer.update()
        (told,) = [r for r in caplog.records if "abandoned: it failed" in r.getMessage()]
        assert told.levelname == "WARNING"  # beside other processes nobody is told otherwise
        assert not differing(bits_of(trainer.state), before)
        trainer.assert_intact()

        trainer.run(8)  # The same step again: training goes on with the live state.
        trainer.manager.wait_until_finished()
        assert trainer.report(8).error is None
        assert_goes_on(trainer)


@pytest.mark.parametrize(
    ("fault", "label"), [*((fault, 8) for fault in BEFORE_SEAL), ("replay", 7)]
)
def test_save_that_meets_a_failed_window_is_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, label: int
) -> None:
    injected = Fault(monkeypatch, **BEFORE_SEAL[fault])
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(label - 1)
        injected.arm()
        trainer.update()
        trainer.settle()
        assert injected.fired
        assert trainer.save(force=label < 8)
        with told_of(injected):
            trainer.update()
        trainer.assert_intact()
        assert trainer.report(label).kind == "snapshot"
        assert str(injected.error) in trainer.report(label).reason
        assert_goes_on(trainer)


@pytest.mark.parametrize("fault", BEFORE_SEAL)
def test_error_found_only_after_the_seal_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The worker is behind: the save has begun when the early chunks turn out to be lost."""
    injected = Fault(monkeypatch, **BEFORE_SEAL[fault])
    gate = Gate(monkeypatch, early.EarlyChunks, "land_block")
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        gate.shut()
        injected.arm()
        trainer.run(8)
        gate.open()
        with pytest.raises(InjectedError) as raised:
            trainer.manager.wait_until_finished()
        assert injected.error in chain_of(raised.value)
        del trainer.given[8]
        trainer.assert_intact()
        report = trainer.report(8)
        assert report.kind == "window"
        assert report.error
        assert_goes_on(trainer)


@pytest.mark.parametrize("surface", ["wait_until_finished", "save"])
def test_error_before_the_seal_reaches_calls_other_than_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surface: str
) -> None:
    """A loop that ends inside a window makes no further step; it still hears of the failure."""
    injected = Fault(monkeypatch, **BEFORE_SEAL["replay"])
    with Trainer(tmp_path) as trainer:
        fail_inside_the_window(trainer, injected)
        waits = surface == "wait_until_finished"
        with told_of(injected):  # the policy leaves out the save of 7
            (trainer.manager.wait_until_finished if waits else trainer.save)()
        assert_goes_on(trainer)


@pytest.mark.parametrize("ended_by", ["restore", "another_call"])
def test_error_of_a_window_that_ends_for_another_reason_reaches_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    """Nobody has looked at the window between its failure and its end."""
    injected = Fault(monkeypatch, **BEFORE_SEAL["replay"])
    gate = Gate(monkeypatch, early.EarlyChunks, "land_block")
    changed = Fault(monkeypatch, StepProgram, "flat_call", error=TypeError("other arguments"))
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        injected.arm()
        gate.shut()
        trainer.update()

        def fail() -> None:
            gate.open()
            trainer.settle()

        if ended_by == "restore":
            fail()
            trainer.manager.restore(4, args=gockpt.GoCkptRestore(trainer.target))
        else:
            changed.arm()  # the window fails when the hook has asked, and before it goes on
            monkeypatch.setattr(trainer.manager._gockpt_session, "between_steps", fail)
            trainer.update()
            assert changed.fired
        assert injected.fired
        assert trainer.manager.window_status == "idle"
        with told_of(injected):
            trainer.update()
        trainer.run(8)
        trainer.assert_intact()
        assert_goes_on(trainer)


# --- After the seal ------------------------------------------------------------------------------


def arm_before_the_save(trainer: Trainer, injected: Fault) -> None:
    """Of 8, whose window is reached; what has left early is on the host."""
    trainer.run_undisturbed(7)
    trainer.update()
    trainer.settle()
    injected.arm()


@pytest.mark.parametrize("fault", AFTER_SEAL)
def test_error_after_the_seal_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    injected = Fault(monkeypatch, **AFTER_SEAL[fault])
    with Trainer(tmp_path) as trainer:
        arm_before_the_save(trainer, injected)
        assert trainer.save()
        del trainer.given[8]
        before = bits_of(trainer.state)
        with pytest.raises(InjectedError) as raised:
            trainer.manager.wait_until_finished()
        assert injected.fired
        assert injected.error in chain_of(raised.value)
        assert not differing(bits_of(trainer.state), before)
        trainer.assert_intact()
        report = trainer.report(8)
        assert report.kind == "window"
        assert str(injected.error) in (report.error or "")
        assert_goes_on(trainer)


@pytest.mark.parametrize("fault", ["write_of_a_shard", "commit"])
def test_error_after_the_seal_reaches_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Not only the next save that the policy accepts, which may be hours away."""
    injected = Fault(monkeypatch, **AFTER_SEAL[fault])
    with Trainer(tmp_path) as trainer:
        arm_before_the_save(trainer, injected)
        assert trainer.save()
        del trainer.given[8]
        finish_save()
        with pytest.raises(InjectedError) as raised:
            trainer.run(9)
        assert injected.error in chain_of(raised.value)
        trainer.assert_intact()
        assert_goes_on(trainer)


@pytest.mark.parametrize("fault", INSIDE_SAVE)
def test_error_inside_save_is_raised_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    injected = Fault(monkeypatch, **INSIDE_SAVE[fault])
    with Trainer(tmp_path) as trainer:
        arm_before_the_save(trainer, injected)
        with pytest.raises(InjectedError) as raised:
            trainer.save()
        assert injected.error in chain_of(raised.value)
        trainer.assert_intact()
        assert str(injected.error) in (trainer.report(8).error or "")
        assert_goes_on(trainer)


def test_retention_keeps_the_last_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax drops the old step from its list when a save begins, not when it is committed."""
    injected = Fault(monkeypatch, **AFTER_SEAL["commit"])
    with Trainer(tmp_path, max_to_keep=1) as trainer:
        trainer.run_undisturbed(7)
        injected.arm()
        trainer.run(8)
        with pytest.raises(InjectedError):
            trainer.manager.wait_until_finished()
        trainer.given = {4: trainer.given[4]}
        trainer.assert_intact()
        trainer.run(12)
        trainer.given = {12: trainer.given[12]}
        trainer.assert_intact()


# --- On the trainer's own thread -----------------------------------------------------------------


@pytest.mark.parametrize("fault", ON_THE_TRAINER)
def test_error_of_a_hook_costs_the_window_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Device memory ran out while a block was staged, say. The step itself must still run: after
    dispatch its state is donated, and an exception would take the new one away from the loop."""
    injected = Fault(monkeypatch, **ON_THE_TRAINER[fault])
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        injected.arm()
        trainer.update()
        assert injected.fired
        trainer.settle()
        with contextlib.suppress(gockpt.ReplayError):  # It may be raised at the next call.
            trainer.run(8)
        trainer.run(8)
        trainer.assert_intact()
        assert_goes_on(trainer)


@pytest.mark.sampled
@pytest.mark.parametrize("budget_bytes", [None, 64 * 1024], ids=["unlimited", "tight"])
@pytest.mark.parametrize("opening", [True, False], ids=["opening_step", "second_step"])
@pytest.mark.parametrize("place", [(StepProgram, "call"), (OpenWindow, "make_room")])
def test_step_that_raises_inside_a_window_may_be_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_bytes: int | None, opening: bool,
    place: tuple[type, str],
) -> None:  # fmt: skip
    """A Ctrl-C or a failed dispatch, after the block was staged and before the update happened."""
    window = gockpt.WindowOptions(steps=3, device_budget_bytes=budget_bytes)
    with Trainer(tmp_path, window=window) as trainer:
        trainer.run_undisturbed(6 if opening else 7)
        assert trainer.step.program is not None
        injected = Fault(monkeypatch, *place, error=KeyboardInterrupt())
        for _ in range(3):
            injected.arm()
            error = within_limit(trainer.update)  # It may wait for a budget that is never free.
            assert error is injected.error
        assert within_limit(lambda: trainer.run(8)) is None
        trainer.assert_intact()
        assert_goes_on(trainer)


# --- A full disk ---------------------------------------------------------------------------------


def test_full_disk_fails_one_save(tmp_path: Path, cache: Path) -> None:
    """The kernel itself refuses: no file may grow beyond 512 bytes while save 8 is written."""
    directory = tmp_path / "run"
    child = run_child(directory, cache, ending="full")
    assert child.returncode == 0, child.stderr
    assert len(said(child.stdout, "failed")) == 1, child.stdout
    assert said(child.stdout, "steps") == [["[0,", "4]"]]
    assert said(child.stdout, "error") != [["None"]]
    given = {int(label): digest for label, digest in said(child.stdout, "given")}
    assert stock_steps(directory) == sorted(given)
    assert 8 not in given
    target = abstract(PROGRAMS[PROGRAM].build(DEVICES).state)
    for label, digest in given.items():
        assert digest_of(stock_restore(directory, label, target)) == digest
