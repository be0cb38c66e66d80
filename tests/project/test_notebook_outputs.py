"""The notebooks of the documentation are complete: executed in order, without errors, warnings or traces of a machine."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import notebook_files
import pytest
from notebook_files import NOTEBOOKS

import linnet

MAX_BYTES = 500_000
MACHINE = re.compile(r"/(?:tmp|home|root|Users|work|var|usr)/|site-packages|\.venv|0x[0-9a-f]{6,}")


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["images-and-priors.ipynb", "train-and-generate.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_executed_in_order(path: Path) -> None:
    """Execute it again with scripts/run_notebooks.py after a change."""
    cells = notebook_files.cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stream", "execute_result", "display_data"}
    assert {output["name"] for cell in cells for output in cell["outputs"] if "name" in output} <= {"stdout"}
    shown = [cell for cell in cells if cell["outputs"]]
    assert len(shown) > len(cells) / 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_small_and_names_no_machine(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            for kind, value in output.get("data", {"text/plain": output.get("text", "")}).items():
                assert kind.startswith("image/") or MACHINE.findall("".join(value)) == []
        assert cell["metadata"] == {}
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert set(notebook["metadata"]["language_info"]) == {"name"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_uses_public_names(path: Path) -> None:
    """`tests/e2e/test_notebooks.py` runs the code; this check needs no model."""
    nodes = [node for cell in notebook_files.cells(path) for node in ast.walk(ast.parse(notebook_files.source(cell)))]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "linnet"
    }
    assert used
    assert used <= set(linnet.__all__)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_resolve(path: Path) -> None:
    text = "".join(notebook_files.source(cell) for cell in notebook_files.cells(path, "markdown"))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    assert [link for link in links if not (path.parent / link).is_file()] == []
