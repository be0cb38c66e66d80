"""The playground in a real browser, against the real server over a model without arithmetic."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playground_server import VERSE, DrawingModel, SingingModel, serving
from playwright.sync_api import BrowserContext, Page, Request, Route, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
KEY = "a-key-for-tests"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
N_FIRST = len("The linnet sings: ")

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists() and os.environ.get("CI") != "true",
    reason=f"the browser {CHROMIUM} is not installed; CI must have it",
)


@pytest.fixture(scope="module")
def text() -> SingingModel:
    return SingingModel("text")


@pytest.fixture(scope="module")
def address(text: SingingModel) -> Iterator[str]:
    with serving(text, DrawingModel("pixels", shape=(8, 8, 3), seconds_a_token=0.03)) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("browser"), executable_path=CHROMIUM, headless=True, args=FLAGS
        )
        yield context
        context.close()


class Asked(list[tuple[str, Any]]):
    """Every call the page made: its path and its JSON."""

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self if asked == path]


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def page(browser: BrowserContext, address: str, asked: Asked) -> Iterator[Page]:
    """Opened, ready, and at the end without an error of its own and without a call to anywhere else."""
    page, strangers, errors = browser.new_page(), [], []

    def see(request: Request) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            strangers.append(request.url)
        is_json = "json" in request.headers.get("content-type", "")
        asked.append((request.url.removeprefix(address), request.post_data_json if is_json else None))

    page.on("request", see)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_default_timeout(8000)
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
def slowly(text: SingingModel) -> Iterator[None]:
    text.seconds_a_token = 0.02
    yield
    text.seconds_a_token = 0.0


def run(page: Page, prompt: str | None = None, *, max_tokens: int | None = None) -> None:
    if max_tokens is not None:
        page.fill("#f-max_tokens", str(max_tokens))
    if prompt is not None:
        page.fill("#prompt", prompt)
    page.click("#run")
    ended(page)


def ended(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text("seed")
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")


def answer(page: Page) -> str:
    return "".join(page.locator("#paper .tok:not(.mute)").all_text_contents())


def sung(start: int, n: int) -> str:
    """What the model says when it has read `start` tokens."""
    verse = VERSE.encode()
    return bytes(verse[i % len(verse)] for i in range(start, start + n)).decode(errors="replace")


def context_length(page: Page) -> int:
    return int(page.inner_text("#ctx").replace(",", ""))


def test_text_streams_with_shades_and_alternatives(page: Page, asked: Asked, slowly: None) -> None:
    page.fill("#f-max_tokens", "60")
    page.fill("#prompt", "")
    page.click("#run")
    expect(page.locator("#answer")).to_have_class(re.compile("running"))
    page.locator("#paper .tok").nth(3).wait_for()
    assert page.is_enabled("#stop")
    early = context_length(page)
    ended(page)
    assert early < context_length(page) == 60
    assert answer(page) == sung(0, 60)
    shades = page.locator("#paper .tok").evaluate_all("nodes => nodes.map(n => getComputedStyle(n).backgroundColor)")
    assert len(set(shades)) > 10
    page.hover("#paper .tok >> nth=4")
    expect(page.locator("#pop li")).to_have_count(8)
    assert page.inner_text("#pop .what code") == sung(4, 1)
    assert asked.bodies("/v1/completions")[-1]["logprobs"] == 8
    page.mouse.move(2, 2)
    expect(page.locator("#pop")).to_be_hidden()


def test_bytes_of_one_character_are_one(page: Page) -> None:
    run(page, "", max_tokens=len(VERSE.encode()))
    assert answer(page) == VERSE
    assert page.locator("#paper .tok").count() == len(VERSE)
    page.click("#paper .tok:text-is('🐦')")
    assert page.locator("#pop .bytes button").all_inner_texts() == ["F0", "9F", "90", "A6"]
    page.click("#pop .bytes button:nth-child(3)")
    assert page.inner_text("#pop li button[aria-current=true] code") == "90"


def test_every_control_reaches_the_server(page: Page, asked: Asked) -> None:
    given = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 40, "repetition_penalty": 1.2, "seed": 7}
    for name, value in given.items():
        page.fill(f"#f-{name}", str(value))
    page.fill("#f-stop", "sings\n.\\n")
    run(page, "", max_tokens=50)
    sent = asked.bodies("/v1/completions")[-1]
    assert {name: sent[name] for name in given} == given
    assert (sent["stop"], sent["max_tokens"]) == (["sings", ".\n"], 50)
    assert answer(page) == "The linnet "  # the stop string itself is shown apart, not as text
    assert "".join(page.locator("#paper .tok.mute").all_text_contents()) == "sings"
    assert "Ended by itself" in page.inner_text("#status")


def test_the_page_follows_the_text_it_writes(page: Page, slowly: None) -> None:
    page.set_viewport_size({"width": 360, "height": 500})
    page.fill("#prompt", "\n" * 9)
    page.evaluate("document.querySelector('#f-max_tokens').value = 100")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    ended(page)
    expect(page.locator("#paper .tok").last).to_be_in_viewport()


def test_stop_frees_the_engine(page: Page, text: SingingModel, slowly: None) -> None:
    page.fill("#f-max_tokens", "3000")
    page.click("#run")
    page.locator("#paper .tok").nth(3).wait_for()
    page.click("#stop")
    expect(page.locator("#status")).to_contain_text("Stopped")
    assert page.locator("#paper .tok").count() < 300
    page.wait_for_timeout(200)
    assert not text.running


def test_fork_replaces_a_token_and_goes_on(page: Page, asked: Asked) -> None:
    run(page, "Say: ", max_tokens=12)
    said = answer(page)
    page.click("#paper .tok >> nth=4")
    other = page.locator("#pop li button:not([aria-current=true])").first
    chosen = other.locator("code").inner_text()
    other.click()
    ended(page)
    forked = "Say: " + said[:4] + chosen
    assert asked.bodies("/v1/completions")[-1]["prompt"] == forked == page.input_value("#prompt")
    assert answer(page) == sung(len(forked), 12)
    page.click("#paper .tok >> nth=2")
    page.click("#fork-here")
    assert page.input_value("#prompt") == forked + answer(page)[:3]


def test_fork_inside_a_character_sends_its_bytes(page: Page, asked: Asked) -> None:
    run(page, "", max_tokens=N_FIRST + 2)
    page.click("#paper .tok:text-is('ü')")
    page.click("#pop .bytes button:nth-child(1)")
    page.click("#pop li button[aria-current=true]")  # its first byte alone: the model must finish it
    ended(page)
    sent = asked.bodies("/v1/completions")[-1]["prompt"]
    assert bytes(id - 3 for id in sent) == b"The linnet sings: \xc3"
    assert answer(page).startswith("über")
    assert page.locator("#paper .tok.yours").inner_text() == "ü"


def test_regenerate_asks_the_same_with_another_seed(page: Page, asked: Asked) -> None:
    page.fill("#f-seed", "5")
    run(page, "again", max_tokens=5)
    page.click("#again")
    ended(page)
    first, second = asked.bodies("/v1/completions")
    assert (first.pop("seed"), second.pop("seed")) == (5, 6)
    assert first == second


def test_session_goes_on_through_save_restore_and_fork(page: Page, asked: Asked, tmp_path: Path) -> None:
    page.click("#session-new")
    expect(page.locator("#run")).to_have_text("Continue")
    run(page, "ab", max_tokens=10)
    assert answer(page) == sung(2, 10)
    run(page, "cd")
    assert answer(page) == sung(14, 10)
    assert page.locator("#history").inner_text().startswith("ab" + sung(2, 10))
    assert context_length(page) == 24
    page.click("#again")  # from the state before the answer, not after it
    ended(page)
    assert answer(page) == sung(14, 10)
    with page.expect_download() as download:
        page.click("#session-save")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert file.suffix == ".safetensors"
    page.reload()
    expect(page.locator("#model option")).to_have_count(2)
    page.set_input_files("#session-file", file)
    expect(page.locator("#session-about")).to_contain_text("24 tokens")
    run(page, "", max_tokens=6)
    assert answer(page) == sung(24, 6)
    page.click("#session-fork")
    expect(page.locator("#session-pick option")).to_have_count(3)
    run(page, "")
    assert answer(page) == sung(30, 6)
    page.select_option("#session-pick", index=1)
    run(page, "xyz")
    assert answer(page) == sung(33, 6)
    page.click("#session-delete")
    expect(page.locator("#session-pick option")).to_have_count(2)
    expect(page.locator("#run")).to_have_text("Run")


def test_the_page_leaves_no_states_behind(page: Page, text: SingingModel) -> None:
    """A run in a session works on a copy; when the page is left, only the session itself is there."""
    text.store.all.clear()
    page.click("#session-new")
    for _ in range(3):
        run(page, "more", max_tokens=4)
        page.click("#again")
        ended(page)
    page.goto("about:blank")
    page.wait_for_timeout(300)
    assert [session.n_tokens for session in text.store.all.values()] == [24]


def test_a_session_survives_a_stop_and_a_fork_from_a_token(page: Page, asked: Asked, text: SingingModel) -> None:
    page.click("#session-new")
    expect(page.locator("#run")).to_have_text("Continue")
    run(page, "ab", max_tokens=10)
    page.click("#paper .tok >> nth=1")
    page.click("#pop li button:not([aria-current=true]) >> nth=0")
    ended(page)
    assert answer(page) == sung(4, 10)
    text.seconds_a_token = 0.02
    try:
        page.fill("#f-max_tokens", "500")
        page.fill("#prompt", "")
        page.click("#run")
        page.locator("#paper .tok").nth(3).wait_for()
        page.keyboard.press("Escape")
        expect(page.locator("#status")).to_contain_text("Stopped")
    finally:
        text.seconds_a_token = 0.0
    seen = answer(page)
    assert seen == sung(14, len(seen.encode()))
    run(page, "!", max_tokens=4)
    assert asked.bodies("/v1/completions")[-1]["prompt"] == seen + "!"
    assert answer(page) == sung(14 + len(seen.encode()) + 1, 4)


def test_the_context_grows_while_the_state_stands(page: Page, asked: Asked) -> None:
    page.click("#session-new")
    seen = []
    for _ in range(3):
        run(page, "more", max_tokens=40)
        seen.append((context_length(page), page.get_attribute("#state", "data-bytes")))
    assert seen == [(44, str(3 << 20)), (88, str(3 << 20)), (132, str(3 << 20))]
    assert len(asked.bodies("/v1/models/text")) >= 6  # measured each time, not remembered
    heights = [
        {point.split(",")[1] for point in str(page.get_attribute(f"#line-{name}", "points")).split()}
        for name in ("ctx", "state")
    ]
    assert len(heights[0]) >= 3  # one a run at the least; on a busy machine tokens come together
    assert len(heights[1]) == 1


def test_pictures_are_drawn_row_by_row(page: Page) -> None:
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
    expect(page.locator("#status")).to_contain_text("Done, 8 of 8 rows")
    seen = page.evaluate("seen")
    assert len({rows for rows, _, _ in seen}) > 4
    assert all((top, bottom) == (255 * (rows > 0), 255 * (rows == 8)) for rows, top, bottom in seen)
    corners = page.evaluate(
        "[[0, 0], [7, 7]].map(([x, y]) => canvas.getContext('2d').getImageData(x, y, 1, 1).data[0])"
    )
    assert corners == [0, 255 * 189 // 192]
    assert context_length(page) == 192
    page.click("#again")
    expect(page.locator("#gallery canvas")).to_have_count(1)
    ended(page)


def test_a_phone_needs_no_sideways_scroll(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    run(page, "A long word: " + "x" * 400, max_tokens=80)
    page.click("#paper .tok >> nth=9")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    box = page.locator("#pop").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    page.click("#pop [aria-label='Token after']")
    assert page.inner_text("#pop .what code") == answer(page)[10].replace(" ", "␣")


def test_dark_and_light_by_the_system_and_by_hand(page: Page) -> None:
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


def test_everything_by_keyboard(page: Page, asked: Asked, slowly: None) -> None:
    page.fill("#f-max_tokens", "9")
    page.focus("#prompt")
    page.keyboard.type("Hm ")
    page.keyboard.press("Control+Enter")
    ended(page)
    assert answer(page) == sung(3, 9)
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('tok')"):
            break
    page.keyboard.press("ArrowRight")
    expect(page.locator("#pop li")).to_have_count(8)
    assert page.evaluate("document.activeElement.dataset.i") == "1"
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    chosen = page.evaluate("document.activeElement.firstChild.textContent")
    page.keyboard.press("Escape")
    expect(page.locator("#pop")).to_be_hidden()
    assert page.evaluate("document.activeElement.dataset.i") == "1"
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    ended(page)
    assert asked.bodies("/v1/completions")[-1]["prompt"] == "Hm " + sung(3, 1) + chosen
    page.fill("#f-max_tokens", "3000")
    page.keyboard.press("Control+Enter")
    page.locator("#paper .tok").nth(3).wait_for()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_contain_text("Stopped")


def test_the_servers_errors_are_shown_as_text(page: Page, tmp_path: Path) -> None:
    run(page, "fine", max_tokens=5)
    kept = answer(page)
    page.fill("#f-max_tokens", "99999999")
    page.click("#run")
    expect(page.locator("#problem")).to_contain_text("max_tokens")
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")
    assert answer(page) == kept  # the answer before is not lost
    page.click("#problem button")
    expect(page.locator("#problem")).to_be_hidden()
    page.fill("#f-max_tokens", "9")
    page.fill("#prompt", "BOOM")  # fails in the middle of the stream
    page.click("#run")
    expect(page.locator("#problem")).to_contain_text("the batch failed")
    assert len(answer(page)) == 3
    broken = tmp_path / "<b>broken.safetensors"
    broken.write_bytes(b"nonsense")
    page.set_input_files("#session-file", broken)
    expect(page.locator("#problem")).to_contain_text("damaged")


def test_markup_from_the_model_stays_text(page: Page) -> None:
    page.click("#session-new")
    for _ in range(2):
        run(page, "<img src=x onerror=alert(1)>", max_tokens=3)
    assert page.locator("img").count() == 0
    assert "<img" in page.inner_text("#history")
    source = page.content()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", source)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", source)


def test_controls_have_names(page: Page) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea')].filter(n =>
            !(n.getAttribute('aria-label') || n.labels?.length || n.textContent.trim())).map(n => n.id || n.outerHTML)"""
    )
    assert nameless == []


def test_a_key_is_asked_for_only_when_needed(browser: BrowserContext, text: SingingModel) -> None:
    with serving(text, keys=(KEY,)) as address:
        page = browser.new_page()
        page.set_default_timeout(8000)

        def with_key(route: Route) -> None:  # the page itself, as a browser gets it after its own question
            route.continue_(headers={**route.request.headers, "authorization": f"Bearer {KEY}"})

        page.route(f"{address}/", with_key)
        page.goto(f"{address}/")
        expect(page.locator("#key")).to_be_visible()
        page.fill("#key-text", "not-the-right-key")
        page.keyboard.press("Enter")
        expect(page.locator("#key-title")).to_contain_text("not valid")
        page.fill("#key-text", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#model option")).to_have_count(1)
        run(page, "", max_tokens=4)
        assert answer(page) == sung(0, 4)
        assert KEY not in page.content()
        page.close()
