"""The transfer's questions to an accelerator run at toy size; one that fails costs no other."""

from __future__ import annotations

import gc
import time
import types

import pytest

from bench.record import Record
from bench.transfer import benchmark, steps
from bench.transfer.asked import Asked, Scale
from bench.transfer.benchmark import _model
from bench.transfer.gpu import QUESTIONS, answer
from bench.transfer.raw_link import raw_link_secs
from bench.transfer.save_call import _add_collections, measure


def test_every_question_is_answered_or_says_why_not(monkeypatch):
    scale = Scale((0.01,), 0.01, 16, 1, 1)
    monkeypatch.setattr(Scale, "of", lambda *_, **__: scale)
    record = Record("gpu")
    answer(record, quick=True)
    for figure in ("overlap_ratio", "same_memory/pinned_to_numpy", "dispatch_us_per_put/packed"):
        assert record.samples[figure]
    assert record.samples["pull_gbps/library/0.01MiB/warm"]
    assert record.samples["donated_step_secs/pulled_buffer"]
    assert not any("failed" in note for note in record.notes)
    assert any(note.startswith("raw_link") for note in record.notes)


class Machine:
    """A device whose steps take 3 s and whose transfers take 22, beside each other or not."""

    def __init__(self, beside):
        self.now, self._steps_end, self._pull_end = 0.0, 0.0, 0.0
        self._beside = beside

    def run(self):
        self.dispatch()
        self.block_until_ready(self.state)
        return 3.0

    def dispatch(self):
        self._steps_end = max(self._steps_end, self.now) + 3.0

    @property
    def state(self):
        return self._steps_end

    def device_put(self, *_):
        self._pull_end = self.now + 22.0
        return "pull"

    def block_until_ready(self, what):
        if what != "pull" and not self._beside and self._pull_end > self.now:
            self._steps_end += self._pull_end - self.now  # they had to wait for it
        self.now = max(self.now, self._pull_end if what == "pull" else self._steps_end)

    def sleep(self, secs):
        self.now += secs


@pytest.mark.parametrize(("beside", "hidden"), [(True, 1.0), (False, 0.0)])
def test_a_pull_is_hidden_by_steps_that_begin_later_as_by_those_at_once(
    beside, hidden, monkeypatch
):
    machine, record = Machine(beside), Record("gpu")
    monkeypatch.setattr(steps, "Busy", lambda _: machine)
    monkeypatch.setattr(steps, "_LATER_SECS", 2.0)
    monkeypatch.setattr(
        steps, "time", types.SimpleNamespace(perf_counter=lambda: machine.now, sleep=machine.sleep)
    )
    monkeypatch.setattr(steps, "jax", machine)
    asked = Asked(record, None, Scale((1,), 1, 1, 1, 2), time.perf_counter() + 100)
    asked.fresh = lambda *_: None
    monkeypatch.setattr(Asked, "pinned", None)
    steps.ask_overlap(asked)
    for figure in ("overlap_ratio", "overlap_ratio/later"):
        assert record.samples[figure] == pytest.approx([hidden] * 2), figure
    assert "which takes 22000.00 ms; later: 2e+03 ms after it began" in record.notes[0]


@pytest.mark.parametrize("failing", ["pointers", "ways"])
def test_a_question_that_fails_costs_no_other(failing, monkeypatch):
    asked, known = [], []

    def question(name):
        def ask(_):
            asked.append(name)
            if name == failing:
                raise RuntimeError("no such memory")

        return ask

    monkeypatch.setattr(
        "bench.transfer.gpu.QUESTIONS", {name: question(name) for name in QUESTIONS}
    )
    record = Record("gpu")
    answer(record, quick=True, saved=lambda: known.append(list(asked)))
    assert asked == list(QUESTIONS)
    assert known == [asked[: n + 1] for n in range(len(asked))]  # each as soon as it was answered
    assert f"{failing}: failed: RuntimeError: no such memory" in record.notes


