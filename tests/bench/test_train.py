"""The training benchmark: what it counts, what it chooses, that no mode is favoured."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bench.__main__ import main
from bench.record import ROOT, OptionError, Record, command, without_paths
from bench.train import benchmark as train
from bench.train.figures import add_phase
from bench.train.link import Link, slow_pulls
from bench.train.modes import DeviceCopy, Setting, make_mode
from bench.train.phases import Loop, Peaks, Phase, _sampled
from bench.train.place import Place, choose
from bench.train.rounds import Interval, Shared
from bench.train.table import show_modes
from gockpt_jax.transfer.pull import Pull

GB = 10**9


def chosen(*words, out=None):
    """The options of a command."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args(words)), out=out)


def phase(mode, wall_secs, *, steps=10, saves=1, drain_secs=0.0, device=0):
    return Phase(
        mode, steps, wall_secs, drain_secs, saves, [wall_secs / steps] * steps, [0.0] * steps,
        [0.5] * saves, Peaks(device=device), [],
    )  # fmt: skip


def test_inflation_is_what_a_save_adds_to_undisturbed_steps():
    record, ideal = Record("train"), phase("ideal", 10.0, saves=0, device=100)
    common = {"interval": 5, "ideal": ideal, "state_bytes": 1}
    stock = phase("orbax_async", 14.0, saves=2, drain_secs=1.0, device=150)
    inflation = add_phase(record, stock, async_inflation=None, **common)
    assert inflation == 2.0
    add_phase(record, phase("gockpt", 11.0, saves=2), async_inflation=inflation, **common)
    figures = record.figures
    assert figures["orbax_async/5/inflation_with_drain_secs_per_save"] == 2.5
    assert figures["orbax_async/5/throughput_ratio"] == pytest.approx(10 / 14)
    assert figures["orbax_async/5/job_throughput_ratio"] == pytest.approx(10 / 15)
    assert figures["orbax_async/5/device_memory_ratio"] == 1.5
    assert figures["orbax_async/5/drain_over_interval"] == pytest.approx(0.5 / 5.0)
    assert figures["gockpt/5/inflation_vs_stock_async"] == 0.25
    lost = (2.5 + 0.5 + 60) / 3600
    assert figures["orbax_async/5/ettr_mtbf_1h"] == pytest.approx(1 / (1 + 2 / 5 + lost))


def test_around_a_save_is_what_no_drift_is_in():
    record, ideal = Record("train"), phase("ideal", 10.0, saves=0)
    slow = phase("gockpt", 120.0, steps=60)  # all of it twice as slow as the undisturbed one
    slow.saved_at = [12]
    slow.step_secs[0], slow.step_secs[12], slow.step_secs[13] = 9.0, 2.75, 1.5
    add_phase(record, slow, interval=50, ideal=ideal, state_bytes=1, async_inflation=None)
    assert record.figures["gockpt/50/around_save_secs"] == pytest.approx(0.25)
    short = phase("gockpt", 12.0, steps=20)
    short.saved_at = [12]
    add_phase(record, short, interval=20, ideal=ideal, state_bytes=1, async_inflation=None)
    assert "gockpt/20/around_save_secs" not in record.figures


def test_reports_give_what_the_planner_expected():
    report = {
        "reason": "3 steps: predicted stall 0.125 s, of a snapshot 2.500 s; at most ...",
        "stall_secs": 0.1, "drain_secs": 2.0, "write_secs": 1.0, "commit_secs": 0.1,
        "window_steps": 3, "state_bytes": 10**9, "early_bytes": 6 * 10**8,
        "gradient_bytes": 5 * 10**8, "peak_device_bytes": 25, "audit": {"max_ulps": 1},
    }  # fmt: skip
    record, ideal = Record("train"), phase("ideal", 10.0, saves=0, device=100)
    window = phase("gockpt", 11.0, device=150)
    window.reports.append(report)
    add_phase(record, window, interval=5, ideal=ideal, state_bytes=10**9, async_inflation=None)
    figures = record.figures
    assert figures["gockpt/5/predicted_stall_secs"] == 0.125
    assert figures["gockpt/5/moved_bytes_ratio"] == 1.5
    assert figures["gockpt/5/drain_gb_per_sec"] == pytest.approx(0.2)
    assert figures["gockpt/5/device_memory_over_plan"] == pytest.approx(150 / 125)
    assert figures["gockpt/5/audit_max_ulps"] == 1


