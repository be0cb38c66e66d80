"""Every message that docs/troubleshooting.md quotes is one that the source can produce, and every exit code is on the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from linnet.cli.dispatch import EXIT_CODES

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [one for one in re.findall(r"^\| (?:\d{3} \| )?`([^`]+)` \| ", PAGE, re.MULTILINE) if " " in one]
FOREIGN = ("top_p: Input should be less than or equal to 1; promt", "No space left on device")
"""Texts of pydantic and of the operating system inside a message."""
EDGES = ".:() "
"""Punctuation at the ends of a text that does not matter."""
MIN_LITERAL = 0.35
"""Share of a text that must be literal in the source: a template of placeholders alone would match everything."""


def templates() -> list[tuple[re.Pattern[str], int]]:
    """Return a pattern for every string of the source, up to its `Fix:`, and the number of its literal characters."""
    found: dict[str, int] = {}
    for path in (ROOT / "src" / "linnet").rglob("*.py"):
        tree = ast.parse(path.read_text())
        inner = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [str(one.value) if isinstance(one, ast.Constant) else "\0" for one in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                parts = [node.value]
            else:
                continue
            text = "".join(parts).partition("Fix:")[0].strip(EDGES)
            literal = len(text.replace("\0", ""))
            for one in (text, text.strip(EDGES + "\0")) if 2 < literal < 600 else ():  # also without what ends it
                found[".*?".join(map(re.escape, one.split("\0")))] = literal
    return [(re.compile(pattern), literal) for pattern, literal in found.items()]


TEMPLATES = templates()
MISTAKES = (ROOT / "tests" / "cli" / "test_first_mistakes.py").read_text()
"""Messages in this test are produced by it."""


def is_of_source(text: str) -> bool:
    text = text.strip(EDGES)
    return text in FOREIGN or any(
        literal >= MIN_LITERAL * len(text) and pattern.fullmatch(text) for pattern, literal in TEMPLATES
    )


def is_composed(text: str) -> bool:
    """Whether the text is of the source as a whole, or each part of it that is joined by punctuation."""
    return is_of_source(text) or all(map(is_of_source, re.split(r": (?!Input)| \(", text)))


def test_page_has_messages() -> None:
    assert len(MESSAGES) > 40


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_of_the_source(message: str) -> None:
    if message in MISTAKES:
        return
    message = message.removeprefix("prior: ")  # the name of a model
    invalid = re.fullmatch(r"(.+?) is (.+?), but it must be (.+)", message)
    if invalid is None or is_of_source(message):
        assert is_composed(message)
    else:  # by `linnet.core.errors.invalid`
        assert is_of_source(invalid[1])
        assert is_composed(invalid[3])


def test_message_that_no_longer_exists_is_found() -> None:
    assert is_composed("the queue is full (64 requests are waiting).")
    assert not is_composed("the queue is crowded (64 requests are waiting).")
    assert not is_composed("64 requests are waiting already, as many as may.")


def test_every_exit_code_is_on_the_page() -> None:
    shown = re.findall(r"^\| ([\d+n]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert [code for code, _ in shown if len(code) < 3 or "+" in code] == list(EXIT_CODES)