def test_nothing_is_asked_after_the_time():
    record = Record("gpu")
    answer(record, quick=True, limit_secs=-1)
    assert not record.samples
    assert sum("not asked" in note for note in record.notes) == len(QUESTIONS)


def test_calls_of_save_are_those_of_windows_snapshots_and_stock():
    record = Record("transfer")
    measure(record, lambda: _model(8, leaves=6), saves=2)
    for kind in ("", "_snapshot", "_beside", "_stock"):
        assert len(record.samples[f"save_call{kind}_ms"]) == 2
        assert len(record.samples[f"save_and_step{kind}_ms"]) == 2
        assert len(record.samples[f"save_idle{kind}_us"]) == 6
        assert len(record.samples[f"full_collections_per_save{kind}"]) == 1
        assert len(record.samples[f"grown_old_per_save{kind}"]) == 1
    assert len(record.samples["save_call_ratio"]) == len(record.samples["held_back_ratio"]) == 2


@pytest.mark.usefixtures("its_own_garbage")
def test_full_collections_are_counted_by_save():
    class Collecting:
        def run(self, label):
            for generation in (0, 2, 2):
                gc.collect(generation)

    record = Record("transfer")
    _add_collections(record, "_stock", Collecting(), range(8))
    assert record.samples["full_collections_per_save_stock"] == [8]
    assert len(record.samples["full_collection_ms"]) == 16


@pytest.mark.usefixtures("its_own_garbage")
def test_what_comes_to_the_oldest_generation_is_counted_by_save():
    class Keeping:
        def __init__(self):
            self.kept = []

        def run(self, label):
            self.kept += [[] for _ in range(500)]
            gc.collect(1)

    record, keeping = Record("transfer"), Keeping()
    gc.disable()  # but for these
    try:
        _add_collections(record, "_stock", keeping, range(8))
    finally:
        gc.enable()
    assert 4 * 500 <= record.samples["grown_old_per_save_stock"][0] < 4 * 600
    assert record.samples["full_collections_per_save_stock"] == [0]


def test_hooks_are_timed_outside_windows_where_one_opens_and_inside(monkeypatch):
    monkeypatch.setattr(benchmark, "_model", lambda width: _model(width, leaves=6))
    samples, reports, state_bytes, budget = benchmark._train(8, saves=4)
    for figure in ("hook_idle_us", "step_call_ms", "hook_opening_ms", "hook_window_ms"):
        assert samples[figure]
    assert [report.kind for report in reports] == ["snapshot", *["window"] * 4]
    assert state_bytes < budget


class Driver:
    """As much of CUDA's driver as is called, and what was called of it."""

    def __init__(self, failing=""):
        self.called = []
        self._failing = failing

    def __getattr__(self, name):
        def call(*arguments):
            assert len(arguments) == ARGUMENTS[name]
            self.called.append(name)
            return 2 if name == self._failing else 0

        return call


ARGUMENTS = {
    "cuInit": 1, "cuPointerGetAttribute": 3, "cuDevicePrimaryCtxRetain": 2,
    "cuCtxPushCurrent_v2": 1, "cuMemHostAlloc": 3, "cuMemcpyDtoH_v2": 3, "cuMemFreeHost": 1,
    "cuCtxPopCurrent_v2": 1, "cuDevicePrimaryCtxRelease_v2": 1,
}  # fmt: skip


def test_the_raw_link_is_timed_warm_and_leaves_nothing_behind(monkeypatch):
    driver = Driver()
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    secs = raw_link_secs(0x7F0000000000, 2**20, repeats=3)
    assert len(secs) == 3
    assert driver.called == [*list(ARGUMENTS)[:5], *["cuMemcpyDtoH_v2"] * 4, *list(ARGUMENTS)[6:]]


def test_a_driver_that_refuses_is_left_as_it_was(monkeypatch):
    driver = Driver(failing="cuMemHostAlloc")
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    with pytest.raises(OSError, match="cuMemHostAlloc returned CUDA error 2"):
        raw_link_secs(0x7F0000000000, 2**20, repeats=3)
    assert driver.called[-2:] == list(ARGUMENTS)[-2:]
