"""The playground as the tests handle it: filling in, running, and reading what is on the page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from playground_server import VERSE
from playwright.sync_api import Page, expect

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

needs_browser = pytest.mark.skipif(
    not CHROMIUM.exists() and os.environ.get("CI") != "true",
    reason=f"the browser {CHROMIUM} is not installed; CI must have it",
)


class RecordedCalls(list[tuple[str, Any]]):
    """Every call the page made: its path and its JSON."""

    def bodies(self, path: str) -> list[Any]:
        return [body for requested, body in self if requested == path]


def run(page: Page, prompt: str | None = None, *, max_tokens: int | None = None) -> None:
    if max_tokens is not None:
        page.fill("#f-max_tokens", str(max_tokens))
    if prompt is not None:
        page.fill("#prompt", prompt)
    page.click("#run")
    wait_until_finished(page)


def new_session(page: Page) -> None:
    """Wait for the focus that a new session moves to the prompt: text filled into another field before would end in the prompt."""
    page.click("#session-new")
    expect(page.locator("#prompt")).to_be_focused()


def wait_until_finished(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text("seed")
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")


def answer(page: Page) -> str:
    return "".join(page.locator("#output .tok:not(.control)").all_text_contents())


def expected_verse(start: int, n: int) -> str:
    """What the model says when it has read `start` tokens."""
    verse = VERSE.encode()
    return bytes(verse[i % len(verse)] for i in range(start, start + n)).decode(errors="replace")


def context_length(page: Page) -> int:
    return int(page.inner_text("#ctx").replace(",", ""))
