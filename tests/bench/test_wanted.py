"""Commands that `bench/README.md` lists for a session on a GPU, which has minutes: rehearsed."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import hurry
import pytest

from bench.__main__ import main
from bench.around import benchmark as around
from bench.gpu import benchmark as gpu
from bench.record import ROOT
from bench.train import benchmark as train

README = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
ON_A_GPU = README.partition("## On a machine with a GPU")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"```sh\n(.*?)```", ON_A_GPU, re.DOTALL)
COMMANDS = [
    command
    for block in BLOCKS
    for command in block.replace("\\\n", " ").splitlines()
    if "-m bench " in command
]
WANTED = [command for command in COMMANDS if command in BLOCKS[3].replace("\\\n", " ")]


def words_of(command, folder):
    """What is set for a command, and what comes behind `python3 -m bench`."""
    words = shlex.split(command.replace("$DIR", str(folder)), comments=True)
    at = words.index("bench")
    given = dict(word.split("=", 1) for word in words[: at - 2])
    return given, words[at + 1 :]


def test_the_readme_lists_commands():
    assert len(COMMANDS) >= 10
    assert len(WANTED) == 5


@pytest.mark.parametrize("command", COMMANDS)
def test_a_listed_command_asks_for_what_there_is(command, tmp_path, monkeypatch):
    asked = []

    def run(quick, **options):
        asked.append(options)
        raise SystemExit

    for module in (around, gpu, train):
        monkeypatch.setattr(module, "run", run)
    _, words = words_of(command, tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit):
        main()
    (options,) = asked
    options = argparse.Namespace(**options)
    if words[0] == "train":
        train._Bench(False, options)
    elif words[0] == "around":
        around._refuse(options.modes.split(","), (options.size or "toy").split(","), options)
    else:
        parts = options.parts.split(",") if options.parts else []
        assert {part.name for part in gpu.PARTS} >= {*parts}


@pytest.mark.thorough
@pytest.mark.parametrize("command", WANTED)
def test_what_is_most_wanted_is_rehearsed(command, tmp_path):
    """As it stands, at toy size and in a folder that is not there yet."""
    given, words = words_of(command, tmp_path / "new")
    flags = {"XLA_FLAGS": f"--xla_cpu_max_isa=AVX {hurry.FLAGS}"}
    done = subprocess.run(
        [sys.executable, "-m", "bench", *words, "--quick"], cwd=ROOT, capture_output=True,
        text=True, check=False, env=os.environ | flags | given,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = Path(words[words.index("--out") + 1])
    record = json.loads((out / "gpu.json" if words[0] == "gpu" else out).read_text())
    if words[0] == "gpu":
        assert all(": done after" in note for note in record["notes"]), record["notes"]
        return
    assert not record.get("details", {}).get("failures")
    assert not [note for note in record["notes"] if "no profile" in note]
    for mode in words[words.index("--modes") + 1].split(","):
        assert any(f"{mode}/" in name for name in record["samples"]), mode
    if "--profile" in words:
        assert list(out.parent.glob("*.xplane.pb"))
