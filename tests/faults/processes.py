"""Running `child.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .trainer import DEVICES

TESTS = Path(__file__).resolve().parent.parent
LIMIT_SECS = 100  # A child takes a few seconds; this much only when it hangs.


def environment(devices: int = DEVICES) -> dict[str, str]:
    """A child's environment: like ours, with as many devices as it needs."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_max_isa=AVX"
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}


def command(directory: Path, cache: Path, **options: str) -> list[str]:
    """A child's command line."""
    named = [f"--{name}={value}" for name, value in options.items()]
    # Without the parent's strictness about warnings a child is what a user runs.
    return [sys.executable, "-m", "faults.child", str(directory), f"--cache={cache}", *named]


def run_child(
    directory: Path, cache: Path, limit_secs: float = LIMIT_SECS, **options: str
) -> subprocess.CompletedProcess[str]:
    """Runs a child to its end; it is an error if that does not come."""
    return subprocess.run(
        command(directory, cache, **options),
        env=environment(),
        cwd=directory.parent,
        capture_output=True,
        text=True,
        timeout=limit_secs,
        check=False,
    )


def said(output: str, word: str) -> list[list[str]]:
    """What a child said after a word: the words of each such line."""
    lines = [line.split() for line in output.splitlines()]
    return [words[1:] for words in lines if words[:1] == [word]]
