"""Compiled for TPUs that are not here: what arming, staging and a window cost in device memory.

Needs `pip install jax[tpu]` (the compiler that fits this jaxlib) and no TPU: programs, buffers and
`memory_analysis()` are those of the real compiler; only times are missing. The example's GPT, fp32
state, AdamW, bf16 compute, blocks scanned and rematerialised, one sequence of 2048 bytes per `data`
shard. One process per case.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.aot_compile import MAX_STEPS, Case
from bench.record import ROOT, Record

_TIMEOUT_SECS, _AT_ONCE = 900, 2
# No metadata server to ask; and libtpu lets one process at a time load it, for the TPU's sake.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
# Layers and widths of about 1, 6, 13 and 71 billion parameters.
_1B, _6B, _13B, _71B = (20, 2048), (32, 4096), (40, 5120), (88, 8192)
_QUICK = (Case("v5e:2x4", 1, *_1B),)
_CASES = (
    *_QUICK,
    Case("v5e:4x4", 1, *_6B),
    Case("v5e:8x8", 4, *_13B),
    Case("v5e:16x16", 8, *_71B),
    Case("v5p:2x2x2", 1, *_6B),
    Case("v5p:4x8x8", 4, *_71B),
)
_NOTES = (
    "Compiled, not run: GiB are per chip, counts are of instructions in the optimised program "
    "(those of a loop's body once); one compilation each.",
    "armed_extra: device memory of the armed step over the unarmed one, its retained gradients "
    "included. kK/compiled: the largest block's copies + armed_extra + what the step before "
    "retained, or the late leaves if they are more. kK/planned: the planner's own figure for the "
    "same blocks. device_copy: a copy of the whole state (K = 1).",
    "staging: all copy programs of K = 2 to 8 and that of the whole state; computing "
    "instructions: those that do more than move bytes; most_new_over_copied: new device bytes "
    "over the bytes that are copied, at most.",
)


class AotRecord(Record):
    """Figures of compiled programs; as tables, a line for each case."""

    def show(self) -> None:
        """Prints the notes, and last the tables."""
        from rich.console import Console

        console = Console(width=160)
        for note in self.notes:
            console.print(f"- {note}", markup=False, highlight=False)
        console.print(*_tables(self.figures))


def run(quick: bool) -> AotRecord:
    """Compiles all cases; if `quick`, the smallest.

    Raises:
      SystemExit: if libtpu is not installed.
    """
    try:
        libtpu = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "`bench aot` needs the TPU's compiler: `pip install jax[tpu]` (no TPU is needed)."
        ) from None
    os.environ["JAX_PLATFORMS"] = "cpu"  # else libtpu looks for a TPU in this process too
    record = AotRecord("aot", notes=[*_NOTES, f"libtpu {libtpu}."])
    cases = _QUICK if quick else _CASES
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        found_by_case = dict(zip(cases, pool.map(_compile, cases), strict=True))
    for case, figures in found_by_case.items():
        if isinstance(figures, str):
            record.notes.append(f"{_name(case)}: not measured: {figures}")
        else:
            found = {f"{_name(case)}/{name}": [value] for name, value in figures.items()}
            record.samples |= found
    return record


def _name(case: Case) -> str:
    billions = 12 * case.layers * case.width**2 / 1e9
    way = "fsdp" if case.tensor == 1 else f"fsdp_x_tensor{case.tensor}"
    return f"{case.topology}/{billions:.0f}B/{way}"


def _compile(case: Case) -> dict[str, float] | str:
    """One case in a process of its own; its figures, or why there are none."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "figures.json")
        command = [sys.executable, "-m", "bench.aot_compile", json.dumps(dataclasses.asdict(case))]
        print(_name(case), flush=True)
        try:
            child = subprocess.run(
                [*command, str(out)],
                cwd=ROOT,
                env=os.environ | _ENVIRONMENT,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not compiled within {_TIMEOUT_SECS} s"
        if child.returncode:
            return _last_error(child)
        return json.loads(out.read_text(encoding="utf-8"))


def _last_error(child: subprocess.CompletedProcess[str]) -> str:
    """The line that names the error, without its traceback and what libtpu logs."""
    if child.returncode < 0:
        return f"ended by {signal.Signals(-child.returncode).name}"
    lines = [line for line in child.stderr.splitlines() if re.match(r"[A-Za-z_.]+: ", line)]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or ["no message"])[-1][:300]


def _tables(figures: dict[str, float]) -> Iterator[object]:
    """The steps, and what a window costs at each K."""
    from rich.table import Table

    columns = ("state_gib", "unarmed/total_gib", "armed/total_gib", "unarmed/copies")
    columns += ("armed/copies", "unarmed/collectives", "armed/collectives")
    ks = range(2, MAX_STEPS + 1)
    steps = Table("case", *columns, title="the step")
    windows = Table(
        "case", "device copy", *(f"K = {k}" for k in ks),
        title="device memory of a window, GiB per chip: planned / compiled",
    )  # fmt: skip
    for case in dict.fromkeys("/".join(name.split("/")[:3]) for name in figures):
        steps.add_row(case, *(f"{figures[f'{case}/{c}']:.4g}" for c in columns))
        pairs = [[figures[f"{case}/k{k}/{w}_gib"] for w in ("planned", "compiled")] for k in ks]
        copy = figures[f"{case}/device_copy_gib"]
        windows.add_row(case, f"{copy:.3g}", *(f"{a:.3g} / {b:.3g}" for a, b in pairs))
    yield steps
    yield windows
