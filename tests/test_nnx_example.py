"""The NNX example, as a user runs it: a run that goes on from a checkpoint ends the same."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import hurry
import jax
import numpy as np
import nursery
import orbax.checkpoint as ocp

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "nnx_train.py"
FLAGS = ["--width=16", "--layers=1", "--batch-size=2", "--length=8", "--save-every=5", "--window=3"]
FLAGS += ["--steps=16"]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # Compilation takes nearly all of the time.
    "XLA_FLAGS": f"--xla_cpu_max_isa=AVX --xla_force_host_platform_device_count=1 {hurry.FLAGS}",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
SAVES = re.compile(r"^checkpoint (\d+): (\w+), K=(\d)", re.MULTILINE)
LOSSES = re.compile(r"^step.*$", re.MULTILINE)


STOPPED_AT_7 = f"""
import signal, sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import nnx_train
batch = nnx_train.data.batch
def stop_at_7(*args, step, **more):
    if step == 7:
        signal.raise_signal(signal.SIGTERM)
    return batch(*args, step=step, **more)
nnx_train.data.batch = stop_at_7
nnx_train.main()
"""


def run(directory: Path, program: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    # The runs of a test compile the same programs: once.
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled")}
    return nursery.run(
        str(program), *FLAGS, f"--dir={directory}",
        env=os.environ | ENVIRONMENT | compiled, cwd=directory.parent, limit_secs=500,
    )  # fmt: skip


def train(directory: Path) -> str:
    result = run(directory)
    assert result.returncode == 0, result.stderr
    return result.stdout


def restored(directory: Path, label: int) -> dict[str, np.ndarray]:
    """By stock Orbax, without a target."""
    with ocp.CheckpointManager(directory / "checkpoints") as stock:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        tree = stock.restore(label, args=args).state
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): as_numpy(leaf) for path, leaf in leaves}


def as_numpy(leaf: jax.Array) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def test_a_run_goes_on_from_its_checkpoint_to_the_same_end(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    told = train(unbroken)
    assert SAVES.findall(told) == [
        ("0", "snapshot", "1"), *((str(n), "window", "3") for n in (5, 10, 15)),
    ]  # fmt: skip
    shutil.copytree(unbroken, broken)
    for later in (10, 15):
        shutil.rmtree(broken / "checkpoints" / str(later))
    told_again = train(broken)
    assert "resumed from checkpoint 5" in told_again
    assert LOSSES.findall(told_again) == LOSSES.findall(told)[1:]
    expected, got = (restored(directory, 15) for directory in (unbroken, broken))
    assert expected.keys() == got.keys()
    assert {path for path in expected if expected[path].tobytes() != got[path].tobytes()} == set()
    assert any("dropout" in path for path in got)
    assert_stops_and_goes_on(tmp_path / "stopped", LOSSES.findall(told))


def assert_stops_and_goes_on(directory: Path, losses: list[str]) -> None:
    """By SIGTERM, where no save was due."""
    program = directory.parent / "stopped_at_7.py"
    program.write_text(STOPPED_AT_7)
    ended = run(directory, program)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert "stopped by SIGTERM, and saved" in ended.stderr
    assert re.search(r"^checkpoint 7: ", ended.stdout, re.MULTILINE)
    told = train(directory)
    assert "resumed from checkpoint 7" in told
    assert LOSSES.findall(told) == [line for line in losses if int(line.split()[1]) > 7]
