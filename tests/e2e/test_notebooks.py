"""The code of the notebooks runs, with small models, and shows values in the formats that are stored."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import notebook_files
import pytest
from notebook_files import NOTEBOOKS
from server_process import free_port
from small_quickstart import use_small_quickstart

PORT = "8123"
"""The port in the notebooks; a free one takes its place."""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(
    path: Path, image_runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    use_small_quickstart(monkeypatch)
    (tmp_path / "runs").mkdir()
    for name, run in image_runs.items():
        (tmp_path / "runs" / name).symlink_to(run)
    port, names = str(free_port()), {"__name__": "__main__"}
    try:
        for cell in notebook_files.cells(path):
            code, result = notebook_files.split_result(notebook_files.source(cell).replace(PORT, port))
            exec(compile(code, path.name, "exec"), names)
            value = None if result is None else eval(compile(result, path.name, "eval"), names)
            assert [formats(value)] * (value is not None) == [set(data) for data in notebook_files.results(cell)]
    finally:
        server: Any = names.get("server")
        if server is not None:
            server.kill()
            server.wait()


def formats(value: Any) -> set[str]:
    """The formats in which a notebook shows the value."""
    made = {"text/plain"}
    for kind, method in (("text/html", "_repr_html_"), ("image/png", "_repr_png_"), ("image/jpeg", "_repr_jpeg_")):
        if getattr(value, method, lambda: None)() is not None:
            made.add(kind)
    return made
