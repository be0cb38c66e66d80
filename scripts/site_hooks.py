"""Hooks of the documentation site (mkdocs.yml): README.md is its home page, the public names of `linnet` make a reference page,
notebooks become pages with their stored outputs, and links to files outside docs/ become their paths.

Notebooks are converted here: mkdocs-jupyter would more than double the packages of the site, and loads scripts from other hosts.

The pages are written to be read on a code host too, where such links work.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "docs" / "notebooks"
PUBLIC_NAMES = "../src/linnet/__init__.py"
"""On a code host the pages link to the list of public names, on the site to the reference made from it."""
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)\)")


def outside_links(markdown: str) -> str:
    """Replace `[text](../path)` by the text and the path, or by the path alone if the text is its name."""

    def replace(match: re.Match[str]) -> str:
        text, path = match[1], match[2]
        return f"`{path}`" if text.strip("`") in (path, Path(path).name) else f"{text} (`{path}`)"

    return OUTSIDE.sub(replace, markdown)


def home_page(readme: str) -> str:
    """Convert README.md to a page of docs/: links into docs/ are relative to it, links to other files become paths."""
    moved = re.sub(r"\]\((?!docs/|\w+://|#)([^)]+)\)", r"](../\1)", readme)
    moved = re.sub(r'(src|srcset)="docs/', r'\1="', moved)
    return outside_links(moved.replace("](docs/", "]("))


def reference_page(package: str) -> str:
    """Make a page that documents each name of `__all__` in the source of the package's `__init__`, for mkdocstrings."""
    values = [node.value for node in ast.walk(ast.parse(package)) if isinstance(node, ast.Assign) and _is_all(node)]
    names = [name for value in values for name in ast.literal_eval(value) if not name.startswith("_")]
    names.sort(key=lambda name: (not name.islower(), name.startswith("Async"), name))  # functions first
    parts = [f"::: linnet.{name}" for name in names]
    return "\n\n".join(["# Python API reference", "Made from the docstrings of the package `linnet`.", *parts]) + "\n"


def notebook_page(notebook: str, name: str) -> str:
    """Convert a notebook with stored outputs to Markdown."""
    parts: list[str] = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [_output(output) for output in cell.get("outputs", ())]
    parts.append(f'<a href="{name}" download>Download this notebook</a>')
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any]) -> str:
    """Convert an output. Of its formats, the richest is used."""
    data: dict[str, Any] = output.get("data", {"text/plain": output.get("text", "")})
    if "text/html" in data:
        lines = [line for line in "".join(data["text/html"]).splitlines() if line.strip()]
        return "<div>" + "\n".join(lines) + "</div>" if lines else ""
    if "image/png" in data:
        image = "".join("".join(data["image/png"]).split())
        return f'<img alt="Output of the cell above" src="data:image/png;base64,{image}">'
    text = "".join(data["text/plain"]).rstrip("\n")
    return f"```text\n{text}\n```"


def page_links(markdown: str) -> str:
    """Link to the pages that the site generates instead of their sources."""
    linked = re.sub(r"\]\(((?:\w[\w-]*/)*[\w-]+)\.ipynb\)", r"](\1.md)", markdown)
    return linked.replace(f"]({PUBLIC_NAMES})", "](reference.md)")


def _is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def on_files(files: Any, config: Any) -> Any:
    file: Any = type(next(iter(files)))  # mkdocs is not imported: only the environment of `make docs` has it
    generated = {
        "index.md": home_page((ROOT / "README.md").read_text()),
        "reference.md": reference_page((ROOT / "src" / "linnet" / "__init__.py").read_text()),
    }
    generated |= {
        f"notebooks/{path.stem}.md": notebook_page(path.read_text(), path.name) for path in NOTEBOOKS.glob("*.ipynb")
    }
    for name, content in generated.items():
        files.append(file.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    linked = page_links(markdown)
    return linked if page.file.src_uri.startswith("notebooks/") else outside_links(linked)
