"""Hooks of the documentation site (mkdocs.yml): README.md is its home page, the public names of `linnet` make a reference page, and
links to files outside docs/ become their paths.

The pages are written to be read on a code host too, where such links work.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
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
    parts = [f"::: linnet.{name}" for name in names]
    return "\n\n".join(["# Python API reference", "Made from the docstrings of the package `linnet`.", *parts]) + "\n"


def _is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def on_files(files: Any, config: Any) -> Any:
    file: Any = type(next(iter(files)))  # mkdocs is not imported: only the environment of `make docs` has it
    generated = {
        "index.md": home_page((ROOT / "README.md").read_text()),
        "reference.md": reference_page((ROOT / "src" / "linnet" / "__init__.py").read_text()),
    }
    for name, content in generated.items():
        files.append(file.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return outside_links(markdown)
