"""Compiled for accelerators that are not here: what arming, staging and a window cost in memory.

Needs their compilers, of the version that fits this jaxlib (`pip install jax[tpu]`, or
`jax-cuda13-plugin jax-cuda13-pjrt`), and none of them: programs, buffers and `memory_analysis()`
are those of the real compiler; only times are missing. The example's GPT, fp32
state, AdamW, bf16 compute, blocks scanned and rematerialised, one sequence of 2048 bytes per `data`
shard. One process per case.
"""

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from bench.accelerators import compiler_of, compiler_versions
from bench.aot.compile import GIB, MAX_STEPS, Case
from bench.record import ROOT, Record, resident_bytes
from bench.tables import print_by_row, print_table

_NOT_MEASURED = ": not measured:"
_STEPS_OF = "The steps were compiled at commit"
_LOOK_SECS = 0.5  # between looks at the memory that a compilation takes
# Layers and widths of about 1, 6, 8, 13 and 71 billion parameters.
_1B, _6B, _8B, _13B, _71B = (20, 2048), (32, 4096), (40, 4096), (40, 5120), (88, 8192)
_QUICK = (Case("v5e:2x4", 1, *_1B),)
_CASES = (
    *_QUICK,
    Case("v5e:4x4", 1, *_6B),
    Case("v5e:8x8", 4, *_13B),
    Case("v5e:16x16", 8, *_71B),
    Case("v5p:2x2x2", 1, *_6B),
    Case("v5p:4x8x8", 4, *_71B),
    Case("h100:1", 1, *_1B),
    Case("h100:4", 1, *_8B),
    Case("h100:8", 2, *_13B),
)
_STEP_COLUMNS = (
    "state_gib", "unarmed/total_gib", "armed/total_gib", "unarmed/copies", "armed/copies",
    "unarmed/collectives", "armed/collectives",
)  # fmt: skip
_NOTES = (
    "Compiled, not run: GiB are per chip, counts are of instructions in the optimised program "
    "(those of a loop's body once); one compilation each.",
    "armed_extra: device memory of the armed step over the unarmed one, its retained gradients "
    "included. kK/planned: the planner's own figure. kK/compiled: the same with what the largest "
    "block's copy programs take for its bytes, and with armed_extra for what a step retains; or "
    "what copies of the late leaves take, if more. device_copy: of the whole state (K = 1). "
    "snapshot: a save without a window, staged in parts, as a run does whose device budget is the "
    "smallest planned figure, snapshot/planned; compiled: with the scratch of a part.",
    "staging: the copy programs of the largest block of each K, of the late leaves, of the whole "
    "state and of a snapshot's parts; joins: maxima and sums by which this compiler joins "
    "integers that it has padded; computing instructions: others that do more than move bytes; "
    "most_new_over_copied: new device bytes over the bytes that are copied, at most.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    add = parser.add_argument
    add("--cases", help="parts of their names, comma-separated; all if left out")
    add("--steps-of", type=Path, help="an earlier record: compile anew what depends on plans only")
    add("--case-minutes", type=float, default=20.0, help="a case that takes longer is ended")
    add("--case-gib", type=float, default=12.0, help="one that takes more host memory is ended")


class AotRecord(Record):
    """Figures of compiled programs; as tables, a line for each case."""

    def show(self) -> None:
        """Prints the notes, and last the tables: the steps, and what a window costs at each K."""
        columns = {name: name for name in _STEP_COLUMNS}
        print_by_row("the step", "case", columns, self.samples, self.notes)
        figures, ks = self.figures, range(2, MAX_STEPS + 1)
        cases = dict.fromkeys("/".join(name.split("/")[:3]) for name in figures)
        windows = []
        for c in cases:
            pairs = [[figures[f"{c}/k{k}/{w}_gib"] for w in ("planned", "compiled")] for k in ks]
            copy = f"{figures[f'{c}/device_copy_gib']:.3g}"
            windows.append((c, copy, *(f"{a:.3g} / {b:.3g}" for a, b in pairs)))
        title = "device memory of a window, GiB per chip: planned / compiled"
        print_table(title, ("case", "device copy", *(f"K = {k}" for k in ks)), windows)


def run(quick: bool, **options: Any) -> AotRecord:
    """Compiles all cases, one after another; if `quick`, the smallest.

    Args:
      quick: Whether one case will do.
      **options: As in `add_arguments`; `out`: where the record is written after each case.

    Raises:
      SystemExit: if no compiler is installed, or no case has such a name.
    """
    # Else libtpu looks for a TPU, in this process and in those that compile.
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    arguments = argparse.Namespace(**options)
    words = (arguments.cases or "").split(",")
    cases = [
        case for case in (_QUICK if quick else _CASES) if any(word in _name(case) for word in words)
    ]
    if not cases:
        names = ", ".join(_name(case) for case in _CASES)
        raise SystemExit(f"`--cases {arguments.cases}` names none of {names}.")
    record = AotRecord("aot", notes=[*_NOTES, *_compilers(cases)])
    earlier = _earlier(record, arguments.steps_of, [_name(case) for case in cases])
    for case in cases:
        print(_name(case), flush=True)
        limits = (60 * arguments.case_minutes, arguments.case_gib)
        compiler = compiler_of(case.topology)
        figures = f"its compiler is not installed: `pip install {compiler.packages}`"
        if compiler.is_installed():
            figures = _compile(case, earlier.get(_name(case)), *limits)
        if isinstance(figures, str):
            record.notes.append(f"{_name(case)}{_NOT_MEASURED} {figures}")
        else:
            found = {f"{_name(case)}/{name}": [value] for name, value in figures.items()}
            record.samples |= found
        if arguments.out:
            record.write(arguments.out)
    return record


def _compilers(cases: Sequence[Case]) -> list[str]:
    """Notes on what compiles for these cases.

    Raises:
      SystemExit: if nothing does.
    """
    packages = dict.fromkeys(compiler_of(case.topology).packages for case in cases)
    if not any(compiler_of(case.topology).is_installed() for case in cases):
        raise SystemExit(
            "`bench aot` needs an accelerator's compiler, and no accelerator: `pip install "
            f"{'` or `pip install '.join(packages)}`."
        )
    return compiler_versions()


def _name(case: Case) -> str:
    billions = 12 * case.layers * case.width**2 / 1e9
    way = "fsdp" if case.tensor == 1 else f"fsdp_x_tensor{case.tensor}"
    return f"{case.topology}/{billions:.0f}B/{way}"


def _earlier(
    record: Record, path: Path | None, cases: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Figures of an earlier record, by case; `record` tells where its steps are from.

    And of cases that are not among those of this run, why they were not measured.
    """
    if path is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for name, value in earlier["figures"].items():
        parts = name.split("/", 3)
        found.setdefault("/".join(parts[:3]), {})[parts[3]] = value
    steps = next(
        (n for n in earlier["notes"] if n.startswith(_STEPS_OF)),
        f"{_STEPS_OF} {earlier['commit']}.",
    )
    failed = [n for n in earlier["notes"] if _NOT_MEASURED in n]
    record.notes += [steps, *(n for n in failed if n.split(_NOT_MEASURED)[0] not in cases)]
    return found


def _compile(
    case: Case, known: dict[str, float] | None, limit_secs: float, limit_gib: float
) -> dict[str, float] | str:
    """One case in a process of its own; its figures, or why there are none."""
    with tempfile.TemporaryDirectory() as directory:
        out, log = Path(directory, "figures.json"), Path(directory, "log")
        asked = json.dumps({"case": dataclasses.asdict(case), "known": known})
        command = [sys.executable, "-m", "bench.aot.compile", asked]
        with log.open("w") as stderr:
            child = subprocess.Popen(
                [*command, str(out)],
                cwd=ROOT,
                env=os.environ | compiler_of(case.topology).environment,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
            why = _watch(child, limit_secs, limit_gib)
        if why or child.returncode:
            return why or _last_error(child.returncode, log.read_text(errors="replace"))
        return json.loads(out.read_text(encoding="utf-8"))


def _watch(child: "subprocess.Popen[bytes]", limit_secs: float, limit_gib: float) -> str | None:
    """Waits for a process, and ends it at its limits; says at which."""
    end = time.perf_counter() + limit_secs
    try:
        while child.poll() is None:
            if time.perf_counter() > end:
                return f"not compiled within {limit_secs:.0f} s"
            if resident_bytes(child.pid) > limit_gib * GIB:
                return f"compiling takes more than {limit_gib:g} GiB of host memory"
            time.sleep(_LOOK_SECS)
        return None
    finally:
        child.kill()
        child.wait()


def _last_error(returncode: int, log: str) -> str:
    """The line that names the error, without its traceback and what libtpu logs."""
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    lines = [line for line in log.splitlines() if re.match(r"[A-Za-z_.]+: ", line)]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or ["no message"])[-1][:300]
