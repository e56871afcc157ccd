"""`bench gpu`: rehearsed at toy size on a CPU, and what it does when parts go wrong."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import hurry
import numpy as np
import nursery
import pytest

from bench.__main__ import main as bench_main
from bench.device import use_device, use_device_memory
from bench.gpu import benchmark as gpu
from bench.gpu import exact, torch_dcp
from bench.gpu import part as part_module
from bench.gpu.part import _ask_with_async_dispatch, main
from bench.gpu.table import AIMS, aims_of, show
from bench.record import ROOT, OptionError, Record, command


def begin(words, *, env, cwd=ROOT, stdout=sys.__stdout__, stderr=sys.__stderr__, **session):
    """`python -m ...` as `subprocess.Popen` has it, in a process that has its imports done."""
    assert words[:2] == [sys.executable, "-m"]
    assert session in ({}, {"start_new_session": True})
    return nursery.start(*words[2:], env=env, cwd=cwd, stdout=stdout, stderr=stderr)


def has_imports_done(module, patch):
    """What a module of the benchmark starts."""
    begun = types.SimpleNamespace(**vars(subprocess) | {"Popen": begin})
    patch.setattr(module, "subprocess", begun)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """The one command, in the folder of its results: files by name, and what it printed."""
    out = tmp_path_factory.mktemp("gpu")
    words = [str(ROOT / "bench" / "__main__.py"), "gpu", "--quick", "--minutes", "9"]
    flags = {  # compiled in a hurry and once for all parts: nothing is timed here
        "XLA_FLAGS": f"--xla_cpu_max_isa=AVX {hurry.FLAGS}",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
    }
    printed, before = io.StringIO(), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        has_imports_done(gpu, patch)
        patch.setattr(sys, "argv", [*words, "--out", str(out)])
        for name, value in flags.items():
            patch.setenv(name, value)
        bench_main()
    signal.signal(signal.SIGTERM, before)
    files = {path.name: path.read_text(encoding="utf-8") for path in out.iterdir()}
    return files, printed.getvalue()


def test_every_part_is_done(rehearsal):
    files, printed = rehearsal
    summary = json.loads(files["gpu.json"])
    states = dict(note.split(": ", 1) for note in summary["notes"])
    assert [part.name for part in gpu.PARTS] == list(states)
    assert all(state.startswith("done") for state in states.values()), files["log.txt"]
    aims = printed[printed.rindex("\naims ") :]
    assert all(aim.text in aims for aim in AIMS)
    assert re.search(r"replayed moments: 0 ULPs +0 +yes", aims)
    assert len(printed) < 12_000  # what a borrowed machine may hand back of it


def test_parts_leave_few_files_that_say_what_they_measured(rehearsal):
    files, _ = rehearsal
    assert files.keys() <= {*(f"{part.name}.json" for part in gpu.PARTS), "gpu.json", "log.txt"}
    assert len(files) <= 8
    for name in files.keys() - {"log.txt"}:
        record = json.loads(files[name])
        assert record["figures"].keys() == record["samples"].keys()
        assert str(ROOT) not in files[name]
    figures = json.loads(files["gpu.json"])["figures"]
    assert figures["exact/adamw/moments/max_ulps"] == 0
    assert figures["library/adamw/audit_max_ulps"] == 0
    assert figures["gockpt_k2/6/window_steps"] == 2
    assert figures["gockpt_k2/6/early_bytes_ratio"] > 0.6  # both of Adam's moments
    for name in ("gockpt/6/throughput_ratio", "sixth/gockpt/6/throughput_ratio",
                 "memory/gockpt/6/host_memory_ratio", "write_gbps/disk"):  # fmt: skip
        assert figures[name] > 0


@pytest.mark.parametrize(
    "figure",
    [
        "pull_gbps/pinned_put/1MiB/cold",
        "pull_gbps/pinned_put/1MiB/warm",
        "pull_gbps/library/1MiB/warm",
        "step_inflation_ratio/pinning_beside/longest",
        "overlap_ratio",
        "overlap_ratio/later",
        "async_dispatch/overlap_ratio",
        "step_inflation_ratio/pull_beside",
        "donated_step_secs/pulled_buffer",
        "async_dispatch/donated_step_secs/pulled_buffer",
        "exact/adamw/moments/max_ulps",
        "exact/adamw/moments/differing",
        "rounded/adamw/params/max_ulps",
        "perturbed/adamw",
        "same_memory/pinned_to_numpy",
        "same_memory/numpy_to_cpu",
        "same_memory/staged_copy",
    ],
)
def test_the_first_questions_to_a_gpu_are_all_asked(rehearsal, figure):
    files, _ = rehearsal
    assert json.loads(files["gpu.json"])["samples"][figure]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_is_measured_where_it_is(rehearsal):
    files, _ = rehearsal
    record = json.loads(files["torch.json"])
    assert record["figures"]["torch/state_bytes"] == pytest.approx(2**20, rel=1e-4)
    assert len(record["samples"]["torch/stall_in_transfers"]) == 5


def test_torch_is_held_against_the_median_of_its_transfers(monkeypatch, tmp_path):
    record = Record("gpu torch")
    monkeypatch.setattr(torch_dcp, "_transfer_secs", lambda *_: [1.0, 2.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(torch_dcp, "_save_secs", lambda *_: (8.0, 8.0, 9.0))
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
    torch_dcp._measure(record, torch, None, {}, tmp_path, lambda: False, lambda: None)
    assert record.figures["torch/transfer_secs"] == 4.0
    assert record.samples["torch/stall_in_transfers"] == [2.0] * 5
    assert record.samples["torch/first_stall_in_transfers"] == [2.0]


def run_parts(tmp_path, *parts, secs=60.0):
    done = gpu.GpuRun(tmp_path)
    arguments = argparse.Namespace(directory=None, size=None, host_gib=None)
    for part in parts:
        done.run(part, secs, arguments, quick=True, cache=str(tmp_path))
    done.write_summary()
    return json.loads((tmp_path / "gpu.json").read_text())


def test_a_part_that_crashes_is_told_of(tmp_path, capsys):
    summary = run_parts(tmp_path, gpu.Part("train", 1.0, ("bench.no_such_module",)))
    assert summary["notes"][0].startswith("train: failed with exit code 1")
    assert "log.txt" in summary["notes"][0]
    assert "no_such_module" in (tmp_path / "log.txt").read_text()
    show(summary)
    assert "not measured" in capsys.readouterr().out


def test_a_folder_is_named_from_where_one_is(tmp_path, monkeypatch):
    """The parts run in the repository."""
    words = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda given, **_: words.extend(given))
    monkeypatch.setattr(gpu, "_wait", lambda *_: "done")
    Path("here").mkdir()
    done = gpu.GpuRun(Path("here"))
    arguments = argparse.Namespace(directory=Path("here"), size=None, host_gib=None)
    done.run(gpu.PARTS[0], 60.0, arguments, quick=True, cache=str(tmp_path))
    assert words[words.index("--out") + 1] == str(tmp_path / "here" / "transfer.json")
    assert words[words.index("--directory") + 1].startswith(str(tmp_path / "here"))


def test_a_part_without_time_does_not_begin(tmp_path):
    summary = run_parts(tmp_path, gpu.Part("train", 1.0, ("bench.no_such_module",)), secs=3.0)
    assert summary["notes"] == ["train: not run: the time was over"]


def test_what_a_part_leaves_behind_is_gone_also_if_it_was_killed(tmp_path):
    program = (
        "import os, pathlib, sys, tempfile, bench.record as r;"
        "pathlib.Path(tempfile.mkdtemp(), 'checkpoint').write_text('large');"
        "pathlib.Path(os.environ[r.MEMORY_VARIABLE], 'checkpoint').write_text('large');"
        f"pathlib.Path({str(tmp_path / 'seen')!r}).write_text(tempfile.gettempdir());"
        "os.kill(os.getpid(), 9)"
    )
    gpu_part = gpu.Part("train", 1.0, ("bench.gpu.part",))
    with pytest.MonkeyPatch.context() as patch:
        run = subprocess.Popen
        patch.setattr(
            gpu.subprocess, "Popen", lambda _, **k: run([sys.executable, "-c", program], **k)
        )
        patch.setattr(gpu, "MEMORY", tmp_path)
        summary = run_parts(tmp_path, gpu_part)
    assert summary["notes"][0].startswith("train: failed with exit code -9")
    assert not Path((tmp_path / "seen").read_text()).exists()
    assert not list(tmp_path.glob("bench-gpu-*"))


def test_parts_of_an_earlier_command_are_told_of(tmp_path):
    for name, commit in (("transfer", "c0ffee"), ("train", "decaf")):
        record = {"commit": commit, "figures": {name: 1.0}, "samples": {name: [1.0]}}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    summary = run_parts(tmp_path, *gpu.PARTS[:1], secs=0.0)
    earlier = "done by an earlier command, at commit decaf"
    assert summary["notes"] == [
        "transfer: not run: the time was over, what is told of it is from an earlier command",
        f"train: {earlier}",
    ]
    assert summary["figures"] == {"transfer": 1.0, "train": 1.0}
    assert summary["commit"] == "c0ffee"
    assert summary["command"] == command()


def test_tables_that_are_printed_again_are_of_the_command_that_measured(tmp_path):
    measured = "python -m bench gpu --parts transfer --minutes 1"
    (tmp_path / "gpu.json").write_text(json.dumps({"command": measured}))
    assert run_parts(tmp_path, *gpu.PARTS[:1], secs=0.0)["command"] == measured
    crashing = gpu.Part("train", 1.0, ("bench.no_such_module",))
    assert run_parts(tmp_path, crashing)["command"] == command()


@pytest.mark.parametrize(
    ("throughput", "drain", "met"), [(0.995, 0.9, "yes"), (0.994, 0.9, "NO"), (0.995, 1.0, "NO")]
)
def test_an_aim_is_met_at_every_interval_or_not(throughput, drain, met):
    samples = {
        "gockpt/20/throughput_ratio": [1.0], "gockpt/50/throughput_ratio": [0.9, throughput, 1.0],
        "gockpt/50/drain_over_interval": [drain], "sixth/gockpt/50/throughput_ratio": [0.1],
    }  # fmt: skip
    found = {text.split(":")[0]: met for text, _, met in aims_of(samples)}
    assert {found["throughput"], found["drain"]} == {"yes", met}
    assert found["device memory"] == "-"


def test_some_optimizers_are_not_all(rehearsal):
    files, printed = rehearsal
    assert json.loads(files["gpu.json"])["samples"]["exact/tried"] == [1.0]
    assert re.search(r"replay was tried of: all \d+ +1 +NO", printed)
    assert re.search(r"measurements of replay that failed: none +0 +yes", printed)
    assert "No accelerator ran: it is a rehearsal" in printed


def test_a_gpu_beside_the_cpu_backend_with_most_of_its_memory(monkeypatch):
    monkeypatch.setattr("bench.device.shutil.which", lambda _: "nvidia-smi")
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert gpu._environment("cache")["JAX_PLATFORMS"] == "cuda,cpu"
    assert gpu._environment("cache")["XLA_CLIENT_MEM_FRACTION"] == "0.92"
    # JAX refuses to start where both are set; what was asked for stands.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.8")
    found = gpu._environment("cache")
    assert found["XLA_CLIENT_MEM_FRACTION"] == "0.8"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in found
    use_device_memory(0.5, found)
    assert found["XLA_CLIENT_MEM_FRACTION"] == "0.5"
    # A rehearsal on a machine that has one: the CPU stands in for it.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = gpu._environment("cache")
    assert (found["JAX_PLATFORMS"], "--xla_cpu_max_isa=AVX" in found["XLA_FLAGS"]) == ("cpu", True)


@pytest.mark.parametrize(
    ("said", "used"), [(None, "cuda,cpu"), ("gpu", "cuda,cpu"), ("tpu", "tpu")]
)
def test_no_cpu_is_measured_where_a_gpu_does_not_start(said, used, monkeypatch):
    """JAX has read its variables by then, and alone would go on without the GPU."""
    environment = {} if said is None else {"JAX_PLATFORMS": said}
    told = {}
    monkeypatch.setattr("bench.device.shutil.which", lambda _: "nvidia-smi")
    monkeypatch.setattr("bench.device.os.environ", environment)
    monkeypatch.setattr("bench.device.jax.config.update", told.__setitem__)
    assert use_device(0.8, environment)
    assert told == {"jax_platforms": used}
    assert environment == {"JAX_PLATFORMS": used, "XLA_CLIENT_MEM_FRACTION": "0.8"}


def test_a_part_that_hangs_is_killed_with_what_it_started():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, start_new_session=True
    )
    assert gpu._wait(child, 0.0) == "killed when its time was over"
    assert child.returncode == -signal.SIGKILL
    child.stdin.close()


@pytest.fixture
def _own_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_own_sigterm")
def test_a_part_gets_its_share_of_the_time_that_is_left(tmp_path, monkeypatch):
    seen = []

    def run(self, part, secs, arguments, *, quick, cache):
        seen.append((part.name, secs))

    monkeypatch.setattr(gpu.GpuRun, "run", run)
    gpu.run(False, minutes=10.0, parts="train,exact", out=tmp_path, directory=None)
    assert [name for name, _ in seen] == ["train", "exact"]
    assert seen[0][1] == pytest.approx(600 * 5.0 / 6.2, rel=0.01)
    assert seen[1][1] == pytest.approx(600, rel=0.01)  # what the first has not used
    with pytest.raises(OptionError, match="no parts"):
        gpu.run(False, minutes=1.0, parts="trian", out=tmp_path, directory=None)


def test_a_process_beside_that_hangs_costs_its_own_answers_only(monkeypatch):
    def run(words, *, timeout, **_):
        raise subprocess.TimeoutExpired(words, timeout)

    record = Record("gpu transfer", {"overlap_ratio": [1.0]})
    monkeypatch.setattr("bench.gpu.part.subprocess.run", run)
    _ask_with_async_dispatch(record, argparse.Namespace(toy=True), 1.0)
    assert record.samples == {"overlap_ratio": [1.0]}
    assert record.notes == ["async_dispatch: TimeoutExpired, see the log."]


def test_the_optimizers_are_shared_out_to_processes(tmp_path, monkeypatch):
    """Two processes, an optimizer each, and one record of both."""
    has_imports_done(part_module, monkeypatch)
    out = tmp_path / "exact.json"
    words = ["part", "exact", "--toy", "--shares", "2", "--minutes", "5", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")  # set by it, and given back here
    main()
    record = json.loads(out.read_text())
    tried = [name for name in record["samples"] if name.startswith("perturbed/")]
    assert sorted(tried) == ["perturbed/adam", "perturbed/adamw"]
    assert record["samples"]["exact/tried"] == [2.0]
    assert record["samples"]["exact/failures"] == [0.0]
    assert record["details"]["histograms"].keys() >= {"exact/adam/moments", "exact/adamw/moments"}
    assert record["notes"] == exact.NOTES
    assert "failure" not in record["details"]


def test_what_a_share_has_not_done_is_told():
    record = Record("exact", {"exact/tried": [1.0]}, ["what was told of an earlier look"])
    left = "not measured, or failed, when the time was over: "
    details = {"histograms": {"exact/a": [1]}, "failures": {"_replay a": "why"}}
    one = {
        "samples": {"perturbed/a": [0.0], "exact/tried": [1.0], "exact/failures": [1.0]},
        "notes": ["both", f"{left}b."], "details": details,
    }  # fmt: skip
    begun = {"samples": {}, "notes": ["both"], "details": {}}
    exact.gather(record, [one, begun], ["a", "b", "c"])
    assert record.samples == {
        "perturbed/a": [0.0], "exact/tried": [1.0], "exact/failures": [1.0],
    }  # fmt: skip
    assert record.notes == ["both", f"{left}b; c."]
    assert record.details == one["details"]


def test_histograms_count_every_element_once():
    true = np.linspace(1.0, 2.0, 7, dtype=np.float32)
    off = true.view(np.int32) + np.array([0, 1, 2, 3, 9, 2000, 0], np.int32)
    replayed = off.view(np.float32).copy()
    replayed[6] = np.nan
    record = Record("exact", details={"histograms": {}})
    exact.compare_leaves(record, "exact/x", ["[1].mu"], {0: replayed}, [true])
    assert record.details["histograms"] == {"exact/x/moments": [1, 1, 1, 1, 0, 1, 0, 0, 2]}
    assert record.samples["exact/x/moments/differing"] == [pytest.approx(6 / 7)]
