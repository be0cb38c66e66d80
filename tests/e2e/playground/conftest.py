"""A browser with the playground, served by the real server with fake models."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from playground_page import CHROMIUM, FLAGS, RecordedCalls
from playground_server import DrawingModel, SingingModel, serving
from playwright.sync_api import BrowserContext, Page, Request, expect, sync_playwright
from waiting import PATIENCE

expect.set_options(timeout=1000 * PATIENCE)


@pytest.fixture(scope="module")
def text() -> SingingModel:
    return SingingModel("text")


@pytest.fixture(scope="module")
def drawing() -> DrawingModel:
    return DrawingModel("pixels", shape=(8, 8, 3))


@pytest.fixture(scope="module")
def address(text: SingingModel, drawing: DrawingModel) -> Iterator[str]:
    with serving(text, drawing) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("browser"), executable_path=CHROMIUM, headless=True, args=FLAGS
        )
        yield context
        context.close()


@pytest.fixture
def requested() -> RecordedCalls:
    return RecordedCalls()


@pytest.fixture
def page(browser: BrowserContext, address: str, requested: RecordedCalls) -> Iterator[Page]:
    """The opened page. At the end it must have no errors and no requests to other hosts."""
    page, strangers, errors = browser.new_page(), [], []

    def see(request: Request) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            strangers.append(request.url)
        is_json = "json" in request.headers.get("content-type", "")
        requested.append((request.url.removeprefix(address), request.post_data_json if is_json else None))

    page.on("request", see)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_default_timeout(1000 * PATIENCE)
    page.set_viewport_size({"width": 1200, "height": 900})
    page.add_init_script("try { localStorage.clear() } catch {}")
    page.goto(address)
    expect(page.locator("#model option")).to_have_count(2)
    expect(page.locator("#state")).to_have_text("3.00")
    yield page
    page.close()
    assert strangers == []
    assert errors == []


@pytest.fixture
def gate(text: SingingModel) -> Iterator[threading.Event]:
    """The singing model's closed gate: an answer waits at its first tokens until a test opens the gate or stops the answer."""
    text.gate.clear()
    yield text.gate
    text.gate.set()
