"""The import rule: packages import only packages that stand before them, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import linnet

ROOT = Path(linnet.__file__).parent
ORDER = (
    ("core",),
    ("parallel",),
    ("nn",),
    ("models",),
    ("config",),
    ("tokenizers",),
    ("data",),
    ("optim",),
    ("runs",),
    ("convert",),
    ("evaluate", "generate"),
    ("train", "serve", "report"),
    ("verify", "plan", "bench"),
    ("api",),
    ("cli",),
)
"""Low to high. Packages of one step do not import each other."""
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in root.rglob("*.py"):
        name = ".".join((root.name, *path.relative_to(root).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules of the package that a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "linnet":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in known else node.module)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "linnet"}
    return found


def forbidden(name: str, imported: str) -> bool:
    mine, other = name.split(".")[1], (*imported.split("."), "")[1]
    if not other or mine == other:  # the package itself: its version
        return False
    return RANK[other] >= RANK[mine]


def circles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Groups of modules that reach each other."""
    reach = {name: _reachable(name, graph) for name in graph}
    seen: set[str] = set()
    for name in sorted(graph):
        group = sorted(other for other in reach[name] if name in reach.get(other, ()))
        if name in reach[name] and name not in seen:
            seen |= set(group)
            yield group


def _reachable(name: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for other in graph.get(waiting.pop(), set()) - found:
            found.add(other)
            waiting.append(other)
    return found


MODULES = modules(ROOT)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_run_one_way(name: str) -> None:
    if name == "linnet":
        return
    assert name.split(".")[1] in RANK, f"{name} is in no package of the map: add it to ORDER and to CONTRIBUTING.md"
    wrong = [imported for imported in imports(MODULES[name], MODULES) if forbidden(name, imported)]
    assert not wrong, f"{name} imports {', '.join(wrong)}, which stands beside or above it"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: imports(path, MODULES) - {name} for name, path in MODULES.items()}
    assert list(circles(graph)) == []


def test_initial_weight_checks_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "def f():\n    from linnet.cli.dispatch import main\n    import linnet.train.loop\n    from linnet import cli"
    )
    assert imports(bad, MODULES) == {"linnet.cli.dispatch", "linnet.train.loop", "linnet.cli"}
    assert forbidden("linnet.train.loop", "linnet.serve.engine")
    assert forbidden("linnet.core.files", "linnet.nn.norm")
    assert not forbidden("linnet.cli.train", "linnet.train.loop")
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert list(circles(graph)) == [["a", "b", "c"]]
