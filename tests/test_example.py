"""The example, as a user runs it: a run, a kill inside a window, a resumption, the same end."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import hurry
import numpy as np
import nursery
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STEPS, CRASH_AT, CRASHED_WINDOW = 16, 9, 10
FLAGS = ["--size=pico", "--batch-size=4", "--seq-len=16", f"--steps={STEPS}"]
FLAGS += ["--save-every=5", "--window=3"]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # The steps take milliseconds, compilation takes nearly all of the time.
    "XLA_FLAGS": f"--xla_cpu_max_isa=AVX --xla_force_host_platform_device_count=2 {hurry.FLAGS}",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def train(
    directory: Path, *extra: str, program: Path = EXAMPLES / "train_lm.py"
) -> subprocess.CompletedProcess[str]:
    # The runs of a test compile the same programs: once.
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled")}
    return nursery.run(
        str(program), *FLAGS, f"--directory={directory}", *extra,
        env=os.environ | ENVIRONMENT | compiled, cwd=directory.parent, limit_secs=500,
    )  # fmt: skip


STOPPED_AT_9 = f"""
import signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_lm
batch = train_lm.data.batch
def stop_at_9(*args, step, **more):
    if step == 9:
        signal.raise_signal(signal.SIGTERM)
    return batch(*args, step=step, **more)
train_lm.data.batch = stop_at_9
train_lm.main()
"""


def reported(directory: Path) -> tuple[subprocess.CompletedProcess[str], dict]:
    report = directory / "report.json"
    result = train(directory, f"--report={report}")
    assert result.returncode == 0, result.stderr
    return result, json.loads(report.read_text())


@pytest.fixture
def lm(monkeypatch):
    """The example's helper modules, which are not installed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from lm import compare, data, journal

    yield {"compare": compare, "data": data, "journal": journal}
    for name in [name for name in sys.modules if name == "lm" or name.startswith("lm.")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The directory of a run to the end, and its report."""
    directory = tmp_path_factory.mktemp("example") / "unbroken"
    return directory, reported(directory)[1]


def test_killed_run_resumes_to_the_same_end(unbroken, lm):
    unbroken, expected = unbroken
    broken = unbroken.parent / "broken"
    compare, journal = lm["compare"], lm["journal"]
    assert expected["resumed_from"] is None
    assert [save["step"] for save in expected["saves"]] == [0, 5, 10, 15]

    killed = train(broken, f"--crash-at={CRASH_AT}")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    record = json.loads((broken / journal.CRASH).read_text())
    assert record["step"] == CRASH_AT
    assert re.fullmatch(rf"window \d/3( -> step {CRASHED_WINDOW})?", record["window"])
    # Steps take milliseconds here: the kill may also have caught the commit of save 5.
    last_whole = compare.saved_labels(broken / "checkpoints")[-1]
    assert last_whole in (0, 5)

    resumed, report = reported(broken)
    assert report["resumed_from"] == last_whole
    assert f"resumed from checkpoint {last_whole}" in resumed.stdout
    assert report["losses"] == expected["losses"][last_whole + 1 :]
    # The killed process's losses survived, and were computed again with the same result.
    rows = journal.read_losses(broken)
    assert len(rows) > STEPS
    assert set(rows) == set(journal.read_losses(unbroken))
    for label in (10, 15):
        leaves = compare.compare_checkpoints(
            unbroken / "checkpoints", broken / "checkpoints", label
        )
        assert [leaf for leaf in leaves if leaf.differing] == []


def test_stopped_run_saves_and_resumes_to_the_same_end(unbroken, lm):
    """By SIGTERM, where no save was due."""
    unbroken, expected = unbroken
    stopped = unbroken.parent / "stopped"
    program = stopped.parent / "stopped_at_9.py"
    program.write_text(STOPPED_AT_9)
    ended = train(stopped, program=program)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert "stopped by SIGTERM" in ended.stderr
    assert lm["compare"].saved_labels(stopped / "checkpoints")[-1] == 9
    _, report = reported(stopped)
    assert report["resumed_from"] == 9
    assert report["losses"] == expected["losses"][10:]
    leaves = lm["compare"].compare_checkpoints(
        unbroken / "checkpoints", stopped / "checkpoints", 15
    )
    assert [leaf for leaf in leaves if leaf.differing] == []


@pytest.mark.parametrize("option", ["--steps=0", "--save-every=0", "--seed=-1", "--batch-size=3"])
def test_wrong_options_are_refused_in_a_line(tmp_path, option):
    refused = train(tmp_path / "run", option)
    assert refused.returncode == 2
    assert "error: " in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_settings_that_a_kill_has_cut_off_are_written_again(tmp_path, lm, monkeypatch):
    """Half of them would be an error of every later run."""
    claim = lm["journal"].claim
    write = Path.write_text

    def half_of_it(self, text, **more):
        write(self, text[:3], **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half_of_it)
        with pytest.raises(KeyboardInterrupt):
            claim(tmp_path, {"seed": 0})
    claim(tmp_path, {"seed": 0})
    with pytest.raises(ValueError, match="`seed`: expected 0, got 1"):
        claim(tmp_path, {"seed": 1})


def test_other_settings_are_refused_not_continued(tmp_path, lm):
    claim = lm["journal"].claim
    claim(tmp_path, {"seed": 0, "steps": 10})
    claim(tmp_path, {"seed": 0, "steps": 10})
    with pytest.raises(ValueError, match="`seed`: expected 0, got 1"):
        claim(tmp_path, {"seed": 1, "steps": 10})


def test_batches_depend_on_seed_and_step_only(lm):
    corpus = lm["data"].load_corpus()
    assert len(corpus) > 2_000_000
    shape = {"size": 4, "length": 16}
    batch = lm["data"].batch(corpus, seed=1, step=7, **shape)
    assert batch.shape == (4, 17)
    assert batch.dtype == np.uint8
    np.testing.assert_array_equal(batch, lm["data"].batch(corpus, seed=1, step=7, **shape))
    for seed, step in [(1, 8), (2, 7)]:
        assert (batch != lm["data"].batch(corpus, seed=seed, step=step, **shape)).any()


@pytest.mark.parametrize(
    ("expected", "got", "differing", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0.0),
        ([1.0, 4.0], [2.0, 4.0], 1, 0.25),
        ([0.0, 1.0], [-0.0, 1.0], 1, 0.0),
        ([np.nan, 1.0], [np.nan, 1.0], 0, 0.0),
        ([1.0, 1.0], [np.nan, 1.0], 1, np.inf),
    ],
)
def test_comparison_is_of_bits(lm, expected, got, differing, relative):
    arrays = [np.array(values, np.float32) for values in (expected, got)]
    leaf = lm["compare"].compare_leaf("x", *arrays)
    assert (leaf.differing, leaf.relative) == (differing, relative)
