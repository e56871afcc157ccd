"""Invariant 5: a window whose save does not come as predicted costs nothing but its own work."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from bits import Bits, differing

import gockpt_jax as gockpt
from gockpt_jax.telemetry import events
from gockpt_jax.training.program import StepProgram
from gockpt_jax.transfer import block
from gockpt_jax.window import late
from gockpt_jax.window.early import EarlyChunks
from gockpt_jax.window.landed import LandedLeaf
from gockpt_jax.window.open_window import OpenWindow

from .injection import Fault
from .states import assert_checkpoints, bits_of
from .trainer import LIMIT_SECS, Trainer


def state_bytes(bits: Bits) -> int:
    return sum(array.nbytes for array in bits.values())


def test_predicted_save_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(jax.monitoring, "record_event", lambda name, **_: told.append(name))
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        while trainer.label <= 9:  # The window of save 8, but `save` is not called.
            trainer.update()
        assert trainer.manager.window_status == "idle"
        assert told.count(events.WINDOW_ABANDONED) == 1
        trainer.assert_intact()
        assert trainer.save(force=True)
        trainer.assert_intact()
        assert trainer.report(9).kind == "snapshot"
        trainer.run_past_next_window()
        trainer.assert_intact()


@pytest.mark.parametrize("label", [7, 8], ids=["in_the_middle", "at_the_target"])
def test_forced_save_meets_an_open_window(tmp_path: Path, label: int) -> None:
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(label - 1)
        trainer.update()
        assert trainer.manager.window_status != "idle"
        assert trainer.save(force=True)
        trainer.assert_intact()
        assert trainer.report(label).kind == ("window" if label == 8 else "snapshot")
        trainer.run(8)
        trainer.assert_intact()
        trainer.run_past_next_window()
        trainer.assert_intact()


def test_early_save_says_why_it_is_a_snapshot(tmp_path: Path) -> None:
    with Trainer(tmp_path) as trainer:
        trainer.run(7)
        trainer.save(force=True)
        trainer.assert_intact()
        assert "the save came 1 step early" in trainer.report(7).reason
        trainer.run(9)
        trainer.save(force=True)
        trainer.assert_intact()
        assert "not predicted" in trainer.report(9).reason, "that was told of another"


def test_an_abandoned_window_holds_no_state(tmp_path: Path) -> None:
    """Its replay may hold the window for longer; nor does that go on for nobody."""
    with Trainer(tmp_path) as trainer:
        trainer.run(7)
        window = trainer.manager._gockpt_session._current.window
        assert window is not None
        assert len(window.state) > 0
        trainer.manager.restore(4, args=gockpt.GoCkptRestore(trainer.target))
        assert len(window.state) == 0
        assert not window._early.is_wanted


@pytest.mark.parametrize("label", [7, 8], ids=["in_the_middle", "at_the_target"])
@pytest.mark.parametrize("go_back", [True, False], ids=["rolled_back", "only_looked"])
def test_restore_meets_an_open_window(tmp_path: Path, label: int, go_back: bool) -> None:
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(label - 1)
        trainer.update()
        assert trainer.manager.window_status != "idle"
        restored = trainer.manager.restore(4, args=gockpt.GoCkptRestore(trainer.target))
        assert not differing(bits_of(restored), trainer.given[4])
        if go_back:
            trainer.state, trainer.label = restored, 5
        trainer.save()
        trainer.run(8)
        trainer.assert_intact()
        trainer.run_past_next_window()
        trainer.assert_intact()


def test_restore_on_another_thread_leaves_the_window_open(tmp_path: Path) -> None:
    """Somebody looks at a checkpoint: the loop goes on from its own state."""
    with Trainer(tmp_path) as trainer, ThreadPoolExecutor(1) as other:
        trainer.run_undisturbed(7)
        restore = gockpt.GoCkptRestore(trainer.target)
        other.submit(trainer.manager.restore, 4, args=restore).result(LIMIT_SECS)
        assert trainer.manager.window_status != "idle"
        trainer.run(8)
        trainer.assert_intact()
        assert trainer.report(8).kind == "window"


@pytest.mark.parametrize("steps", [3, 4])
def test_state_replaced_inside_the_window_is_the_one_that_is_saved(
    tmp_path: Path, steps: int
) -> None:
    """A loop that edits, prunes or restores leaves by hand between two steps.

    Whether what it replaces has left with the block before, or with one before that.
    """
    with Trainer(tmp_path, window=gockpt.WindowOptions(steps=steps)) as trainer:
        trainer.run_undisturbed(7)
        trainer.state = jax.tree.map(lambda x: x * 2, trainer.state)
        trainer.run(8)
        trainer.assert_intact()
        trainer.run(11)
        trainer.update()
        trainer.state = jax.tree.map(jnp.copy, trainer.state)  # at the save itself
        trainer.save()
        trainer.assert_intact()


def test_prediction_stops_after_two_mispredictions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        opened = []
        with caplog.at_level(logging.WARNING, "gockpt_jax"):
            while trainer.label <= 24:
                trainer.update()
                if trainer.manager.window_status != "idle":
                    opened.append(trainer.label - 1)
        assert opened == [7, 8, 11, 12]
        warnings = [r for r in caplog.records if r.name == "gockpt_jax"]
        assert [r.levelname for r in warnings] == ["WARNING"]
        assert "expect_save" in warnings[0].getMessage()
        trainer.assert_intact()
        # What was announced opens a window all the same, and accepted saves restore confidence.
        trainer.manager.expect_save(in_steps=3)
        for _ in range(3):
            trainer.update()
        assert trainer.save(force=True)
        trainer.assert_intact()
        assert trainer.report(trainer.label - 1).kind == "window"


# --- Budgets -------------------------------------------------------------------------------------


def test_host_budget_below_the_state_refuses_the_save(tmp_path: Path) -> None:
    with Trainer(tmp_path) as trainer:
        trainer.run(4)
        trainer.assert_intact()
        earlier, target = dict(trainer.given), trainer.target
    window = gockpt.WindowOptions(steps=3, host_budget_bytes=1000)
    with Trainer(tmp_path, window=window) as trainer:
        trainer.label = 5
        trainer.run(7)
        for label in (8, 12):
            trainer.update()
            before = bits_of(trainer.state)
            with pytest.raises(gockpt.HostBudgetError, match="host_budget_bytes"):
                trainer.save()
            assert not differing(bits_of(trainer.state), before)
            assert_checkpoints(tmp_path, earlier, target)
            assert sorted(trainer.manager.all_steps()) == sorted(earlier)
            assert "HostBudgetError" in (trainer.report(label).error or "")
            trainer.run(label + 3)


def test_host_budget_without_room_for_a_window_gives_snapshots(tmp_path: Path) -> None:
    with Trainer(tmp_path / "measured") as trainer:
        needed = state_bytes(bits_of(trainer.state))
    window = gockpt.WindowOptions(steps=3, host_budget_bytes=needed + 1)
    with Trainer(tmp_path / "tight", window=window) as trainer:
        trainer.run(8)
        trainer.assert_intact()
        assert [report.kind for report in trainer.manager.reports] == ["snapshot"] * 3
        assert "budget" in trainer.report(8).reason


FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 12345 bytes.\nMore of it")


@pytest.mark.parametrize("steps", [1, 3], ids=["snapshot", "window"])
def test_what_a_device_has_no_room_for_at_once_is_copied_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    """Something else has taken its memory since the budget was measured."""
    fault = Fault(monkeypatch, block, "_copied", only_in=(late, "take_late"), error=FULL)
    with Trainer(tmp_path, window=gockpt.WindowOptions(steps=steps)) as trainer:
        device = trainer.manager._gockpt_session.resources.device
        assert device.limit_bytes is None
        trainer.run_undisturbed(7)
        trainer.update()
        trainer.settle()
        fault.arm()
        assert trainer.save()
        assert fault.fired
        trainer.label += 1
        trainer.assert_intact()
        allowed = device.limit_bytes
        assert allowed is not None
        trainer.run(12)  # the next one is made in parts from the beginning
        trainer.assert_intact()
        assert device.limit_bytes == allowed
        assert trainer.bytes_in_flight() == (0, 0)
        assert trainer.report(8).window_steps == steps
        assert caplog.text.count("a device had no room for") == 1


@pytest.mark.parametrize(
    ("what", "inside"),
    [
        ((block, "_copied"), (OpenWindow, "leave")),
        ((StepProgram, "executable"), (StepProgram, "call")),
        ((block, "_copied"), (OpenWindow, "follow")),
    ],
    ids=["its_block", "its_step", "its_cut"],
)
def test_a_device_without_room_for_a_window_makes_the_update_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    what: tuple[Any, str], inside: tuple[Any, str],
) -> None:  # fmt: skip
    """Nobody who trains shall hear of an error that is the window's alone."""
    with Trainer(tmp_path / "undisturbed") as trainer:
        trainer.run(16)
        undisturbed = bits_of(trainer.state)
    ran, call = [], StepProgram.call
    monkeypatch.setattr(StepProgram, "call", lambda *args: (ran.append(args), call(*args))[1])
    fault = Fault(monkeypatch, *what, only_in=inside, error=FULL)
    with Trainer(tmp_path / "full") as trainer:
        device = trainer.manager._gockpt_session.resources.device
        trainer.run_undisturbed(6)
        fault.arm()
        ran.clear()
        trainer.update()
        assert fault.fired
        assert (ran == []) == (inside[1] == "leave"), "what is retained would have no room either"
        assert trainer.manager.window_status == "idle"
        assert caplog.text.count("a window was given up, training is not affected") == 1
        trainer.settle()
        trainer.manager._gockpt_session.resources.watcher.wait_until_idle()
        assert trainer.bytes_in_flight() == (0, 0)
        trainer.save()
        trainer.run(8)
        trainer.assert_intact()
        assert trainer.report(8).kind == "snapshot", "nor once more for the same save"
        assert "its window was abandoned" in trainer.report(8).reason
        assert device.limit_bytes is not None, "it is not tried again in the same way"
        assert caplog.text.count("a device had no room for") == 1
        trainer.run(16)
        trainer.assert_intact()
        assert trainer.report(16).kind == "window"
        assert not differing(bits_of(trainer.state), undisturbed)


