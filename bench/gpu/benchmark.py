"""Everything that only an accelerator can answer, in one command that ends in time.

Each part is a process of its own, which writes its own file as it goes, so that neither a crash nor
the end of the time takes what was measured before. The most valuable parts come first.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.device import DEVICE_MEMORY, use_device
from bench.gpu.table import show
from bench.record import (
    MEMORY,
    MEMORY_VARIABLE,
    ROOT,
    UNFINISHED,
    OptionError,
    command,
    refuse_no_folder,
    write_json,
)

_START_SECS = 12.0  # of a process, before its clock runs
_GRACE_SECS = 15.0  # after its time, before it is killed
_SIXTH = 1 / 6
_NOT_RUN = "not run"
_SHARES = max(1, min(6, len(os.sched_getaffinity(0)) // 2))  # of the optimizers, in processes


@dataclasses.dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
      name: Of the part and of its file.
      weight: Of its time, among those of the parts that are still to come.
      command: What runs it; `--out`, `--minutes` and the place follow.
      toy: What makes it tiny.
    """

    name: str
    weight: float
    command: Sequence[str]
    toy: Sequence[str] = ("--toy",)


_SMALLER = ("--size", "800m")  # 9.7 GB of state: three modes find time for their rounds
_TOY_TRAINING = ("--quick", "--size", "toy", "--rounds", "1", "--intervals", "6")
PARTS = (
    Part("transfer", 1.6, ("bench.gpu.part", "transfer")),
    Part("train", 5.0, ("bench", "train"), (
        *_TOY_TRAINING, "--modes", "ideal,gockpt_k2,gockpt,orbax_async",
    )),
    Part("exact", 1.2, ("bench.gpu.part", "exact", "--shares", str(_SHARES)),
         ("--toy", "--shares", "1")),
    # A sixth of the state has no room for a step's gradients in fp32: four fifths is the window.
    Part("sixth", 1.6, (
        "bench", "train", "--modes", "ideal,gockpt_b80,gockpt", *_SMALLER,
        "--device-budget-fraction", f"{_SIXTH:.6f}",
    ), (*_TOY_TRAINING, "--modes", "ideal,gockpt,gockpt_b80")),
    Part("memory", 0.7, (
        "bench", "train", "--modes", "ideal,gockpt", "--alone", *_SMALLER,
    ), _TOY_TRAINING),
    Part("torch", 0.5, ("bench.gpu.part", "torch")),
)  # fmt: skip
"""In the order of their worth."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen; `--out` is a folder here."""
    add = parser.add_argument
    add("--minutes", type=float, default=8.0, help="for all parts together")
    add("--parts", help=f"comma-separated, of {', '.join(part.name for part in PARTS)}")
    add("--size", help="of the training benchmark; what fits if left out")
    add("--host-gib", type=float, help="host memory, where the system does not tell all of it")
    add("--directory", type=Path, help="for checkpoints")


def run(quick: bool, **options: Any) -> "GpuRun":
    """Runs the parts.

    Args:
      quick: Toy sizes: a rehearsal, on any machine.
      **options: As in `add_arguments`; `out`: the folder.
    """
    arguments = argparse.Namespace(**options)
    out = arguments.out or ROOT / "bench" / "results" / f"{_device()}-{datetime.date.today()}"
    names = arguments.parts.split(",") if arguments.parts else [part.name for part in PARTS]
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        known = ", ".join(part.name for part in PARTS)
        raise OptionError(f"there are no parts {sorted(unknown)}; give some of {known}.")
    refuse_no_folder(arguments.directory)
    out.mkdir(parents=True, exist_ok=True)
    done = GpuRun(out)
    end = time.perf_counter() + 60 * arguments.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench gpu was ended"))  # with its parts
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as cache:
        todo = [part for part in PARTS if part.name in names]
        while todo:
            share = todo[0].weight / sum(part.weight for part in todo)
            secs = share * (end - time.perf_counter())
            done.run(todo.pop(0), secs, arguments, quick=quick, cache=cache)
            done.write_summary()
    return done


