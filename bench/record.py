"""What every benchmark shares: timing, and the record that it writes."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tables import print_table, spread_row

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "torch")
_MEASURED = ("gockpt_jax", "bench", "examples")  # the last has the networks that are trained
MEMORY, MEMORY_VARIABLE = Path("/dev/shm"), "BENCH_MEMORY_DIR"
"""A file system in the host's memory, and what names another folder of it."""
_CORES = len(os.sched_getaffinity(0))  # now: a benchmark may leave some to its device
UNFINISHED = ".unfinished"
"""At the end of a file's name while it is written."""


class OptionError(ValueError):
    """A benchmark was asked for what there is not."""


def refuse_no_folder(directory: Path | None) -> None:
    """Raises `OptionError` if checkpoints were to go where there is no folder to write in."""
    if directory and not (directory.is_dir() and os.access(directory, os.W_OK)):
        raise OptionError(f"--directory {directory} is no folder that can be written in: make it.")


@dataclasses.dataclass
class Record:
    """The outcome of one benchmark.

    Attributes:
      name: Of the benchmark.
      samples: What was measured, by figure. A figure is the median of its samples.
      notes: What a reader must know: sizes, what was left out, what limits a figure.
      commit: What is measured, as it was at the beginning.
      details: What is not a figure: reports, failures.
    """

    name: str
    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    commit: str = dataclasses.field(default_factory=lambda: _commit())
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """The median of each figure's samples."""
        return {name: statistics.median(values) for name, values in self.samples.items()}

    def add(self, figure: str, *samples: float) -> None:
        """Adds samples to a figure."""
        self.samples.setdefault(figure, []).extend(map(float, samples))

    def tell_failure(self, what: str) -> None:
        """Keeps the traceback of what is being handled; others go on."""
        failures = self.details.setdefault("failures", {})
        failures[what] = without_paths(traceback.format_exc())
        self.notes.append(f"{what}: failed, see the record's `failures`.")
        print(f"{what} failed: {sys.exc_info()[1]!r}"[:500], file=sys.stderr)

    def as_json(self) -> dict[str, Any]:
        """The record with all that is needed to repeat it."""
        return {
            "name": self.name,
            "command": command(),
            "commit": self.commit,
            "versions": _versions(),
            "hardware": hardware(),
            "figures": {name: _rounded(value) for name, value in self.figures.items()},
            "samples": {
                name: [_rounded(v) for v in values] for name, values in self.samples.items()
            },
            "notes": self.notes,
            **({"details": self.details} if self.details else {}),
        }

    def write(self, path: Path) -> None:
        """Writes the record as one JSON object."""
        write_json(path, self.as_json())

    def show(self) -> None:
        """Prints the notes, and last the figures as a table."""
        rows = [spread_row(name, values) for name, values in self.samples.items()]
        print_table(
            f"bench {self.name}", ("figure", "median", "least", "most", "samples"), rows, self.notes
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file whole or not at all: who writes again and again may be killed meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + UNFINISHED)
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def interleaved(
    contenders: Mapping[str, Callable[[], Any]],
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times contenders in turns, so that a disturbance of the machine meets them all.

    Args:
      contenders: Functions that return when their work is done.
      repeats: Timed calls of each.
      warm_up: Calls of each before that.
      clock: Seconds; `time.process_time` for those of all cores together.

    Returns:
      Seconds of each call, by contender; the n-th samples of all lie close together in time.
    """
    secs: dict[str, list[float]] = {name: [] for name in contenders}
    for n in range(warm_up + repeats):
        for name, run in contenders.items():
            start = clock()
            run()
            if n >= warm_up:
                secs[name].append(clock() - start)
    return secs


def ratios(numerator: Sequence[float], denominator: Sequence[float], scale: float = 1.0) -> Any:
    """The ratios of samples that lie close together in time."""
    return [scale * a / b for a, b in zip(numerator, denominator, strict=True)]


@contextlib.contextmanager
def peak_memory(over_bytes: int | None = None) -> Iterator[Callable[[], int]]:
    """Measures by how much this process's resident memory grows at most.

    Args:
      over_bytes: Over what; what is resident when the block begins if `None`.

    Yields:
      A function that returns, in bytes, the peak since the block began over that.
    """
    before = _status_bytes("VmRSS") if over_bytes is None else over_bytes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak (Linux)
    yield lambda: max(0, _status_bytes("VmHWM") - before)


@contextlib.contextmanager
def sampled(look: Callable[[], None], every_secs: float) -> Iterator[None]:
    """Calls a function again and again while the block runs, on a thread of its own."""
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            look()
            stop.wait(every_secs)

    thread = threading.Thread(target=sample, name="bench-sampler")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process (Linux); 0 once it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def machine_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def hardware() -> dict[str, Any]:
    """The machine, as far as figures depend on it."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": _CORES,
        "memory_gib": round(machine_bytes() / 2**30, 1),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "devices": _device_kinds(),
        "system": platform.platform(terse=True),
    }


def _device_kinds() -> list[str]:
    """What JAX runs on; a record is written, too, where JAX cannot start."""
    import jax

    try:
        return sorted({device.device_kind for device in jax.devices()})
    except RuntimeError as error:
        return [f"unknown: {error}"[:200]]


def command() -> str:
    """What was typed, without paths that mean nothing elsewhere."""
    module = Path(sys.argv[0]).resolve().with_suffix("")
    inside = module.relative_to(ROOT).parts if module.is_relative_to(ROOT) else (module.name,)
    name = ".".join(inside).removesuffix(".__main__")
    words = []
    for word in sys.argv[1:]:
        if not word.startswith("/"):
            words.append(word)
        elif words and words[-1].startswith("--"):  # the option whose value it is
            words.pop()
    return " ".join(["python -m", name, *words])


def without_paths(text: str) -> str:
    """A traceback as it can be published: files named from the repository, or the environment."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"[^\s\"']*/(site-packages|dist-packages)/", r"\1/", text)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _commit() -> str:
    """The commit, or a digest of the sources where they were copied without their history."""

    def git(*args: str) -> str:
        try:
            return subprocess.run(
                ["git", *args], cwd=ROOT, capture_output=True, text=True, check=False
            ).stdout.strip()
        except OSError:
            return ""

    head, digest = git("rev-parse", "--short", "HEAD"), f"sources {sources_digest()}"
    if not head:
        return digest
    changed = git("status", "--porcelain", "--", *(f"{folder}/*.py" for folder in _MEASURED))
    return f"{head} with changes, {digest}" if changed else head


def sources_digest() -> str:
    """A digest of what is measured.

    `python -c "import bench.record as r; print(r.sources_digest())"` in a checkout says whether a
    record is of that checkout.
    """
    digest = hashlib.sha256()
    for folder in _MEASURED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
