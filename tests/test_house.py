"""The rules of the house, read from the source."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gockpt_jax

PACKAGE = Path(gockpt_jax.__file__).parent
BENCH = PACKAGE.parent / "bench"
FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix()
)

# Imports run from higher to lower numbers only; rooms of one number do not know each other.
RANKS = {
    "errors": 0, "checks": 0, "_compat": 0, "promise": 0, "locks": 1, "compiling": 2, "options": 2,
    "telemetry": 2, "training": 3, "transfer": 4, "replay": 4, "window": 5, "storage": 6,
    "manager": 7, "v1": 7, "cli": 8, "__main__": 9,
}  # fmt: skip
MAY_IMPORT_ORBAX = {"storage", "manager"}
FOREIGN = {"jax", "jaxlib", "flax", "optax", "orbax"}
MAX_PUBLIC_NAMES, MAX_FILE_LINES, MAX_FUNCTION_LINES = 25, 400, 60


# All while there is one thread: before CPython 3.11.8 two that parse at once disturb each other
# (python/cpython#106905), and one that formats a traceback parses, too.
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in (*FILES, *sorted(BENCH.rglob("*.py")))
}


def parse(path: Path) -> ast.Module:
    return TREES[path]


def room(path: Path) -> str:
    """The first name below the package: a room, or a module of its own."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported, `from` targets included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)) is not None:
        return f"{owner}.{node.attr}"
    return None


def test_every_room_has_its_rank():
    rooms = {room(path) for path in FILES} - {"__init__"}
    assert rooms <= RANKS.keys()
    assert rooms >= {"manager", "options", "storage", "telemetry", "training", "window"}


@every_file
def test_imports_run_one_way(path):
    if path == PACKAGE / "__init__.py":
        return
    for name in imports(parse(path)):
        if name.startswith("gockpt_jax."):
            imported = name.split(".")[1]
            if imported != room(path):
                assert RANKS[imported] < RANKS[room(path)], f"imports {name}"


def table(package: Path) -> list[str]:
    """The names in the table of a package's docstring, in its order."""
    told = ast.get_docstring(parse(package / "__init__.py"))
    return re.findall(r"^    (\w+)  +\S", told, re.MULTILINE)


def test_storage_is_in_folders_and_imports_one_way():
    """From what is above only: folders in the room's own table, files in that of their folder."""
    storage = PACKAGE / "storage"
    folders = table(storage)
    names = [f"gockpt_jax.storage.{f}.{name}" for f in folders for name in table(storage / f)]
    rank = {name: n for n, name in enumerate(names)}
    modules = {path: module_name(path) for path in FILES if room(path) == "storage"}
    assert sorted(names) == sorted(m for m in modules.values() if not m.endswith(".__init__"))
    for path, module in modules.items():
        for name in imports(parse(path)):
            if name.startswith("gockpt_jax.storage"):
                imported = rank.get(".".join(name.split(".")[:4]))
                assert imported is not None, f"{module} imports {name}: no file of a folder"
                # An `__init__.py` imports none.
                assert imported < rank.get(module, 0), f"{module} imports {name}"


@pytest.mark.parametrize("name", ["telemetry", "training", "transfer", "replay", "window"])
def test_files_of_a_room_import_one_way(name):
    """From those only that are above them in the table of the room."""
    files = {p.stem: p for p in (PACKAGE / name).glob("*.py") if p.stem != "__init__"}
    rank = {file: n for n, file in enumerate(table(PACKAGE / name))}
    assert rank.keys() == files.keys()
    for file, path in files.items():
        for imported in imports(parse(path)):
            if imported.startswith(f"gockpt_jax.{name}."):
                assert rank[imported.split(".")[2]] < rank[file], f"{file} imports {imported}"


@pytest.mark.parametrize("folder", [PACKAGE, BENCH], ids=lambda path: path.name)
def test_no_files_import_each_other(folder):
    """In a circle of any length, be it inside a function."""
    files = {module_name(path).removesuffix(".__init__"): path for path in folder.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        names = {name: name.rpartition(".")[0] for name in imports(parse(path))}
        graph[module] = {name if name in files else owner for name, owner in names.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises


@every_file
def test_orbax_is_imported_in_storage_and_the_manager_only(path):
    if room(path) not in MAY_IMPORT_ORBAX:
        assert [n for n in imports(parse(path)) if n.startswith("orbax")] == []


@every_file
def test_nothing_private_of_others(path):
    """What has no public name is asked for in a `_compat.py`, where each entry says why."""
    if path.name == "_compat.py":
        return
    tree = parse(path)
    used = [*imports(tree), *filter(None, map(dotted, ast.walk(tree)))]
    aliases = {"ocp", "jnp", "lax", "jex", "managers", *FOREIGN}
    private = {
        name
        for name in used
        if name.split(".")[0] in aliases
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    }
    assert private == set()


def test_few_public_names():
    exported = {n for n in imports(parse(PACKAGE / "__init__.py")) if n.startswith("gockpt_jax.")}
    public = {n for n in vars(gockpt_jax) if not n.startswith("_")}
    rooms = {p.stem if p.is_file() else p.name for p in PACKAGE.iterdir()}
    assert len(exported) <= MAX_PUBLIC_NAMES
    # Nothing else may slip in, but for the rooms that importing them leaves there.
    assert public - {n.rsplit(".", 1)[1] for n in exported} <= rooms


@every_file
def test_files_and_functions_stay_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def public_definitions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes, and the public methods of public classes."""
    for node in body:
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_definition and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


@every_file
def test_everything_public_says_what_it_is(path):
    tree = parse(path)
    assert ast.get_docstring(tree), "the module has no docstring"
    silent = [n.name for n in public_definitions(tree.body) if not ast.get_docstring(n)]
    assert silent == []
