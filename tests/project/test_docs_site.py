"""The documentation site: every page is in the navigation, nothing is loaded from other hosts, lists and links work."""

from __future__ import annotations

import re
import runpy
import tomllib
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
    assert sorted(listed) == sorted([*generated, *(page.name for page in PAGES)])


def test_site_is_built_strictly_and_loads_nothing_from_other_hosts() -> None:
    assert SITE["strict"] is True
    assert "mkdocs build --strict\n" in (ROOT / "Makefile").read_text()  # with --quiet, warnings are not counted
    assert SITE["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css", "repo_url", "site_url"} & SITE.keys()
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


def test_home_page_is_the_readme_with_links_of_the_site() -> None:
    readme = (
        "![a](docs/a.png) [b](docs/b.md#c) [d](CONTRIBUTING.md) [`e.py`](examples/e.py) [f](http://127.0.0.1/) [g](#h)"
    )
    expected = "![a](a.png) [b](b.md#c) d (`CONTRIBUTING.md`) `examples/e.py` [f](http://127.0.0.1/) [g](#h)"
    assert HOOKS["home_page"](readme) == expected


def test_links_out_of_the_docs_become_paths() -> None:
    assert HOOKS["on_page_markdown"]("[x.py](../src/x.py), [y](z.md)") == "`src/x.py`, [y](z.md)"


def test_reference_page_has_the_public_names() -> None:
    page = HOOKS["reference_page"]('__all__ = ["Run", "__version__", "load"]\n')
    assert re.findall("^::: (.+)$", page, re.MULTILINE) == ["linnet.Run", "linnet.load"]
