"""Starts jobs of several processes, connected by `jax.distributed` on this machine."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path

import nursery

TESTS = Path(__file__).resolve().parent.parent
DEVICES = 2  # of each process
LIMIT_SECS = 500  # A job takes some 30 s; this much only when it hangs.


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process of a job, and what it left."""

    returncode: int
    output: str

    def said(self, word: str) -> list[str]:
        """The lines that begin with a word, without it."""
        lines = self.output.splitlines()
        return [line[len(word) + 1 :] for line in lines if line.split(" ")[0] == word]

    def did(self, scenario: str) -> bool:
        """Whether it has come to a scenario's end."""
        return scenario in self.said("done")


def run_job(
    directory: Path, processes: int, *scenarios: str, devices: int = DEVICES
) -> list[Ended]:
    """Runs `child.py` in several processes to their ends; it is an error if those do not come."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for index in range(processes):
        words = [",".join(scenarios), str(directory), f"localhost:{port}", str(processes)]
        with (directory / f"process_{index}.log").open("w") as log:
            child = nursery.start(
                "multiprocess.child", *words, str(index),
                env=_environment(devices), cwd=directory, stdout=log, stderr=log,
            )  # fmt: skip
        started.append(child)
    try:
        for child in started:
            child.wait(LIMIT_SECS)
    finally:
        for child in started:
            child.kill()
            child.wait()
    return [
        Ended(child.returncode, (directory / f"process_{index}.log").read_text())
        for index, child in enumerate(started)
    ]


def _environment(devices: int) -> dict[str, str]:
    # Little is computed here and much compiled, in each process: in a hurry. `tests/invariants`
    # runs programs as users compile them.
    flags = (
        f"--xla_force_host_platform_device_count={devices} --xla_cpu_max_isa=AVX "
        "--xla_backend_optimization_level=0"
    )
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    # A collective holds a thread while it waits for other processes. On two cores both devices'
    # would hold all that there are, and what waits behind them would wait for ever (`queue`).
    threads = str(max(4, os.cpu_count() or 1))
    ours = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path, "NPROC": threads}
    return os.environ | ours
