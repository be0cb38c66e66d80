"""The notebooks of the documentation, taken apart."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def split_result(code: str) -> tuple[ast.Module, ast.Expression | None]:
    """Split a cell into its statements and the expression at its end, whose value is shown."""
    tree = ast.parse(code)
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr):
        return tree, None
    return ast.Module(tree.body[:-1], []), ast.Expression(last.value)


def results(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the value that a cell shows, by format, if there is one."""
    return [output["data"] for output in cell["outputs"] if output["output_type"] == "execute_result"]
