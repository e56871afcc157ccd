"""Processes that begin with their imports done: the tests start many, and importing is half of it.

A server imports what all of them need and forks for each. It has no other thread and no backend of
JAX's yet, so the fork is as good as a new interpreter: it runs a module as `python -m` would, with
flags, arguments and files of its own, and ends as an interpreter does. gockpt_jax is not imported:
what a process does with it, or without it, it does alone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PRELOADED = (
    "jax", "flax.linen", "flax.training.train_state", "numpy", "optax.contrib", "orbax.checkpoint",
    "pytest", "scipy.sparse.csgraph", "tensorstore", "xxhash",
)  # fmt: skip


class Started:
    """A process of the nursery, as `subprocess.Popen` would be.

    Attributes:
      args: Its command line.
      pid: Its number.
      returncode: As of `Popen`; `None` while it is not known.
    """

    def __init__(self, args: Sequence[str], told: int):
        self.args = args
        self.returncode: int | None = None
        self._told = told  # a pipe: its number at once, its status at the end
        self.pid = _number(told)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status.

        Raises:
          subprocess.TimeoutExpired: if it has not ended in so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            self.returncode = _number(self._told)
            os.close(self._told)
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit status, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def kill(self) -> None:
        """Kills it, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _number(pipe: int) -> int:
    """Each is written at once, and the second long after the first was read."""
    return int(os.read(pipe, 32))


def start(
    module: str, *args: str, env: Mapping[str, str], cwd: Path, stdout: IO[Any], stderr: IO[Any]
) -> Started:
    """Runs a module in a process of its own.

    Args:
      module: As after `python -m`; or a script's path.
      *args: Of its command line.
      env: All of its environment.
      cwd: Where it runs.
      stdout: An open file.
      stderr: An open file.
    """
    told, at_its_end = os.pipe()
    request = {"module": module, "args": args, "env": dict(env), "cwd": str(cwd)}
    with open(at_its_end, "wb", buffering=0) as its:
        files = [stdout.fileno(), stderr.fileno(), its.fileno()]
        socket.send_fds(_server()[0], [json.dumps(request).encode()], files)
    return Started((module, *args), told)


def run(
    module: str, *args: str, env: Mapping[str, str], cwd: Path, limit_secs: float
) -> subprocess.CompletedProcess[str]:
    """Runs a module, or a script, to its end, and tells what it has written.

    Args:
      module: As of `start`; so are `args`, `env` and `cwd`.
      *args: Of its command line.
      env: All of its environment.
      cwd: Where it runs.
      limit_secs: It is an error if it has not ended by then.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        started = start(module, *args, env=env, cwd=cwd, stdout=stdout, stderr=stderr)
        try:
            status = started.wait(limit_secs)
        finally:
            started.kill()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(started.args, status, stdout.read(), stderr.read())


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Where to send requests, and who gets them: one for each process that tests."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    # A thread of the linear algebra's own would be missing in the forks.
    alone = {"OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, __file__, str(its.fileno())]
    with its:
        return ours, subprocess.Popen(command, pass_fds=[its.fileno()], env=os.environ | alone)


def close() -> None:
    """Ends the server, if there is one; it ends with this process in any case."""
    if _server.cache_info().currsize:
        requests, server = _server()
        _server.cache_clear()
        requests.close()
        server.wait()


# --- In the server -------------------------------------------------------------------------------


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Forks for each request, and returns it in the fork; returns nothing after the last one."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # else each fork looks through all of that, and copies it: a quarter of its time
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of several threads is no new process"
    keepers = []
    while True:
        message, (stdout, stderr, told) = _received(requests)
        if not message:
            for keeper in keepers:
                os.waitpid(keeper, 0)
            return None
        if (keeper := _fork()) == 0:
            requests.close()
            if (child := _fork()) == 0:
                os.close(told)
                os.dup2(stdout, 1)
                os.dup2(stderr, 2)
                os.close(stdout)
                os.close(stderr)
                return json.loads(message)
            for file in (stdout, stderr):
                os.close(file)
            os.write(told, f"{child}\n".encode())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(told, f"{status}\n".encode())
            os._exit(0)
        keepers.append(keeper)  # waited for at the end: then it is known what they have cost
        for file in (stdout, stderr, told):
            os.close(file)


def _received(requests: socket.socket) -> tuple[bytes, list[int]]:
    message, files, *_ = socket.recv_fds(requests, 1 << 20, 3)
    return message, files or [-1, -1, -1]


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's: it has threads only once it has a backend
        return os.fork()


def become(module: str, args: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    """Runs a module, or a script, as this interpreter's main program."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [module, *args]
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    _tell_jax(env)
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _tell_jax(env: Mapping[str, str]) -> None:
    """JAX has read its variables when it was imported; here are those that it was not given."""
    import jax

    if directory := env.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", directory)
    if secs := env.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float(secs))


if __name__ == "__main__":
    found = serve(socket.socket(fileno=int(sys.argv[1])))
    if found is not None:
        become(**found)
