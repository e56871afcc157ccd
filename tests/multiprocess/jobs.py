"""Starts jobs of several processes, connected by `jax.distributed` on this machine."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path

import hurry
import nursery

TESTS = Path(__file__).resolve().parent.parent
DEVICES = 2  # of each process
LIMIT_SECS = 500  # A job takes some 30 s; this much only when it hangs.


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process of a job, and what it left."""

    returncode: int
    told: str
    logged: str

    @property
    def output(self) -> str:
        """All that it wrote."""
        return self.told + self.logged

    def said(self, word: str) -> list[str]:
        """The lines that begin with a word, without it."""
        lines = self.told.splitlines()
        return [line[len(word) + 1 :] for line in lines if line.split(" ")[0] == word]

    def did(self, scenario: str) -> bool:
        """Whether it has come to a scenario's end."""
        return scenario in self.said("done")


class Job:
    """Several processes that run `child.py`. Left, those that still run are killed.

    Args:
        directory: Of their logs, and of what the scenarios write.
        processes: How many.
        *scenarios: What they run, one after the other.
        devices: Of each process.
    """

    def __init__(
        self, directory: Path, processes: int, *scenarios: str, devices: int = DEVICES
    ) -> None:
        # Apart: a thread may log in the middle of a line.
        self._logs = [
            tuple(directory / f"process_{index}.{kind}" for kind in ("out", "log"))
            for index in range(processes)
        ]
        self._children: list[nursery.Started] = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        words = [",".join(scenarios), str(directory), f"localhost:{port}", str(processes)]
        for index, (told, logged) in enumerate(self._logs):
            with told.open("w") as out, logged.open("w") as log:
                child = nursery.start(
                    "multiprocess.child", *words, str(index),
                    env=_environment(devices), cwd=directory, stdout=out, stderr=log,
                )  # fmt: skip
            self._children.append(child)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()

    def ended(self) -> list[Ended]:
        """Waits until all have ended; it is an error if they do not."""
        for child in self._children:
            child.wait(LIMIT_SECS)
        ends = zip(self._children, self._logs, strict=True)
        return [
            Ended(child.returncode, *(path.read_text() for path in paths)) for child, paths in ends
        ]


def run_job(
    directory: Path, processes: int, *scenarios: str, devices: int = DEVICES
) -> list[Ended]:
    """Runs a job to its end."""
    with Job(directory, processes, *scenarios, devices=devices) as job:
        return job.ended()


def _environment(devices: int) -> dict[str, str]:
    # Little is computed here and much compiled, in each process: always in a hurry. The programs of
    # `make invariants` are compiled as users do.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_max_isa=AVX {hurry.FLAGS}"
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    # A collective holds a thread while it waits for other processes. On two cores both devices'
    # would hold all that there are, and what waits behind them would wait for ever (`queue`).
    threads = str(max(4, os.cpu_count() or 1))
    ours = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path, "NPROC": threads}
    return os.environ | ours
