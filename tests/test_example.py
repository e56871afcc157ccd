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


def train(directory: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    # The runs of a test compile the same programs: once.
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled")}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "train_lm.py"), *FLAGS, f"--directory={directory}", *extra],
        env=os.environ | ENVIRONMENT | compiled,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


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


def test_killed_run_resumes_to_the_same_end(tmp_path, lm):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    compare, journal = lm["compare"], lm["journal"]
    _, expected = reported(unbroken)
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
