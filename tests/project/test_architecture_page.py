"""docs/architecture.md names files that exist, and its image and CONTRIBUTING.md have every package."""

from __future__ import annotations

import re
from pathlib import Path

import linnet

ROOT = Path(__file__).parents[2]
SOURCE = Path(linnet.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def packages() -> set[str]:
    return {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def test_every_file_that_the_page_names_exists() -> None:
    named = [name for name in re.findall(r"`([a-z0-9_/]+(?:\.py|/))`", PAGE) if not name.startswith(("src/", "tests/"))]
    assert len(named) > 60
    assert [name for name in named if not (SOURCE / name).exists()] == []


def test_every_module_that_another_page_names_exists() -> None:
    pages = [
        *(ROOT / "docs").glob("*.md"),
        ROOT / "CONTRIBUTING.md",
        ROOT / "pyproject.toml",
        ROOT / ".pre-commit-config.yaml",
    ]
    named = {
        (page.name, name.removeprefix("src/linnet/"))
        for page in pages
        for name in re.findall(r"((?:[a-z0-9_]+/)+[a-z0-9_]+\.py)", page.read_text())
        if name.split("/")[0] not in ("tests", "scripts", "examples")
    }
    assert [one for one in sorted(named) if not (SOURCE / one[1]).exists()] == []


def test_diagram_and_package_table_have_every_package() -> None:
    image = (ROOT / "docs" / "architecture.svg").read_text()
    assert set(re.findall(r'font-weight="600"[^>]*>(\w+)<', image)) == packages()
    table = (ROOT / "CONTRIBUTING.md").read_text()
    assert {name for name in packages() if f"`{name}/`" not in table} == set()
