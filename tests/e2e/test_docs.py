"""The docs tell the truth: every command they show exists and has the flags they use; every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from linnet.cli import main
from linnet.cli.dispatch import COMMANDS

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """Every `linnet ..` line of a page's shell blocks, without its comment; what is launched is a command of its own."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("linnet ")]
    words = [shlex.split(line, comments=True)[1:] for line in lines]
    return [part for line in words for part in _apart(line)]


def _apart(words: list[str]) -> list[list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return [part for part in (words[:at], words[at + 1 :]) if part]


SHOWN = [(page.name, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=lambda x: " ".join(x) if isinstance(x, list) else x)
def test_commands_exist_with_their_flags(page: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert words[0] in COMMANDS, page
    with pytest.raises(SystemExit) as exit:
        main([*words[: 2 if words[0] in ("data", "tokenizer") else 1], "--help"])
    assert not exit.value.code
    known = capsys.readouterr().out
    for flag in (word for word in words if word.startswith("--")):
        assert flag in known, f"{page}: linnet {words[0]} has no {flag}"


def test_the_readme_shows_commands() -> None:
    assert len(commands(ROOT / "README.md")) >= 5


def test_the_two_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    for target in ("run", "test", "setup"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link
