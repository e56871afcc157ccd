"""The benchmark of the steps around a save: what it counts, and what it refuses."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import types

import jax
import jax.numpy as jnp
import pytest

from bench.around import benchmark as around
from bench.record import Record
from bench.train.modes import DeviceCopy, Mode, make_mode

CHOSEN = {
    "size": None, "modes": "ideal,gockpt_k3+apart", "interval": 12, "saves": 2, "directory": None,
    "profile": None, "out": None, "host_gib": None,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_it_measures_modes_and_experiments(tmp_path, monkeypatch):
    out, settings, looked, before = tmp_path / "around.json", [], [], []

    def noted(name, setting):
        settings.append(setting)
        before.append(sum(looked))
        looked.clear()
        return make_mode(name, setting)

    monkeypatch.setattr(around, "make_mode", noted)
    monkeypatch.setattr(around, "is_in_memory", lambda _: True)
    monkeypatch.setattr(around, "full_collections", lambda: contextlib.nullcontext([]))
    gathering = types.SimpleNamespace(collect=lambda: looked.append(1))
    monkeypatch.setattr(around, "gc", gathering)
    around.run(True, **CHOSEN | {"out": out, "profile": "gockpt_k3+apart", "host_gib": 4})
    found = json.loads(out.read_text())
    assert "Checkpoints went to memory." in found["notes"]
    assert before == [1, 1], "what one mode leaves is looked at before the next"
    first, second = settings
    assert first.step_secs is None
    assert second.step_secs == pytest.approx(found["figures"]["toy/ideal/step_ms"] / 1e3, rel=1e-3)
    assert second.host_budget_bytes == 3 * 2**30
    assert len(found["samples"]["toy/ideal/around_save_ms"]) == 2
    assert len(found["samples"]["toy/gockpt_k3+apart/step_call_ms/in_window"]) == 4
    kinds = [r["kind"] for r in found["details"]["toy/gockpt_k3+apart"]["reports"]]
    assert kinds[2:] == ["window"] * 3, "two that count and the one that is profiled"
    assert [path.name for path in tmp_path.glob("*.pb")] == ["toy-gockpt_k3+apart.xplane.pb"]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_mode_that_fails_costs_no_other(tmp_path, monkeypatch, capsys):
    def fail(self, label, state):
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # as a donating step may have
        raise MemoryError("planted")

    monkeypatch.setattr(DeviceCopy, "save", fail)
    out = tmp_path / "around.json"
    chosen = {"modes": "device_copy,ideal", "interval": 9, "saves": 1, "out": out}
    around.run(True, **CHOSEN | chosen)
    found = json.loads(out.read_text())
    assert "MemoryError: planted" in found["details"]["failures"]["toy/device_copy"]
    assert "toy/device_copy: failed, see the record's `failures`." in found["notes"]
    assert "toy/device_copy failed: MemoryError('planted')" in capsys.readouterr().err
    assert len(found["samples"]["toy/ideal/around_save_ms"]) == 1
    assert not [name for name in found["samples"] if "device_copy" in name]


class Endless(Mode):
    """Its saves go on until they are waited for."""

    def __init__(self):
        self.under_way, self.found_one = False, []

    def step(self, state, batch):
        return state, jnp.zeros(())

    def save(self, label, state):
        if label == 24:
            gc.collect()
        if label % 12 == 0:
            self.found_one.append(self.under_way)
            self.under_way = True

    def finish(self):
        self.under_way = False


@pytest.mark.usefixtures("its_own_garbage")
def test_no_save_waits_for_the_one_before():
    bench, mode = object.__new__(around._OfSize), Endless()
    bench._chosen, bench._state = argparse.Namespace(**CHOSEN), None
    bench._job = types.SimpleNamespace(batches=[None] * 16)
    gc.disable()  # but for the one collection below
    try:
        steps = bench._train("endless", mode)
    finally:
        gc.enable()
    assert len(steps) == 12 * 3 + 6
    assert steps[24].collecting > steps[25].collecting == 0
    assert mode.found_one == [False] * 4


def test_a_save_costs_what_its_steps_took_over_the_others():
    record = Record("around")
    bench = object.__new__(around._OfSize)
    bench._chosen, bench._record, bench._size = argparse.Namespace(**CHOSEN), record, "toy"
    steps = [around._Step(1.0, 0.5, 10.0) for _ in range(48)]
    for at, more in ((24, 7.0), (26, 2.0), (36, 5.0), (40, 1.0)):
        steps[at] = around._Step(3.0, 4.0, 10.0 + more)
    steps[25] = steps[37] = around._Step(6.0, 0.5, 10.0)
    steps[30] = around._Step(1.0, 0.5, 10.0, collecting=8.0)
    why = "3 steps: predicted stall 0.125 s, of a snapshot 2.500 s"
    reports = {24: {"window_steps": 4, "reason": "`steps=4`"},
               36: {"window_steps": 3, "reason": why}}  # fmt: skip
    assert bench._add("gockpt_k4", steps, reports) == 10.0
    assert record.samples["toy/gockpt_k4/predicted_stall_ms"] == [125.0]
    assert record.samples["toy/gockpt_k4/window_steps"] == [4, 3]
    assert record.samples["toy/gockpt_k4/around_save_ms"] == [9.0, 6.0]
    assert record.samples["toy/gockpt_k4/step_ms"] == [10.0] * 4
    assert record.samples["toy/gockpt_k4/save_call_ms"] == [4.0, 4.0]
    assert record.samples["toy/gockpt_k4/full_collection_ms"] == [8.0]
    assert record.samples["toy/gockpt_k4/step_call_ms/behind"] == [6.0, 6.0]
    assert record.samples["toy/gockpt_k4/step_call_ms/in_window"] == [1, 1, 3, 1, 3]


@pytest.mark.parametrize(
    ("wrong", "error", "why"),
    [
        ({"modes": "gockpt_k4+graph"}, ValueError, r"no experiment 'graph'; give one of \['apart'"),
        ({"modes": "gockpt_4"}, ValueError, "no mode 'gockpt_4'"),
        ({"size": "toy,toyy"}, ValueError, "no size 'toyy'; give some of toy, 3m"),
        ({"saves": 0}, ValueError, "--saves at least 1; got 12 and 0"),
        ({"interval": 8}, ValueError, "--interval must be at least 9"),
        ({"profile": "gockpt"}, ValueError, "--profile gockpt needs --out, and to be one of"),
    ],
)
def test_what_there_is_not_is_refused(wrong, error, why):
    with pytest.raises(error, match=why):
        around.run(True, **CHOSEN | wrong)
