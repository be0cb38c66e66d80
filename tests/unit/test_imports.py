"""The import rule: foundations -> nn -> families -> config -> {data, train} -> bench -> cli, never the other way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import linnet

ROOT = Path(linnet.__file__).parent
RANK = {
    **dict.fromkeys(
        (
            "errors",
            "local_path",
            "json_file",
            "files",
            "cluster",
            "mesh",
            "pytree",
            "rng",
            "params",
            "sharding",
            "quant",
            "tokens",
            "tuning",
            "weights",
            "__init__",
        ),
        0,
    ),
    "nn": 1,
    "families": 2,
    **dict.fromkeys(("config", "presets"), 3),
    "data": 4,
    "train": 5,
    "serve": 5,
    "bench": 6,
    "plan": 6,
    "cli": 7,
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Every linnet module a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "linnet":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("linnet.")}
    return found - {"__version__"}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    assert room(path) in RANK, f"{path.name} is in no room of the house: give it a rank here and in CONTRIBUTING.md"
    for name in imported(path):
        assert RANK[name] <= RANK[room(path)], f"{path.relative_to(ROOT)} imports {name}, which stands above it"


def test_train_and_serve_do_not_know_each_other() -> None:
    for path in (ROOT / "train").rglob("*.py"):
        assert "serve" not in imported(path)
    for path in (ROOT / "serve").rglob("*.py"):
        assert "train" not in imported(path)


def test_the_rule_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from linnet.cli.dispatch import main\n    import linnet.train.loop\n")
    assert imported(bad) == {"cli", "train"}
