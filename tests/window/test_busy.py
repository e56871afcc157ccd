"""What a save does that finds the previous one still being written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from window.training_loop import BATCH, Options, assert_same, fresh, to_host, update

from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.storage.written import Written

WAIT_SECS = 200  # only ends a test that hangs


class Loop:
    """Calls `save` at every label; the write of label 4 is held until `go_on` is set."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch):
        self.go_on = threading.Event()
        result = Written.result

        def held(written: Written, timeout: float | None = None) -> None:
            result(written, timeout)
            if written._record.step == 4:
                assert self.go_on.wait(WAIT_SECS)

        monkeypatch.setattr(Written, "result", held)
        self.manager = GoCkptManager(
            directory,
            options=Options(save_interval_steps=4),
            window=WindowOptions(steps=3, on_busy="skip"),
        )
        self.step, self.state, self.label = self.manager.wrap(update), fresh(), 0
        self.saved: dict[int, object] = {}

    def run(self, last: int, **save: bool) -> bool:
        """Trains up to a label; returns whether that one was saved."""
        while self.label <= last:
            if self.label == 4:
                self.manager.wait_until_finished()  # only what follows the held one finds it busy
            self.state = self.step(self.state, BATCH)
            accepted = self.manager.save(self.label, args=GoCkptSave(self.state), **save)
            if accepted:
                self.saved[self.label] = to_host(self.state)
            self.label += 1
        return accepted


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(tmp_path, monkeypatch)


def test_a_busy_save_is_skipped_and_said_so(loop):
    assert loop.run(4)
    assert not loop.run(8)  # returns at once: nobody has let the write go on
    report = loop.manager.last_report
    assert (report.step, report.kind, report.error) == (8, "skipped", None)
    assert report.reason == "the save of step 4 was still being written"
    assert loop.manager.window_status == "draining step 4"
    loop.go_on.set()
    loop.manager.wait_until_finished()
    assert loop.run(12)
    loop.manager.wait_until_finished()
    kinds = {r.step: r.kind for r in loop.manager.reports}
    assert kinds == {0: "snapshot", 8: "skipped", 4: "window", 12: "window"}
    assert loop.manager.all_steps() == [0, 4, 12]
    for label, state in loop.saved.items():
        assert_same(loop.manager.restore(label), state)
    assert loop.manager._gockpt_session.host.used_bytes == 0
    loop.manager.close()


def test_skipping_does_not_stop_prediction(loop):
    loop.run(4)
    for label in (8, 12, 16):
        assert not loop.run(label)
    loop.go_on.set()
    loop.manager.wait_until_finished()
    assert loop.run(20)
    loop.manager.close()
    assert loop.manager.last_report.kind == "window"


def test_a_forced_save_waits_all_the_same(loop, monkeypatch):
    loop.run(7)
    wait = loop.manager.wait_until_finished

    def waiting() -> None:
        loop.go_on.set()
        wait()

    monkeypatch.setattr(loop.manager, "wait_until_finished", waiting)
    assert loop.run(8, force=True)
    loop.manager.close()
    assert loop.manager.all_steps() == [0, 4, 8]


def test_a_failed_save_is_not_a_busy_one(loop, monkeypatch):
    loop.go_on.set()
    monkeypatch.setattr(Written, "result", _fail)
    loop.run(0)
    with pytest.raises(RuntimeError, match="injected"):
        loop.manager.wait_until_finished()
    monkeypatch.undo()
    assert loop.run(1)  # the policy saves at once where nothing has been saved
    loop.manager.close()
    assert loop.manager.latest_step() == 1
    assert "skipped" not in [report.kind for report in loop.manager.reports]


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("injected")
