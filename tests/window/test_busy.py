"""What a save does that finds the previous one still being written."""

from __future__ import annotations

import threading
from pathlib import Path

import jax.numpy as jnp
import pytest
from window.training_loop import HoldingLoop, Options, assert_same

from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.storage.saving.written import Written


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HoldingLoop:
    """The write of label 4 is held until it is let go."""
    return HoldingLoop(tmp_path, monkeypatch, 4, window={"steps": 3, "on_busy": "skip"})


def test_a_busy_save_is_skipped_and_said_so(loop):
    assert loop.train(4)
    assert not loop.train(8)  # returns at once: nobody has let the write go on
    report = loop.manager.last_report
    assert (report.step, report.kind, report.error) == (8, "skipped", None)
    assert report.reason == "the save of step 4 was still being written"
    assert loop.manager.window_status == "draining step 4"
    loop.gates[4].set()
    loop.manager.wait_until_finished()
    assert loop.train(12)
    loop.manager.wait_until_finished()
    kinds = {r.step: r.kind for r in loop.manager.reports}
    assert kinds == {0: "snapshot", 8: "skipped", 4: "window", 12: "window"}
    assert loop.manager.all_steps() == [0, 4, 12]
    for label, state in loop.given.items():
        assert_same(loop.manager.restore(label), state)
    assert loop.session.host.used_bytes == 0
    loop.manager.close()


def test_skipping_does_not_stop_prediction(loop):
    loop.train(4)
    for label in (8, 12, 16):
        assert not loop.train(label)
    loop.gates[4].set()
    loop.manager.wait_until_finished()
    assert loop.train(20)
    loop.manager.close()
    assert loop.manager.last_report.kind == "window"


def test_a_forced_save_waits_all_the_same(loop, monkeypatch):
    loop.train(7)
    wait = loop.manager.wait_until_finished

    def waiting() -> None:
        loop.gates[4].set()
        wait()

    monkeypatch.setattr(loop.manager, "wait_until_finished", waiting)
    assert loop.train(8, force=True)
    loop.manager.close()
    assert loop.manager.all_steps() == [0, 4, 8]


def test_a_save_that_has_ended_is_not_a_busy_one(tmp_path):
    """Whether or not anybody has asked how."""
    with GoCkptManager(tmp_path, window=WindowOptions(on_busy="skip")) as manager:
        for label in range(2):
            assert manager.save(label, args=GoCkptSave({"w": jnp.ones(3)}))
            for thread in threading.enumerate():
                if thread.name == "save_finalize":
                    thread.join()
            assert not manager.is_saving_in_progress()


def test_a_failed_save_is_not_a_busy_one(loop, monkeypatch):
    loop.gates[4].set()
    monkeypatch.setattr(Written, "result", _fail)
    loop.train(0)
    with pytest.raises(RuntimeError, match="injected"):
        loop.manager.wait_until_finished()
    monkeypatch.undo()
    assert loop.train(1)  # the policy saves at once where nothing has been saved
    loop.manager.close()
    assert loop.manager.latest_step() == 1
    assert "skipped" not in [report.kind for report in loop.manager.reports]


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("injected")


class Fourth:
    """A policy of the user's own, that remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def should_save(self, step, previous_steps, *, context):
        del previous_steps, context
        self.asked.append(step.step)
        return step.step % 4 == 0


@pytest.mark.parametrize("on_busy", ["wait", "skip", "newest"])
def test_a_policy_is_asked_once_by_each_call(tmp_path, on_busy):
    """As by stock: it may count, or draw lots."""
    policy, args = Fourth(), GoCkptSave({"w": jnp.ones(2)})
    options, window = Options(save_decision_policy=policy), WindowOptions(on_busy=on_busy)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        accepted = [manager.save(label, args=args) for label in range(4)]
        manager.wait_until_finished()
        accepted.append(manager.save(4, args=args))
    assert accepted == [True, False, False, False, True]
    assert policy.asked == [0, 1, 2, 3, 4]