def test_a_device_that_has_no_room_for_any_window_is_not_asked_at_each_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inside = (OpenWindow, "leave")
    fault = Fault(monkeypatch, block, "_copied", only_in=inside, error=FULL, lasts=True)
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(4)
        fault.arm()
        trainer.run(24)
        trainer.assert_intact()
        assert caplog.text.count("a window was given up, training is not affected") == 3
        reasons = [trainer.report(label).reason for label in (8, 12, 16, 20, 24)]
        assert ["abandoned" in why for why in reasons] == [True, True, False, True, False]
        assert "a device had no room for the last 2 windows" in reasons[2]
        fault.disarm()
        trainer.run(36)
        trainer.assert_intact()
        assert [trainer.report(label).kind for label in (32, 36)] == ["snapshot", "window"]


def test_why_there_was_no_window_is_told_though_another_save_comes_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a forced one, that nobody has foreseen: it takes what was to be told of the next."""
    inside = (OpenWindow, "leave")
    fault = Fault(monkeypatch, block, "_copied", only_in=inside, error=FULL, lasts=True)
    with Trainer(tmp_path, window=gockpt.WindowOptions(steps=4)) as trainer:
        trainer.run_undisturbed(4)
        fault.arm()
        trainer.run(12)
        for between, label in ((14, 16), (18, 20)):  # the first is left out, the other is tried
            trainer.run(between)
            trainer.save(force=True)
            trainer.run(label)
            trainer.assert_intact()
            assert "a device had no room for" in trainer.report(label).reason


@pytest.mark.parametrize("where", ["land_block", "land_cut"])
def test_a_device_that_tells_late_that_it_had_no_room_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As a runtime may that takes memory when a program runs, not when it is called."""
    fault = Fault(monkeypatch, EarlyChunks, where, error=FULL)
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        fault.arm()
        trainer.update()
        trainer.settle()
        assert fault.fired
        with pytest.raises(gockpt.ReplayError, match="12345 bytes"):
            trainer.update()
        trainer.run(8)
        assert trainer.manager._gockpt_session.resources.device.limit_bytes is not None
        trainer.run(12)
        trainer.assert_intact()