def test_bytes_on_a_link_wait_for_those_before_them(monkeypatch):
    now, slept = [100.0], []
    clock = types.SimpleNamespace(perf_counter=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr("bench.train.link.time", clock)
    link = Link(10.0)
    sent = [link.send([jnp.zeros(5)]), link.send([jnp.zeros(5), jnp.zeros(10)])]
    link.close()
    assert all(each.done() for each in sent)
    assert slept == [2.0, 8.0]  # the second set out when the first had arrived
    assert link.carried_bytes == 80


def test_a_pull_is_ready_when_the_link_has_carried_it(monkeypatch):
    arrived = threading.Event()
    clock = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: arrived.wait())
    monkeypatch.setattr("bench.train.link.time", clock)
    array = jax.block_until_ready(jnp.arange(8, dtype=jnp.float32))
    with slow_pulls(Link(1.0)):
        pull = Pull([array], list)
        assert not pull.is_ready()
        arrived.set()
        assert pull.result()[0].tolist() == list(range(8))
        assert pull.is_ready()
    assert Pull([array], list).is_ready()


class Saved:
    """A mode that saves as its policy would, and remembers."""

    def __init__(self, interval):
        self.interval, self.labels, self.saved = interval, [], []

    def step(self, state, batch):
        return state, jnp.zeros(())

    def save(self, label, state):
        self.labels.append(label)
        if label % self.interval == 0:
            self.saved.append(len(self.labels))
        return label % self.interval == 0

    def is_saving(self):
        return False

    def finish(self):
        pass

    def reports(self):
        return []


def test_each_phase_saves_after_its_lead_and_then_every_interval():
    job = types.SimpleNamespace(batches=[None], donating=lambda state, batch: (state, None))
    loop, mode = Loop(jnp.zeros(()), job, interval=10, lead=7), Saved(10)
    found = [loop.run("gockpt", mode, steps) for steps in (10, 25, 9)]
    assert mode.saved == [8, 18, 28, 43]  # calls 8; 10 + 8, 18; 35 + 8
    assert [p.saves for p in found] == [1, 2, 1]
    assert mode.labels == sorted(set(mode.labels))
    assert [len(p.visible_secs) for p in found] == [1, 2, 1]


def test_a_save_that_the_next_one_waits_for_has_the_time_that_it_took(monkeypatch):
    now = [0.0]

    class Slow(Saved):
        """A step takes a second; the second save of a phase waits five for the first."""

        def step(self, state, batch):
            now[0] += 1.0
            return super().step(state, batch)

        def save(self, label, state):
            is_accepted = super().save(label, state)
            now[0] += 5.0 * (is_accepted and len(self.saved) == 2)
            return is_accepted

        def is_saving(self):
            return now[0] < 30.0

        def finish(self):
            now[0] = max(now[0], 30.0)

    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("bench.train.phases.time", clock)
    job = types.SimpleNamespace(batches=[None], donating=lambda state, batch: (state, None))
    found = Loop(jnp.zeros(()), job, interval=10, lead=7).run("gockpt", Slow(10), 20)
    assert found.saved_at == [7, 17]
    assert found.visible_secs == [15.0, 7.0]  # ten steps and the wait; from 23 to 30
    record, ideal = Record("train"), phase("ideal", 10.0, saves=0)
    add_phase(record, found, interval=10, ideal=ideal, state_bytes=1, async_inflation=None)
    assert record.figures["gockpt/10/drain_over_interval"] == 1.5


