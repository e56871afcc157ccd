"""Every example in the documentation runs and tells the truth."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gockpt_jax

README = Path(__file__).resolve().parent.parent / "README.md"
FOUND = pkgutil.walk_packages(gockpt_jax.__path__, "gockpt_jax.")
MODULES = sorted(m.name for m in FOUND if not m.name.endswith("__main__"))


def examples_in(module: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("module", [m for m in MODULES if examples_in(m)])
def test_docstring_examples(module, tmp_path, monkeypatch):
    """Each docstring in a namespace of its own, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples_in(module):
        runner.run(test, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)


@pytest.mark.parametrize("name", ["GoCkptManager", "GoCkptState", "WindowOptions", "retain"])
def test_what_a_user_meets_first_has_an_example(name):
    assert ">>> " in getattr(gockpt_jax, name).__doc__


def test_the_reasons_that_are_explained_are_those_of_reports():
    """Parts of them, up to what differs from save to save."""
    page = README.parent / "docs" / "running.md"
    table = page.read_text(encoding="utf-8").partition("| the reason has |")[2].partition("\n\n")[0]
    firsts = [row.split(" | ")[0] for row in table.splitlines()[2:]]
    told = [part for first in firsts for part in re.findall("`(.*?)`", first)]
    assert len(told) > 10
    library = Path(gockpt_jax.__file__).parent
    rooms = (library / name for name in ("window", "telemetry", "training"))
    files = sorted(path for room in rooms for path in room.glob("*.py"))
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [part for part in told if part not in re.sub(r'"\n\s+f?"', "", sources)] == []


def names_in(module: ast.Module) -> Iterator[str]:
    """Of functions and classes, and of methods as `Class.method`."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}"


def test_the_calls_of_a_save_are_those_of_the_design():
    page = (README.parent / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition("## One save, call by call")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[1:] for line in section.splitlines() if line.startswith("| ")][1:]
    told = re.findall(r"`([A-Z_a-z.]+)`", " ".join(cell for row in rows for cell in row))
    files = Path(gockpt_jax.__file__).parent.rglob("*.py")
    known = {
        name for file in files for name in names_in(ast.parse(file.read_text(encoding="utf-8")))
    }
    of_orbax = {"save", "finalize", "restore"}
    assert len(told) > 40
    assert set(told) - known - of_orbax - {"jax.jit"} == set()


def readme_blocks() -> list[tuple[int, str]]:
    """The line number and the source of each Python block."""
    text = README.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```(?:python|py)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in blocks]


def test_readme_examples(tmp_path, monkeypatch):
    """In their order, in one namespace, as a reader would paste them into one session."""
    blocks = readme_blocks()
    assert blocks, "the README shows no Python"
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for line, source in blocks:
        code = compile("\n" * line + source, str(README), "exec")  # lines of tracebacks are right
        exec(code, namespace)