def test_saves_are_planned_anew_for_a_device_that_has_less_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch, block, "_copied", only_in=(late, "take_late"), error=FULL)
    with Trainer(tmp_path, window=gockpt.WindowOptions(steps=None)) as trainer:
        trainer.run(4)
        fault.arm()
        trainer.run(8)
        assert fault.fired
        trainer.run(12)
        trainer.assert_intact()
        one_copy = "one device copy of the state fits"
        assert trainer.report(4).reason.startswith(one_copy)
        assert trainer.report(8).reason.startswith(one_copy)
        assert one_copy not in trainer.report(12).reason


@pytest.mark.sampled
@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
@pytest.mark.parametrize("where", ["copying", "landing"])
@pytest.mark.parametrize("steps", [1, 3], ids=["snapshot", "window"])
def test_a_device_without_room_for_a_save_s_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, where: str,
    on_save_error: Literal["raise", "warn"],
) -> None:  # fmt: skip
    """The error names the save and what to do, no byte is kept, and the same save is made next."""
    if where == "copying":
        inside = (late, "take_late")
        fault = Fault(monkeypatch, block, "_copied", only_in=inside, error=FULL, lasts=True)
    else:
        fault = Fault(monkeypatch, LandedLeaf, "put", error=FULL)
    window = gockpt.WindowOptions(steps=steps, on_save_error=on_save_error)
    said = r"(?s)save of step 8: the device .* Out of memory: 12345 bytes\. .*`device_budget_bytes`"
    if on_save_error == "raise":
        told: Any = pytest.raises(gockpt.DeviceMemoryError, match=said)
    else:
        told = pytest.warns(gockpt.SaveFailedWarning, match=said)
    with Trainer(tmp_path, window=window) as trainer:
        trainer.run_undisturbed(7)
        trainer.update()
        trainer.settle()  # what left early has landed: the fault is the save's
        fault.arm()
        with told:
            assert trainer.save() == (where == "landing")
            trainer.manager.wait_until_finished()
        assert fault.fired
        fault.disarm()
        assert "12345 bytes" in (trainer.report(8).error or "")
        trainer.given.pop(8, None)
        trainer.assert_intact()
        trainer.settle()
        trainer.update()
        trainer.settle()
        assert trainer.bytes_in_flight() == (0, 0)
        device = trainer.manager._gockpt_session.resources.device
        assert where == "copying" or device.limit_bytes is None, "the budget of a save that is over"
        trainer.label -= 1
        assert trainer.save(force=True)
        assert device.limit_bytes is not None
        trainer.label += 1
        trainer.assert_intact()
        trainer.run_past_next_window() if steps > 1 else trainer.run(12)
        trainer.assert_intact()


