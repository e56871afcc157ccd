"""What benchmarks share, and the records that are kept."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from bench.record import ROOT, Record, _commit, interleaved, ratios, sources_digest

RESULTS = sorted((ROOT / "bench" / "results").rglob("*.json"))
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "bench").rglob("*.py"))
}
EXAMPLES = [name for name, text in MODULES.items() if ">>> " in text]
KEYS = {"name", "command", "commit", "versions", "hardware", "figures", "samples", "notes"}


def check(record):
    assert record.keys() >= KEYS
    if not record["samples"]:  # elements counted, not times: another run would count the same
        assert record["name"].startswith(("cut", "gpu"))  # or a part of which nothing came
        return
    assert record["figures"].keys() == record["samples"].keys()
    for name, figure in record["figures"].items():
        assert figure == pytest.approx(statistics.median(record["samples"][name]), rel=1e-3)


def test_a_record_says_all_that_is_needed_to_repeat_it(tmp_path, capsys):
    record = Record("nothing", {"ratio": [1.0, 3.0, 2.0]}, ["a [note] in brackets"])
    record.write(tmp_path / "new" / "nothing.json")
    written = json.loads((tmp_path / "new" / "nothing.json").read_text())
    check(written)
    assert written["figures"] == {"ratio": 2.0}
    assert written["hardware"]["cores"] >= 1
    assert "jax" in written["versions"]
    record.show()
    assert "a [note] in brackets" in capsys.readouterr().out


def test_a_record_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "nothing.json"
    Record("nothing", {"ratio": [1.0]}).write(path)
    before = path.read_text()

    def die(self, text, **_):
        self.write_bytes(b"{")
        raise MemoryError

    monkeypatch.setattr(Path, "write_text", die)
    with pytest.raises(MemoryError):
        Record("nothing", {"ratio": [2.0]}).write(path)
    assert path.read_text() == before


def test_contenders_take_turns():
    calls = []
    secs = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert [len(samples) for samples in secs.values()] == [3, 3]
    assert ratios([6.0, 8.0], [2.0, 4.0], scale=0.5) == [1.5, 1.0]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_are_records_of_clean_commits(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    check(record)
    assert "changes" not in record["commit"]


@pytest.mark.parametrize("folder", ["gockpt_jax", "bench", "examples"])
def test_a_record_tells_of_changes_wherever_what_is_measured_lies(folder, tmp_path, monkeypatch):
    """The examples have the networks that `bench train` trains."""
    monkeypatch.setattr("bench.record.ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    path = tmp_path / folder / "lm" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text("width = 1")
    copied = _commit()
    assert copied == f"sources {sources_digest()}"
    for words in (
        ["init", "--quiet"], ["add", folder],
        ["-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "-m", "x"],
    ):  # fmt: skip
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = _commit()
    assert "sources" not in clean
    path.write_text("width = 2")
    assert _commit() == f"{clean} with changes, sources {sources_digest()}"
    assert _commit() != f"{clean} with changes, {copied}"


def test_imports_start_no_backend():
    """A benchmark says how much of a device JAX takes, and with what flags, when it runs."""
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run(
        [sys.executable, "-c", program, *MODULES], cwd=ROOT, capture_output=True, text=True,
        check=False, env=os.environ | {"JAX_PLATFORMS": "none_that_could_start"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", EXAMPLES)
def test_docstring_examples(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0
