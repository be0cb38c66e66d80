"""The pages of the documentation, taken apart: fenced blocks, shell commands, inline code, headings and links."""

from __future__ import annotations

import dataclasses
import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SEPARATORS = ("&&", "||", "|", ";", ";;", "&", "then", "do", "else")
SHELL_WORDS = ("for", "case", "esac", "done", "if", "fi", "while", "exit", "export", "cd")
"""Lines that begin with these steer a script and start no program of ours."""
LAUNCHERS = ("srun",)
"""Programs that start the `linnet` which follows them in the line."""


@dataclasses.dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return every fenced block. A fence may be indented, in a list for instance."""
    found: list[Block] = []
    opened: tuple[int, str, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = re.match(r"( *)```(\S*)", line)
        if opened is None and fence:
            opened, lines = (number, fence[1], fence[2]), []
        elif opened is not None and fence and not fence[2]:
            found.append(Block(page, opened[0], opened[2], "\n".join(lines) + "\n"))
            opened = None
        elif opened is not None:
            lines.append(line.removeprefix(opened[1]))
    assert opened is None, f"{page.name}:{opened}: a fence that is not closed"
    return found


def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def inline_code(page: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield every command of a script as its words: without comments, variables set in front and what is piped or chained after it. A
    command inside another (quoted, or after `--`) is yielded as well."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            continue
        words = shlex.split(re.sub(r"^\s*\S+\)(?= )", "", line), comments=True)  # without the pattern of a case
        yield from _commands([word for word in words if word])


def _commands(words: list[str]) -> Iterator[list[str]]:
    one: list[str] = []
    for word in [*words, ";"]:
        end = word in SEPARATORS or word.endswith(";")
        one += [word.rstrip(";")] if end and word not in SEPARATORS else [] if end else [word]
        if end:
            yield from _simple(one)
            one = []


def _simple(words: list[str]) -> Iterator[list[str]]:
    words = list(words)
    while words and re.match(r"[A-Za-z_]+=", words[0]):
        del words[0]
    if not words or words[0] in SHELL_WORDS:
        return
    if words[0] in LAUNCHERS and "linnet" in words:
        words = words[words.index("linnet") :]
    if words[0] == "linnet" and "--" in words:
        at = words.index("--")
        yield words[:at]
        yield ["linnet", *words[at + 1 :]]
        return
    yield words
    for word in words:
        if word.startswith("linnet "):
            yield from shell_commands(word)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {_slug(title) for title in titles}


def _slug(title: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def is_plain(anchor: str) -> bool:
    """Whether GitHub and MkDocs name the anchor alike."""
    ascii_only = unicodedata.normalize("NFKD", anchor).encode("ascii", "ignore").decode()
    return anchor == re.sub(r"-+", "-", ascii_only).strip("-")


def links(page: Path) -> list[str]:
    """Return the targets of the page's links and images, Markdown and HTML."""
    text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", "``", prose(page))
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href|srcset)="([^"]+)"', text)
