"""The documentation site: every page is in the navigation, nothing is loaded from other hosts, lists and links work."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HOOKS = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAGES = sorted((ROOT / "docs").glob("*.md"))


def nav_files(entries: list[Any]) -> list[str]:
    """The pages of a navigation with sections, in order."""
    found: list[str] = []
    for entry in entries:
        for value in entry.values():
            found += nav_files(value) if isinstance(value, list) else [value]
    return found


def test_navigation_has_every_page_once() -> None:
    """Add a new or renamed page to `nav` in mkdocs.yml."""
    listed = [name for name in nav_files(SITE["nav"]) if name.endswith(".md")]
    assert listed[0] == "index.md"
    generated = ["index.md", "reference.md"]  # README.md and the docstrings of the package
    generated += [f"notebooks/{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")]
    assert sorted(listed) == sorted([*generated, *(page.name for page in PAGES)])


def test_site_is_built_strictly_and_loads_nothing_from_other_hosts() -> None:
    assert SITE["strict"] is True
    assert "mkdocs build --strict\n" in (ROOT / "Makefile").read_text()  # with --quiet, warnings are not counted
    assert SITE["theme"]["font"] is False
    assert not {"extra_javascript", "repo_url", "site_url"} & SITE.keys()
    for name in SITE["extra_css"]:
        assert "url(" not in (ROOT / "docs" / name).read_text()
    assert {kind for group in SITE["validation"].values() for kind in group.values()} == {"warn"}


def test_tools_of_the_site_are_locked_and_not_needed_to_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [re.match(r"[\w-]+", line)[0] for line in project["dependency-groups"]["docs"]]  # pyright: ignore
    locked = (ROOT / ".github" / "docs.lock").read_text()
    assert [name for name in names if not re.search(rf"^{name}(\[\w+\])?==", locked, re.MULTILINE)] == []
    assert "\nmkdocs" not in (ROOT / "requirements.lock").read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_lists_and_tables_follow_a_blank_line(page: Path) -> None:
    """Python-Markdown, unlike code hosts, joins a list or a table to a paragraph directly above it."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    begins = re.compile(r"(- |\* |\d{1,2}\. |\|)")
    wrong = [
        line
        for before, line in zip(text.splitlines(), text.splitlines()[1:], strict=False)
        if begins.match(line) and before.strip() and not before.startswith((" ", "|")) and not begins.match(before)
    ]
    assert wrong == []


def on_page(markdown: str, name: str) -> str:
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=name))
    return HOOKS["on_page_markdown"](markdown, page=page)


def test_home_page_is_the_readme_with_links_of_the_site() -> None:
    readme = (
        "![a](docs/a.png) [b](docs/b.md#c) [d](CONTRIBUTING.md) [`e.py`](examples/e.py) [f](http://127.0.0.1/) [g](#h)"
    )
    expected = "![a](a.png) [b](b.md#c) d (`CONTRIBUTING.md`) `examples/e.py` [f](http://127.0.0.1/) [g](#h)"
    assert HOOKS["home_page"](readme) == expected


def test_links_out_of_the_docs_become_paths() -> None:
    assert on_page("[x.py](../src/x.py), [y](z.md)", "python.md") == "`src/x.py`, [y](z.md)"
    assert on_page("[x](../python.md)", "notebooks/a.md") == "[x](../python.md)"


def test_links_to_sources_of_generated_pages_lead_to_these_pages() -> None:
    links = "[a](notebooks/a-b.ipynb) [c](d.ipynb) [e](../src/linnet/__init__.py)"
    assert on_page(links, "python.md") == "[a](notebooks/a-b.md) [c](d.md) [e](reference.md)"


def test_notebook_becomes_a_page_with_its_outputs() -> None:
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["2\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["T"], "text/html": ["<p>a</p>\n", "\n", "<p>b</p>"]}},
        {"output_type": "execute_result", "data": {"text/plain": ["I"], "image/png": "QUJD\n"}},
        {"output_type": "display_data", "data": {"text/plain": ["<HTML object>"], "text/html": [""]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text"]},
        {"cell_type": "code", "source": ["print(2)"], "outputs": outputs},
    ]
    page = HOOKS["notebook_page"](json.dumps({"cells": cells}), "x.ipynb")
    assert page.startswith("# Title\n\nText\n\n```python\nprint(2)\n```\n\n```text\n2\n```\n\n<div")
    assert "<p>a</p>\n<p>b</p></div>\n\n<img" in page  # a blank line would end the block of HTML
    assert 'src="data:image/png;base64,QUJD"' in page
    assert "HTML object" not in page  # the output of a progress bar that was removed
    assert 'href="x.ipynb"' in page


def test_reference_page_has_the_public_names() -> None:
    page = HOOKS["reference_page"]('__all__ = ["Run", "__version__", "load"]\n')
    assert re.findall("^::: (.+)$", page, re.MULTILINE) == ["linnet.load", "linnet.Run"]