@pytest.mark.usefixtures("its_own_garbage")
def test_collections_of_garbage_are_told_of_the_step_that_had_them():
    class Collecting(Saved):
        def save(self, label, state):
            if super().save(label, state):
                gc.collect()
                return True
            return False

    job = types.SimpleNamespace(batches=[None], donating=lambda state, batch: (state, None))
    loop, mode = Loop(jnp.zeros(()), job, interval=10, lead=7), Collecting(10)
    gc.disable()  # no other ones
    try:
        found = loop.run("gockpt", mode, 10)
    finally:
        gc.enable()
    assert [secs > 0 for secs in found.collected_secs] == [n in found.saved_at for n in range(10)]
    record, ideal = Record("train"), phase("ideal", 10.0, saves=0)
    both = found.plus(phase("gockpt", 1.0))
    add_phase(record, both, interval=10, ideal=ideal, state_bytes=1, async_inflation=None)
    collected = record.figures["gockpt/10/full_collection_secs"]
    assert 0 < collected == sum(found.collected_secs) <= found.wall_secs


DISK = Place(Path("/disk"), 64 * GB, 2 * GB, False)
SLOW = Place(Path("/disk"), 64 * GB, 0.2 * GB, False)
MEMORY = Place(Path("/dev/shm"), 64 * GB, 4 * GB, True)


@pytest.mark.parametrize(
    ("device", "places", "host", "secs", "expected"),
    [
        pytest.param(79, [DISK, MEMORY], 137, 540, ("1.7b", False), id="80-gb"),
        pytest.param(139, [DISK, MEMORY], 137, 540, ("2b", False), id="141-gb"),
        pytest.param(79, [DISK, MEMORY], 137, 180, ("800m", False), id="short"),
        pytest.param(79, [DISK, MEMORY], 137, 60, ("100m", False), id="too-short-for-the-steps"),
        pytest.param(79, [SLOW, MEMORY], 137, 540, ("1.7b", True), id="slow-disk"),
        pytest.param(79, [SLOW], 137, 540, ("300m", False), id="only-a-slow-disk"),
        pytest.param(79, [DISK], 48, 540, ("800m", False), id="small-host"),
        pytest.param(0, [DISK], 16, 540, ("10m", False), id="no-device"),
    ],
)
def test_the_size_is_what_device_disk_host_and_time_allow(device, places, host, secs, expected):
    name, place, why = choose(
        places, device_bytes=device * GB, saves=1, interval=50, host_bytes=host * GB, secs=secs,
        phases=12,
    )  # fmt: skip
    assert (name, place.in_memory) == expected
    assert "4.2b: device memory" in why


@pytest.mark.parametrize(("host", "in_memory"), [(137, True), (48, False)])
def test_a_size_that_was_asked_for_has_its_place_chosen(host, in_memory):
    name, place, _ = choose(
        [SLOW, MEMORY], device_bytes=79 * GB, saves=1, interval=50, host_bytes=host * GB,
        secs=float("inf"), phases=12, sizes=("800m",),
    )  # fmt: skip
    assert (name, place.in_memory) == ("800m", in_memory)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A whole run at toy size, of which one mode fails."""
    out = tmp_path_factory.mktemp("bench") / "train.json"
    modes = "ideal,gockpt_k2,orbax_async,orbax_sync,device_copy"
    words = ("--size", "toy", "--modes", modes, "--intervals", "5", "--rounds", "1")
    with pytest.MonkeyPatch.context() as patch:

        def fail(self, label, state):
            raise MemoryError("planted")

        patch.setattr(DeviceCopy, "save", fail)
        train.run(True, **vars(chosen(*words, out=out)))
    return json.loads(out.read_text())


def test_what_was_measured_stays_if_the_process_ends(tmp_path):
    record = Record("train", details={"failures": {}, "phases": []})
    options = chosen(out=tmp_path / "train.json")
    job = types.SimpleNamespace(batches=[])
    interval = Interval(
        Shared(options, record, float("inf"), job, None, 0, [], 5, on_cpu=True), 10, tmp_path
    )
    interval.modes = dict.fromkeys(("ideal", "gockpt", "orbax_async"))
    interval.expected_secs = dict.fromkeys(interval.modes, 0.0)

    def run(name, steps):
        if name == "orbax_async":
            raise KeyboardInterrupt
        return phase(name, 1.0, steps=steps)

    interval._phase = run
    with pytest.raises(KeyboardInterrupt):
        interval._rounds()
    phases = json.loads(options.out.read_text())["details"]["phases"]
    assert [p["mode"] for p in phases] == ["ideal", "gockpt"]


def scripted(tmp_path, monkeypatch, *, secs, first, left_secs, minutes=5.0, modes=None):
    """The modes that are measured when phases take `secs`, and `gockpt`'s first one `first`."""
    now, phases = [0.0], []
    monkeypatch.setattr(
        "bench.train.rounds.time", types.SimpleNamespace(perf_counter=lambda: now[0])
    )
    monkeypatch.setattr(
        "bench.train.rounds.make_mode", lambda name, setting: types.SimpleNamespace(
            clean=lambda: None, settle=lambda: None, close=lambda: None
        )
    )  # fmt: skip

    def run(name, mode, steps):
        phases.append(name)
        is_first = name == "gockpt" and phases.count("gockpt") == 1
        took = (first if is_first else secs) if name != "ideal" else 0.1 * steps
        now[0] += took
        return phase(name, took, steps=steps, saves=int(name != "ideal"))

    record = Record("train", details={"failures": {}, "phases": []})
    options = chosen(f"--minutes={minutes}", *([f"--modes={modes}"] if modes else []))
    names = ["gockpt", "orbax_async", "gockpt_k4"]
    job = types.SimpleNamespace(batches=[])
    shared = Shared(options, record, left_secs, job, None, 1, names, 3, on_cpu=False)
    interval = Interval(shared, 20, tmp_path)
    interval.loop = types.SimpleNamespace(run=run, state=None)
    interval.run()
    counted = [p["mode"] for p in record.details["phases"]]
    return {name: counted.count(name) for name in names}, now[0]