def refuse_save(trainer: Trainer) -> None:
    """The window is sound; the save brings a leaf that cannot be stored."""
    trainer.run_undisturbed(7)
    trainer.update()
    item = {"state": trainer.state, "empty": jnp.zeros((0, 3))}
    with pytest.raises(ValueError, match="zero size"):
        trainer.save(args=gockpt.GoCkptSave(item))


def test_refused_save_gives_its_bytes_back(tmp_path: Path) -> None:
    with Trainer(tmp_path) as trainer:
        refuse_save(trainer)
        trainer.update()  # without another `save`
        trainer.settle()
        assert trainer.bytes_in_flight() == (0, 0)
        trainer.run_past_next_window()
        trainer.assert_intact()


def test_interrupted_save_gives_its_bytes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit's sample, too, which is on its way by then."""
    inside, error = (OpenWindow, "take_early"), KeyboardInterrupt()
    fault = Fault(monkeypatch, late, "send_late", only_in=inside, error=error)
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(7)
        trainer.update()
        fault.arm()
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
        assert fault.fired
        trainer.update()
        trainer.settle()
        trainer.manager._gockpt_session.resources.watcher.wait_until_idle()
        assert trainer.bytes_in_flight() == (0, 0)
        trainer.run_past_next_window()
        trainer.assert_intact()


def test_refused_save_leaves_the_window_to_the_one_that_is_mended(tmp_path: Path) -> None:
    with Trainer(tmp_path) as trainer:
        refuse_save(trainer)
        assert trainer.save()
        trainer.assert_intact()
        assert trainer.report(8).kind == "window"
        assert trainer.bytes_in_flight() == (0, 0)


def test_what_left_early_and_is_not_saved_is_given_back(tmp_path: Path) -> None:
    """The save asks for one of the moments that the window has brought to the host."""
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(7)
        trainer.update()
        moments = [x for x in jax.tree.leaves(trainer.state.opt_state) if x.ndim == 2]
        assert trainer.manager.save(8, args=gockpt.GoCkptSave({"m": moments[0]}))
        trainer.manager.wait_until_finished()
        trainer.settle()
        assert (trainer.report(8).kind, trainer.report(8).early_bytes) == (
            "window",
            moments[0].nbytes,
        )
        assert trainer.bytes_in_flight() == (0, 0)


def test_abandoned_window_gives_its_bytes_back(tmp_path: Path) -> None:
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(7)
        trainer.manager.restore(4, args=gockpt.GoCkptRestore(trainer.target))
        trainer.settle()
        assert trainer.bytes_in_flight() == (0, 0)


def test_behind_a_close_steps_hear_of_no_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that the last one has failed, nor of any to come."""
    fault, prepared = Fault(monkeypatch, EarlyChunks, "land_block"), []
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(6)
        fault.arm()
        trainer.update()
        trainer.settle()
        assert fault.fired
        trainer.manager.close()
        planner = trainer.manager._gockpt_session.planner
        monkeypatch.setattr(planner, "prepare", lambda step: bool(prepared.append(step)))
        for _ in range(4):
            trainer.update()
        assert prepared == []
