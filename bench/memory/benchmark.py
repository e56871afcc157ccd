"""How much memory of the host saves take, against their budget: each way in a fresh process.

What is measured is in `bench/memory/way.py`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.memory.way import NOTES, QUICK, WAYS
from bench.record import ROOT, OptionError, Record, refuse_no_folder, without_paths
from bench.tables import print_by_row

_COLUMNS = {
    "host_peak_extra_bytes": "host peak MB",
    "host_budget_bytes": "budget MB",
    "host_peak_budget_ratio": "of budget",
    "extra_rss_bytes": "process MB",
    "extra_rss_state_ratio": "of state",
    "accounted_bytes": "accounted MB",
    "extra_over_accounted_ratio": "of accounted",
    "kept_bytes": "kept MB",
    "reported/deferred_steps": "put off",
}


class MemoryRecord(Record):
    """A record of `<way>/<figure>`."""

    def show(self) -> None:
        """Prints the notes, and last a line for each way."""
        print_by_row(
            "bench memory: medians", "way to save", _COLUMNS, self.samples, self.notes,
            count="extra_rss_bytes", cell=_cell,
        )  # fmt: skip


def _cell(name: str, value: float) -> str:
    return f"{value / 1e6:.0f}" if name.endswith("_bytes") else f"{value:.3g}"


def run(
    quick: bool, *, ways: str | None = None, directory: Path | None = None, out: Path | None = None
) -> Record:
    """Runs every way to save in processes of their own.

    Args:
      quick: A smaller state, fewer ways, once.
      ways: Comma-separated names; all if `None`.
      directory: For the checkpoints; the temporary directory if `None`.
      out: Where the record is written after each way.
    """
    record = MemoryRecord("memory", notes=[*NOTES], details={"saves": {}, "failures": {}})
    names = ways.split(",") if ways else QUICK if quick else WAYS
    if unknown := [name for name in names if name not in WAYS]:
        raise OptionError(f"there are no ways {unknown}; give some of {', '.join(WAYS)}.")
    refuse_no_folder(directory)
    for name in names:
        _add(record, name, quick=quick, directory=directory)
        if out is not None:
            record.write(out)
    record.notes.append(f"A state of {record.details.get('state_bytes', 0) / 1e9:.2f} GB.")
    return record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--ways", help=f"comma-separated, of {', '.join(WAYS)}; all if left out")
    parser.add_argument("--directory", type=Path, help="for the checkpoints")


def _add(record: Record, name: str, *, quick: bool, directory: Path | None) -> None:
    place = directory.absolute() if directory else None  # the process runs in the repository
    with tempfile.TemporaryDirectory(dir=place) as target:
        words = ["-m", "bench.memory.way", name, target, *(["--quick"] if quick else [])]
        child = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False,
            env=os.environ | WAYS[name].environment,
        )  # fmt: skip
    if child.returncode:  # one way less, not all of them
        record.details["failures"][name] = without_paths(child.stderr)[-4000:]
        record.notes.append(f"{name}: failed, see the record's `failures`.")
        return
    found = json.loads(child.stdout.splitlines()[-1])
    record.details["state_bytes"] = found["state_bytes"]
    record.details["saves"][name] = found["saves"]
    record.samples |= {f"{name}/{figure}": x for figure, x in found["samples"].items()}
