"""The playground's page in a real browser: images, phone, dark and light mode, keyboard, errors, markup and keys."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from playground_page import (
    RecordedCalls,
    answer,
    context_length,
    expected_verse,
    needs_browser,
    run,
    wait_until_finished,
)
from playground_server import DrawingModel, SingingModel, serving
from playwright.sync_api import BrowserContext, Page, Route, expect
from waiting import PATIENCE

pytestmark = needs_browser
KEY = "a-key-for-tests"


def test_page_scrolls_with_the_text(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 500})
    page.fill("#prompt", "\n" * 9)
    page.evaluate("document.querySelector('#f-max_tokens').value = 100")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    wait_until_finished(page)
    expect(page.locator("#output .tok").last).to_be_in_viewport()


def test_images_are_drawn_row_by_row(page: Page, drawing: DrawingModel) -> None:
    drawing.pace = threading.Semaphore(0)
    page.select_option("#model", "pixels")
    expect(page.locator("#prompt")).to_be_hidden()
    page.evaluate(
        """() => {
            window.seen = [];
            const paint = canvas.getContext('2d'), alpha = y => paint.getImageData(0, y, 1, 1).data[3];
            new MutationObserver(() => seen.push([Number(canvas.dataset.rows), alpha(0), alpha(7)]))
                .observe(canvas, { attributeFilter: ['data-rows'] });
        }"""
    )
    page.click("#run")
    for n_rows in range(1, 8):
        expect(page.locator("#canvas")).to_have_attribute("data-rows", str(n_rows))
        drawing.pace.release()
    expect(page.locator("#status")).to_contain_text("Done, 8 of 8 rows")
    drawing.pace = None
    seen = page.evaluate("seen")
    assert {rows for rows, _, _ in seen} >= set(range(1, 9))
    assert all((top, bottom) == (255 * (rows > 0), 255 * (rows == 8)) for rows, top, bottom in seen)
    corners = page.evaluate(
        "[[0, 0], [7, 7]].map(([x, y]) => canvas.getContext('2d').getImageData(x, y, 1, 1).data[0])"
    )
    assert corners == [0, 255 * 189 // 192]
    assert context_length(page) == 192
    page.click("#regenerate")
    expect(page.locator("#gallery canvas")).to_have_count(1)
    wait_until_finished(page)


def test_no_horizontal_scroll_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    run(page, "A long word: " + "x" * 400, max_tokens=80)
    page.click("#output .tok >> nth=9")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    box = page.locator("#alternatives").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    page.click("#alternatives [aria-label='Next token']")
    assert page.inner_text("#alternatives .what code") == answer(page)[10].replace(" ", "␣")


def test_dark_and_light_mode(page: Page) -> None:
    def brightness() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3])

    page.emulate_media(color_scheme="light")
    assert brightness() > 600
    page.emulate_media(color_scheme="dark")
    assert brightness() < 150
    page.click("#theme")
    assert brightness() > 600
    page.emulate_media(color_scheme="light")
    page.click("#theme")
    assert brightness() < 150


def test_keyboard_operation(page: Page, requested: RecordedCalls, text: SingingModel) -> None:
    page.fill("#f-max_tokens", "9")
    page.focus("#prompt")
    page.keyboard.type("Hm ")
    page.keyboard.press("Control+Enter")
    wait_until_finished(page)
    assert answer(page) == expected_verse(3, 9)
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('tok')"):
            break
    page.keyboard.press("ArrowRight")
    expect(page.locator("#alternatives li")).to_have_count(8)
    assert page.evaluate("document.activeElement.dataset.i") == "1"
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    chosen = page.evaluate("document.activeElement.firstChild.textContent")
    page.keyboard.press("Escape")
    expect(page.locator("#alternatives")).to_be_hidden()
    assert page.evaluate("document.activeElement.dataset.i") == "1"
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait_until_finished(page)
    assert requested.bodies("/v1/completions")[-1]["prompt"] == "Hm " + expected_verse(3, 1) + chosen
    page.fill("#f-max_tokens", "3000")
    text.gate.clear()
    page.keyboard.press("Control+Enter")
    page.locator("#output .tok").nth(3).wait_for()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_contain_text("Stopped")
    text.gate.set()


def test_server_errors_are_shown_as_text(page: Page, tmp_path: Path) -> None:
    run(page, "fine", max_tokens=5)
    kept = answer(page)
    page.fill("#f-max_tokens", "99999999")
    page.click("#run")
    expect(page.locator("#error")).to_contain_text("max_tokens")
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")
    assert answer(page) == kept  # the answer before is not lost
    page.click("#error button")
    expect(page.locator("#error")).to_be_hidden()
    page.fill("#f-max_tokens", "9")
    page.fill("#prompt", "BOOM")  # fails in the middle of the stream
    page.click("#run")
    expect(page.locator("#error")).to_contain_text("the batch failed")
    assert len(answer(page)) == 3
    wait_until_finished(page)  # the error is shown before the run has ended, and no session is restored during a run
    broken = tmp_path / "<b>broken.safetensors"
    broken.write_bytes(b"nonsense")
    page.set_input_files("#session-file", broken)
    expect(page.locator("#error")).to_contain_text("damaged")


def test_file_chosen_during_a_run_is_an_error(page: Page, text: SingingModel, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    state.write_bytes(b"nonsense")
    text.gate.clear()
    page.click("#run")
    page.locator("#output .tok").nth(3).wait_for()
    page.set_input_files("#session-file", state)
    expect(page.locator("#error")).to_contain_text("A run or a change of session is in progress")
    text.gate.set()
    wait_until_finished(page)


def test_model_output_is_not_rendered_as_markup(page: Page) -> None:
    page.click("#session-new")
    for _ in range(2):
        run(page, "<img src=x onerror=alert(1)>", max_tokens=3)
    assert page.locator("img").count() == 0
    assert "<img" in page.inner_text("#history")
    source = page.content()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", source)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", source)


def test_controls_have_accessible_names(page: Page) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea')].filter(n =>
            !(n.getAttribute('aria-label') || n.labels?.length || n.textContent.trim())).map(n => n.id || n.outerHTML)"""
    )
    assert nameless == []


def test_api_key_is_requested_only_if_needed(browser: BrowserContext, text: SingingModel) -> None:
    with serving(text, keys=(KEY,)) as address:
        page = browser.new_page()
        page.set_default_timeout(1000 * PATIENCE)

        def with_key(route: Route) -> None:  # the page itself, as a browser gets it after its own question
            route.continue_(headers={**route.request.headers, "authorization": f"Bearer {KEY}"})

        page.route(f"{address}/", with_key)
        page.goto(f"{address}/")
        expect(page.locator("#key")).to_be_visible()
        page.fill("#key-text", "not-the-right-key")
        page.keyboard.press("Enter")
        expect(page.locator("#key-title")).to_contain_text("Invalid API key")
        page.fill("#key-text", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#model option")).to_have_count(1)
        run(page, "", max_tokens=4)
        assert answer(page) == expected_verse(0, 4)
        assert KEY not in page.content()
        page.close()