class GpuRun:
    """The parts that have run, and those that earlier commands ran, as a record of records.

    Args:
      out: The folder of their files.
    """

    def __init__(self, out: Path):
        self._out = out.absolute()  # the parts run in the repository
        self._log = self._out / "log.txt"
        self._states: dict[str, str] = {}

    def run(
        self, part: Part, secs: float, arguments: argparse.Namespace, *, quick: bool, cache: str
    ) -> None:
        """Runs a part in a process of its own; never raises for what happens in there."""
        file = self._file(part.name)
        if secs < _START_SECS + 5:
            earlier = ", what is told of it is from an earlier command" if file.exists() else ""
            self._states[part.name] = f"{_NOT_RUN}: the time was over{earlier}"
            return
        file.unlink(missing_ok=True)
        minutes = (secs - _START_SECS) / 60
        words = [sys.executable, "-m", *part.command, "--out", str(file),
                 "--minutes", f"{minutes:.3f}"]  # fmt: skip
        words += part.toy if quick else self._choices(part, arguments)
        start = time.perf_counter()
        print(f"{part.name}: at most {secs:.0f} s", flush=True)
        with self._log.open("a", encoding="utf-8") as log, _scratch(arguments.directory) as places:
            log.write(f"\n=== {part.name}: {' '.join(words[1:])}\n")
            log.flush()
            if arguments.directory:
                words += ["--directory", places["TMPDIR"]]
            child = subprocess.Popen(
                words, cwd=ROOT, env=_environment(cache) | places, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            state = _wait(child, secs + _GRACE_SECS)
        self._states[part.name] = f"{state} after {time.perf_counter() - start:.0f} s"
        file.with_name(file.name + UNFINISHED).unlink(missing_ok=True)
        if not file.exists():
            self._states[part.name] += "; it left no file, see log.txt"
        print(f"{part.name}: {self._states[part.name]}", flush=True)
        if state != "done":
            print(*self._log.read_text(encoding="utf-8").splitlines()[-12:], sep="\n", flush=True)

    def _choices(self, part: Part, arguments: argparse.Namespace) -> list[str]:
        if part.command[0] != "bench":
            return []
        size = arguments.size
        found = ["--size", size] if size and "--size" not in part.command else []
        return [*found, "--host-gib", str(arguments.host_gib)] if arguments.host_gib else found

    def _file(self, name: str) -> Path:
        return self._out / f"{name}.json"

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return json.loads(self._file(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def summary(self) -> dict[str, Any]:
        """One record with the figures of all parts; a part's own file has its details.

        Of parts that an earlier command has run into the same folder, too.
        """
        found: dict[str, Any] = {}
        figures: dict[str, float] = {}
        samples: dict[str, list[float]] = {}
        states = {
            part.name: self._states.get(part.name, "done by an earlier command")
            for part in PARTS
            if part.name in self._states or self._file(part.name).exists()
        }
        for name in states:
            record = self._read(name)
            found = found or {
                key: record[key] for key in ("commit", "versions", "hardware") if key in record
            }
            if record and record["commit"] != found["commit"]:
                states[name] += f", at commit {record['commit']}"
            prefix = f"{name}/" if name in ("sixth", "memory") else ""
            figures |= {prefix + key: value for key, value in record.get("figures", {}).items()}
            samples |= {prefix + key: value for key, value in record.get("samples", {}).items()}
        return {
            "name": "gpu",
            "command": self._command(),
            **found,
            "figures": figures,
            "samples": samples,
            "notes": [f"{name}: {state}" for name, state in states.items()],
        }

    def _command(self) -> str:
        """What has measured; a command that only prints the tables again has not."""
        has_run = any(not state.startswith(_NOT_RUN) for state in self._states.values())
        return command() if has_run else self._read("gpu").get("command", command())

    def write_summary(self) -> None:
        """Writes `gpu.json`."""
        write_json(self._file("gpu"), self.summary())

    def write(self, path: Path) -> None:
        """All is written already."""

    def show(self) -> None:
        """Prints what became of the parts, and last tables of what matters most."""
        show(self.summary())


@contextlib.contextmanager
def _scratch(directory: Path | None) -> Iterator[dict[str, str]]:
    """Where a part may write, on disk and in memory: gone after it, also if it was killed.

    Yields:
      The variables that tell it.
    """
    with contextlib.ExitStack() as stack:
        options = {"prefix": "bench-gpu-", "ignore_cleanup_errors": True}
        place = directory.absolute() if directory else None
        disk = tempfile.TemporaryDirectory(dir=place, **options)
        found = {"TMPDIR": stack.enter_context(disk)}
        if os.access(MEMORY, os.W_OK):
            memory = tempfile.TemporaryDirectory(dir=MEMORY, **options)
            found[MEMORY_VARIABLE] = stack.enter_context(memory)
        yield found


def _wait(child: "subprocess.Popen[bytes]", secs: float) -> str:
    try:
        code = child.wait(max(1.0, secs))
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)  # its own session: itself and what it started
        child.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return "killed when its time was over"
    return "done" if code == 0 else f"failed with exit code {code}"


def _environment(cache: str) -> dict[str, str]:
    """A child's environment: it starts with what earlier ones have compiled."""
    environment = {**os.environ, "PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"}
    if use_device(DEVICE_MEMORY, environment):
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    return environment


def _python_path() -> str:
    """The sources first, and whatever the caller has added."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _device() -> str:
    """The device's name as a part of a path, without starting JAX here."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        name = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        if name.strip():
            return re.sub(r"[^a-z0-9]+", "-", name.splitlines()[0].lower()).strip("-")
    return "cpu"