def test_what_the_first_save_takes_once_drives_no_mode_out(tmp_path, monkeypatch):
    counts, end = scripted(tmp_path, monkeypatch, secs=2.5, first=40.0, left_secs=100.0)
    assert counts == dict.fromkeys(counts, 3)
    assert end < 100


def test_rounds_and_modes_are_as_many_as_the_time_allows(tmp_path, monkeypatch):
    counts, end = scripted(tmp_path, monkeypatch, secs=2.5, first=2.5, left_secs=27.0)
    assert min(counts["gockpt"], counts["orbax_async"]) >= 2
    assert counts["gockpt_k4"] == 0
    assert end <= 27


@pytest.mark.parametrize("asked", [{"minutes": 4.9}, {"modes": "gockpt,orbax_async,gockpt_k4"}])
def test_few_minutes_or_modes_by_name_have_one_round_of_all_rather_than_two_of_few(
    asked, tmp_path, monkeypatch
):
    counts, end = scripted(tmp_path, monkeypatch, secs=2.5, first=2.5, left_secs=27.0, **asked)
    assert min(counts.values()) == 1
    assert end <= 27


def test_a_mode_is_profiled_in_its_second_phase(tmp_path):
    folder = tmp_path / "new"  # which a profile may be the first to be left in
    options = chosen("--profile", "gockpt", out=folder / "train.json")
    job = types.SimpleNamespace(batches=[])
    shared = Shared(options, Record("train"), 1.0, job, None, 1, ["gockpt"], 3, on_cpu=True)
    interval = Interval(shared, 20, tmp_path)
    for name, number in (("gockpt", 0), ("orbax_async", 1), ("gockpt", 1)):
        assert not [*folder.glob("*.pb")]
        with interval._profiled(name, number):
            jnp.ones(8).block_until_ready()
    interval._tell_of_no_profile()
    assert [path.name for path in folder.glob("*.pb")] == ["gockpt.xplane.pb"]
    assert shared.record.notes == ["gockpt: a phase of its warm-up is in gockpt.xplane.pb."]
    shared.record.notes.clear()
    interval._tell_of_no_profile()
    assert shared.record.notes == ["gockpt: no profile, the time did not suffice."]


@pytest.mark.parametrize(
    ("out", "mode", "why"),
    [(None, "gockpt", "needs --out"), (Path("x"), "ideal", "none of the ways to save that are")],
)
def test_a_profile_has_a_mode_and_a_place(out, mode, why):
    with pytest.raises(OptionError, match=f"--profile {mode}.* {why}"):
        train._Bench(True, chosen("--profile", mode, out=out))


