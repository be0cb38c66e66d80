"""Execute notebooks and store their outputs: `python scripts/run_notebooks.py docs/notebooks/*.ipynb`.

Needs nbclient and ipykernel, which are not in the lock file, beside the package. The code runs in the working directory, where its
runs are kept: run the script in an empty folder. Only what a reader sees is stored, without timestamps and versions of the machine.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run(path: Path) -> None:
    nbformat: Any = importlib.import_module("nbformat")
    client: Any = importlib.import_module("nbclient").NotebookClient
    notebook = nbformat.read(path, as_version=4)
    started = time.monotonic()
    client(notebook, timeout=None, store_widget_state=False, coalesce_streams=True).execute(cwd=Path.cwd())
    notebook.metadata = METADATA
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{i}", {}
        for output in cell.get("outputs", ()):
            output.pop("transient", None)
            if "metadata" in output:
                output.metadata = {}
    nbformat.write(notebook, path)
    print(f"{path.name}: {time.monotonic() - started:.0f} s, {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name))
