"""Running `child.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import hurry
import nursery

from .trainer import DEVICES, LIMIT_SECS

TESTS = Path(__file__).resolve().parent.parent

ENDS_WITHOUT_THREADS = (3, 12) <= sys.version_info < (3, 12, 3)
"""Whether a Python that is ending starts no thread any more, which Orbax needs for a save."""


def environment(devices: int = DEVICES) -> dict[str, str]:
    """A child's environment: like ours, with as many devices as it needs."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_max_isa=AVX"
    if hurry.IS_ASKED_FOR:
        flags = f"{flags} {hurry.FLAGS}"
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}


def start_child(
    directory: Path, cache: Path, stdout: IO[Any], stderr: IO[Any], **options: str
) -> nursery.Started:
    """Starts a child with the options of its command line."""
    # Without the parent's strictness about warnings a child is what a user runs.
    return nursery.start(
        "faults.child", *_words(directory, cache, options),
        env=environment(), cwd=directory.parent, stdout=stdout, stderr=stderr,
    )  # fmt: skip


def run_child(directory: Path, cache: Path, **options: str) -> subprocess.CompletedProcess[str]:
    """Runs a child to its end; it is an error if that does not come."""
    return nursery.run(
        "faults.child", *_words(directory, cache, options),
        env=environment(), cwd=directory.parent, limit_secs=LIMIT_SECS,
    )  # fmt: skip


def _words(directory: Path, cache: Path, options: dict[str, str]) -> list[str]:
    named = [f"--{name}={value}" for name, value in options.items()]
    return [str(directory), f"--cache={cache}", *named]


def said(output: str, word: str) -> list[list[str]]:
    """What a child said after a word: the words of each such line."""
    lines = [line.split() for line in output.splitlines()]
    return [words[1:] for words in lines if words[:1] == [word]]
