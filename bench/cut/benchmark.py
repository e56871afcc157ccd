"""The cut: what is retained for each optimizer, and what differs because of it.

For each optimizer and model, in a process with fused multiply-add (FMA) and in one without
(`--xla_cpu_max_isa=AVX`): 8 steps of the user's own executable, 8 steps of the armed one, and the
last 5 updates of every early leaf replayed from what the armed steps returned. Counted are the
elements that are not equal in every bit. `results/cut_candidates.json` is from when there were four
candidates for where to cut (docs/decisions/0006-where-to-cut.md).
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.cut import programs
from bench.cut.measure import measure
from bench.cut.runs import REPLAYED, STEPS
from bench.record import Record
from bench.tables import print_by_row

ISAS = {"avx": "--xla_cpu_max_isa=AVX", "fma": ""}
NOTES = [
    "Counts, not times: one run each.",
    "perturbed: elements of the state that differ from the user's own executable's after "
    f"{STEPS} armed steps; torn: elements of early leaves that differ from the device's after "
    f"{REPLAYED} replayed updates; by: the largest difference over the leaf's largest value; "
    "retained, early bytes: over bytes of the parameters; fenced: torn, where a process with FMA "
    "replays what one without FMA trained.",
    "order: groups that leave as wholes, or leaves one by one; the largest block over an even "
    "share, and the gradients moved over those retained in one step, at K = 5.",
]


class CutRecord(Record):
    """Counts of one run each; as a table, a line for each model and optimizer."""

    def show(self) -> None:
        """Prints the notes, and last the table."""
        names = ["retained", "early bytes", "scalars", "early", "late"]
        names += [f"{isa}/{name}" for isa in ISAS for name in ("perturbed", "torn")] + ["fenced"]
        columns = {name: name for name in names}
        print_by_row(
            "bench cut", "model/optimizer", columns, self.samples, self.notes,
            cell=lambda _, count: f"{count:.10g}",
        )  # fmt: skip


def run(quick: bool) -> CutRecord:
    """Measures all optimizers on both models; if `quick`, a few on the MLP."""
    samples = {name: [count] for name, count in _measure(quick=quick).items()}
    return CutRecord("cut", samples, [*NOTES, f"On {datetime.date.today()}."])


def _measure(*, quick: bool) -> dict[str, float]:
    """Runs the processes: those without FMA first, for they leave their states for the others."""
    models = ("mlp",) if quick else ("mlp", "transformer")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for isa, flags in ISAS.items():
            command = [sys.executable, "-m", "bench.cut.benchmark", isa]
            environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
            children = [
                subprocess.Popen([*command, model, directory, str(int(quick))], env=environment)
                for model in models
            ]
            if any([child.wait() for child in children]):
                raise SystemExit("a process failed")
            for model in models:
                path = Path(directory, f"{isa}-{model}.json")
                figures |= json.loads(path.read_text())
    return dict(sorted(figures.items()))


def _child(isa: str, model: str, directory: str, quick: bool) -> None:
    figures: dict[str, float] = {}
    for optimizer in programs.QUICK if quick else programs.OPTIMIZERS:
        found = measure(optimizer, model, isa, Path(directory))
        figures |= {f"{model}/{optimizer}/{name}": value for name, value in found.items()}
        print(isa, model, optimizer, flush=True)
    Path(directory, f"{isa}-{model}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    _child(*sys.argv[1:4], quick=sys.argv[4] == "1")
