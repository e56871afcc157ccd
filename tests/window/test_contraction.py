"""Training on a CPU that contracts: no windows that would have to be exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gockpt_jax.replay.contraction import cpu_contracts

SCRIPT = """
import json, sys, warnings
import gockpt_jax as gockpt
from gockpt_jax.replay.contraction import cpu_contracts
from window.training_loop import Options, train

found = {}
for name, audit in {"exact": gockpt.Audit(), "any": gockpt.Audit(max_relative_error=1e-5)}.items():
    window = gockpt.WindowOptions(steps=3, audit=audit)
    options = Options(save_interval_steps=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        directory = f"{sys.argv[1]}/{name}"
        with gockpt.GoCkptManager(directory, options=options, window=window) as manager:
            train(manager, range(11))
            kinds = [r.kind for r in manager.reports]
    texts = [str(w.message) for w in caught if w.category is gockpt.SnapshotOnlyWarning]
    found[name] = (kinds, texts)
print(json.dumps((cpu_contracts(), found)))
"""


def test_these_tests_run_without():
    assert not cpu_contracts()


def test_snapshots_unless_rounding_is_accepted(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    contracts, found = json.loads(run.stdout)
    if not contracts:
        pytest.skip("this processor has no fused multiply-add")
    windows = ["snapshot", "window", "window"]
    assert found["any"] == [windows, []]
    kinds, (warning,) = found["exact"]
    assert kinds == ["snapshot"] * 3
    assert "xla_cpu_max_isa=AVX" in warning
    assert "Audit(max_relative_error=" in warning