def test_a_mode_that_there_is_not_is_refused_before_anything_is_measured():
    with pytest.raises(OptionError, match=r"no mode 'gockpt_4'; give some of ideal, gockpt"):
        train._Bench(True, chosen("--modes", "ideal,gockpt_4"))


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_no_minutes_are_no_absence_of_a_limit(minutes):
    with pytest.raises(OptionError, match=f"--minutes takes a number above 0, got {minutes};"):
        train._Bench(True, chosen(f"--minutes={minutes}"))
    assert train._Bench(True, chosen()).until == float("inf")


@pytest.mark.parametrize(
    "words",
    [(), ("--modes", "gockpt,orbax_async"), ("--modes", "gockpt", "--intervals", "10,20")],
)
def test_growth_of_a_process_is_that_of_one_way_to_save(words):
    with pytest.raises(OptionError, match="--alone takes one way to save, at one interval"):
        train._Bench(True, chosen("--alone", *words))
    train._Bench(True, chosen("--alone", "--modes", "ideal,gockpt"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["train", "--size", "3k"], "there is no size '3k'; give one of toy, 3m"),
        (["train", "--intervals", "0"], "--intervals takes whole numbers above 0, as in 10,50;"),
        (["train", "--intervals", "10,x"], "got '10,x'"),
        (["memory", "--ways", "gockpt"], "there are no ways ['gockpt']; give some of gockpt_k2"),
        (["gpu", "--parts", "trian"], "there are no parts ['trian']; give some of transfer, train"),
        *(
            ([name, "--directory", "/nowhere"], "--directory /nowhere is no folder that can be")
            for name in ("train", "around", "memory", "gpu")
        ),
    ],
)
def test_what_is_asked_wrongly_is_said_without_a_traceback(words, why, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *words, "--quick"])
    monkeypatch.setattr(train, "_device", lambda: contextlib.nullcontext(""))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_warm_up_waits_for_the_armed_step(tmp_path, monkeypatch):
    settled = []

    class Compiling(Saved):
        def settle(self):
            settled.append(True)

        def clean(self):
            pass

    def run(name, mode, steps):
        found = phase(name, 1.0, steps=steps)
        found.reports.append({"reason": "`steps=4`" if settled else "still compiling"})
        return found

    record = Record("train", details={"failures": {}, "phases": []})
    shared = Shared(
        chosen(), record, float("inf"),
        types.SimpleNamespace(batches=[]), None, 1, ["gockpt"], 3, on_cpu=False,
    )  # fmt: skip
    interval = Interval(shared, 20, tmp_path)
    interval.loop = types.SimpleNamespace(run=run, state=None)
    interval.modes, interval.step_secs = {"gockpt": Compiling(20)}, 0.1
    assert [report["reason"] for report in interval._warm_up("gockpt").reports] == ["`steps=4`"]
    assert len(settled) == 2


@pytest.mark.parametrize("is_armed", [False, True])
def test_only_an_armed_step_is_waited_for(tmp_path, is_armed):
    waited = []
    job = types.SimpleNamespace(donating=jax.jit(lambda s, b: (s, 0.0)), keeping=None)
    mode = make_mode("gockpt", Setting(job, 2, tmp_path, None, 1))
    mode.settle()  # nothing was called: there is no program yet
    program = types.SimpleNamespace(is_armed=is_armed, wait_until_ready=lambda: waited.append(True))
    mode.step = types.SimpleNamespace(program=program)
    mode.settle()
    mode.close()
    assert bool(waited) == is_armed


def test_phases_keep_the_allocators_peak_and_are_judged_by_samples(monkeypatch):
    stats = {"bytes_in_use": 10, "peak_bytes_in_use": 50}
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr("bench.train.phases.jax.local_devices", lambda: [device])
    with _sampled() as peaks:
        stats["peak_bytes_in_use"] = 70
    assert (peaks.device, peaks.device_ever) == (10, 70)


def found(record, mode):
    return [p for p in record["details"]["phases"] if p["mode"] == mode]


