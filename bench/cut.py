"""The cut: what is retained for each optimizer, and what differs because of it.

For each optimizer and model, in a process with fused multiply-add (FMA) and in one without
(`--xla_cpu_max_isa=AVX`): 8 steps of the user's own executable, 8 steps of the armed one, and the
last 5 updates of every early leaf replayed from what the armed steps returned. Counted are the
elements that are not equal in every bit. `results/cut_candidates.json` is from when there were four
candidates for where to cut (docs/decisions/0006-where-to-cut.md).
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

STEPS, REPLAYED = 8, 5
ISAS = {"avx": "--xla_cpu_max_isa=AVX", "fma": ""}


def main(argv: Sequence[str]) -> None:
    """Measures, writes the record and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench cut", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="six optimizers on the MLP")
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--child", nargs=3, metavar=("ISA", "MODEL", "DIRECTORY"),
                        help=argparse.SUPPRESS)  # fmt: skip
    options = parser.parse_args(argv)
    if options.child:
        _child(*options.child, quick=options.quick)
        return
    figures = _measure(quick=options.quick)
    command = "python -m bench cut" + (" --quick" if options.quick else "")
    record = _record(command, figures)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print_table(figures)


def _measure(*, quick: bool) -> dict[str, float]:
    """Runs the processes: those without FMA first, for they leave their states for the others."""
    models = ("mlp",) if quick else ("mlp", "transformer")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for isa, flags in ISAS.items():
            children = [
                subprocess.Popen(
                    [sys.executable, "-m", "bench", "cut", "--child", isa, model, directory]
                    + ["--quick"] * quick,
                    env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                )
                for model in models
            ]
            if any([child.wait() for child in children]):
                raise SystemExit("a process failed")
            for model in models:
                path = Path(directory, f"{isa}-{model}.json")
                figures |= json.loads(path.read_text())
    return dict(sorted(figures.items()))


def _child(isa: str, model: str, directory: str, *, quick: bool) -> None:
    from bench import cut_measure, cut_programs

    figures: dict[str, float] = {}
    for optimizer in cut_programs.QUICK if quick else cut_programs.OPTIMIZERS:
        found = cut_measure.measure(optimizer, model, isa, Path(directory))
        figures |= {f"{model}/{optimizer}/{name}": value for name, value in found.items()}
        print(isa, model, optimizer, flush=True)
    Path(directory, f"{isa}-{model}.json").write_text(json.dumps(figures))


def _record(command: str, figures: dict[str, float]) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    packages = ("jax", "jaxlib", "optax", "numpy", "scipy")
    return {
        "name": "cut",
        "command": command,
        "commit": commit,
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in packages},
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count()},
        "figures": figures,
        "samples": {},
        "notes": [
            f"Counts, not times: one run each, on {datetime.date.today()}.",
            "perturbed: elements of the state that differ from the user's own executable's "
            f"after {STEPS} armed steps; torn: elements of early leaves that differ from the "
            f"device's after {REPLAYED} replayed updates; by: the largest difference over the "
            "leaf's largest value; retained, early bytes: over bytes of the parameters; fenced: "
            "torn, where a process with FMA replays what one without FMA trained.",
            "order: groups that leave as wholes, or leaves one by one; the largest block over an "
            "even share, and the gradients moved over those retained in one step, at K = 5.",
        ],
    }  # fmt: skip


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(": ")[1] for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def print_table(figures: dict[str, float]) -> None:
    """One line per model and optimizer."""
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    for key, value in figures.items():
        *row, name = key.split("/", 2)
        rows.setdefault(tuple(row), {})[name] = value
    names = ["retained", "early bytes", "scalars", "early", "late"]
    names += [f"{isa}/{name}" for isa in ISAS for name in ("perturbed", "torn")] + ["fenced"]
    print(f"{'':32}", *(f"{name:>13}" for name in names))
    for row, values in rows.items():
        print(f"{' '.join(row):32}", *(f"{values.get(name, ''):>13}" for name in names))