def test_a_run_has_the_figures_of_every_mode(record):
    for mode in ("ideal", "gockpt_k2", "orbax_async", "orbax_sync"):
        assert record["figures"][f"{mode}/5/throughput_ratio"] > 0
    for figure in ("inflation_secs_per_save", "inflation_vs_stock_async", "drain_over_interval"):
        assert f"gockpt_k2/5/{figure}" in record["figures"]
    assert set(record["samples"]["gockpt_k2/5/window_steps"]) == {2}
    assert min(record["samples"]["gockpt_k2/5/early_bytes_ratio"]) > 0.6  # both of Adam's moments
    ideal = [p["wall_secs"] / p["steps"] for p in found(record, "ideal")]
    assert len(ideal) == 2  # before the round and after it
    figures = record["figures"]
    wall, steps = figures["gockpt_k2/5/wall_secs"], len(found(record, "gockpt_k2")[0]["step_secs"])
    expected = sum(ideal) / 2 * steps / wall
    assert figures["gockpt_k2/5/throughput_ratio"] == pytest.approx(expected, rel=1e-2)
    assert record["samples"]["gockpt_k2/5/audit_max_ulps"] == [0, 0]
    assert {p["mode"] for p in record["details"]["phases"]} >= {"gockpt_k2", "ideal"}


def test_a_mode_that_fails_is_dropped_and_told_of(record):
    assert "MemoryError: planted" in record["details"]["failures"]["device_copy/5"]
    assert not any(name.startswith("device_copy") for name in record["figures"])
    assert any("rounds only" in note for note in record["notes"])


def test_a_table_has_a_line_for_each_mode(record, capsys):
    show_modes("modes", record["samples"])
    lines = capsys.readouterr().out.splitlines()
    assert sum("gockpt_k2/5" in line for line in lines) == 2  # what it costs, what it holds
    for heading in ("inflation s", "ETTR 1 h", "drain s", "moved", "blocked GB/s", "of interval"):
        assert any(heading in line for line in lines), heading


def test_the_same_bytes_cross_the_link_in_every_mode(tmp_path):
    """The throttle is in two places; this is what makes them one."""
    carried = {}
    state = {"w": jnp.arange(1000.0), "n": jnp.zeros((), jnp.int32)}
    for name in ("orbax_async", "orbax_async_plain", "device_copy", "gockpt"):
        link = Link(1e12)
        job = types.SimpleNamespace(donating=jax.jit(lambda s, b: (s, 0.0)), keeping=None)
        setting = Setting(job, 2, tmp_path, link, 4004)
        with slow_pulls(link):
            mode = make_mode(name, setting)
            assert mode.save(2, state)
            mode.finish()
            mode.clean()
            mode.close()
        carried[name] = link.carried_bytes
        assert [p for p in (tmp_path / name).iterdir() if p.name.isdigit()] == []
    assert set(carried.values()) == {4004}


def test_commands_and_tracebacks_name_no_place(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", [f"{ROOT}/bench/__main__.py", "train", "--quick", "--out", "/a/b.json"]
    )
    assert command() == "python -m bench train --quick"
    text = f'File "{ROOT}/bench/x.py" and "/home/me/lib/python3.12/site-packages/jax/y.py"'
    assert without_paths(text) == 'File "bench/x.py" and "site-packages/jax/y.py"'


_CORES = """
import json, os, sys, threading
import jax
from bench.train.cores import device_cores

def where(pid=0):
    return sorted(os.sched_getaffinity(pid))

def started():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(where()))
    thread.start()
    thread.join()
    return seen[0]

if sys.argv[1] == "started before":
    jax.devices()
with device_cores() as apart:
    jax.jit(lambda x: x @ x)(jax.numpy.ones((256, 256))).block_until_ready()
    tasks = [where(int(task)) for task in os.listdir("/proc/self/task")]
    inside = [where(), started()]
print(json.dumps([apart, tasks, inside, where()]))
"""


def cores_in_a_child(how):
    return json.loads(
        subprocess.run(
            [sys.executable, "-c", _CORES, how],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be split")
def test_training_has_cores_of_its_own_where_there_is_no_accelerator():
    (device, host), tasks, inside, after = cores_in_a_child("starts there")
    assert not set(device) & set(host)
    assert after == sorted(device + host) == sorted(os.sched_getaffinity(0))
    assert inside == [host, host]
    assert device in tasks
    apart, *_, after = cores_in_a_child("started before")
    assert apart is None
    assert after == sorted(os.sched_getaffinity(0))
