"""The playground with text in a real browser: shading and alternatives, controls, stop, forks, sessions and the meter."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
from playground_page import (
    RecordedCalls,
    answer,
    context_length,
    expected_verse,
    needs_browser,
    new_session,
    run,
    wait_until_finished,
)
from playground_server import N_GATED_TOKENS, VERSE, SingingModel
from playwright.sync_api import Page, Route, expect
from waiting import PATIENCE, until

pytestmark = needs_browser
N_FIRST = len("The linnet sings: ")


def test_text_streams_with_shading_and_alternatives(
    page: Page, requested: RecordedCalls, gate: threading.Event
) -> None:
    page.fill("#f-max_tokens", "60")
    page.fill("#prompt", "")
    page.click("#run")
    expect(page.locator("#answer")).to_have_class(re.compile("running"))
    expect(page.locator("#ctx")).to_have_text(str(N_GATED_TOKENS))
    assert page.is_enabled("#stop")
    gate.set()
    wait_until_finished(page)
    assert context_length(page) == 60
    assert answer(page) == expected_verse(0, 60)
    shades = page.locator("#output .tok").evaluate_all("nodes => nodes.map(n => getComputedStyle(n).backgroundColor)")
    assert len(set(shades)) > 10
    page.hover("#output .tok >> nth=4")
    expect(page.locator("#alternatives li")).to_have_count(8)
    assert page.inner_text("#alternatives .what code") == expected_verse(4, 1)
    chances = [float(text.split()[-1].rstrip("%")) for text in page.locator("#alternatives li").all_inner_texts()]
    assert chances == sorted(chances, reverse=True)
    assert requested.bodies("/v1/completions")[-1]["logprobs"] == 8
    page.mouse.move(2, 2)
    expect(page.locator("#alternatives")).to_be_hidden()


def test_bytes_of_a_character_are_grouped(page: Page) -> None:
    run(page, "", max_tokens=len(VERSE.encode()))
    assert answer(page) == VERSE
    assert page.locator("#output .tok").count() == len(VERSE)
    page.click("#output .tok:text-is('🐦')")
    assert page.locator("#alternatives .bytes button").all_inner_texts() == ["F0", "9F", "90", "A6"]
    page.click("#alternatives .bytes button:nth-child(3)")
    assert page.inner_text("#alternatives li button[aria-current=true] code") == "90"


def test_trailing_spaces_are_kept(page: Page) -> None:
    run(page, "x" + " " * 400, max_tokens=3)
    right = page.evaluate("document.querySelector('#output').getBoundingClientRect().right")
    prompt_right = page.evaluate(
        "Math.max(...[...document.querySelector('#output .prompt-text').getClientRects()].map(b => b.right))"
    )
    assert prompt_right <= right


def test_every_control_reaches_the_server(page: Page, requested: RecordedCalls) -> None:
    given = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 40, "repetition_penalty": 1.2, "seed": 7}
    for name, value in given.items():
        page.fill(f"#f-{name}", str(value))
    page.fill("#f-stop", "sings\n.\\n")
    run(page, "", max_tokens=50)
    sent = requested.bodies("/v1/completions")[-1]
    assert {name: sent[name] for name in given} == given
    assert (sent["stop"], sent["max_tokens"]) == (["sings", ".\n"], 50)
    assert answer(page) == "The linnet "  # the stop string itself is shown apart, not as text
    assert "".join(page.locator("#output .tok.control").all_text_contents()) == "sings"
    assert "Complete." in page.inner_text("#status")


def test_stop_frees_the_engine(page: Page, text: SingingModel, gate: threading.Event) -> None:
    page.fill("#f-max_tokens", "3000")
    page.click("#run")
    page.locator("#output .tok").nth(3).wait_for()
    page.click("#stop")
    expect(page.locator("#status")).to_contain_text("Stopped")
    assert page.locator("#output .tok").count() <= N_GATED_TOKENS
    until(lambda: not text.running)


def test_fork_replaces_a_token_and_continues(page: Page, requested: RecordedCalls) -> None:
    run(page, "Say: ", max_tokens=12)
    output = answer(page)
    page.click("#output .tok >> nth=4")
    other = page.locator("#alternatives li button:not([aria-current=true])").first
    chosen = other.locator("code").inner_text()
    other.click()
    wait_until_finished(page)
    forked = "Say: " + output[:4] + chosen
    assert requested.bodies("/v1/completions")[-1]["prompt"] == forked == page.input_value("#prompt")
    assert answer(page) == expected_verse(len(forked), 12)
    page.click("#output .tok >> nth=2")
    page.click("#fork-here")
    assert page.input_value("#prompt") == forked + answer(page)[:3]


def test_fork_inside_a_character_sends_its_bytes(page: Page, requested: RecordedCalls) -> None:
    run(page, "", max_tokens=N_FIRST + 2)
    page.click("#output .tok:text-is('ü')")
    page.click("#alternatives .bytes button:nth-child(1)")
    page.click("#alternatives li button[aria-current=true]")  # its first byte alone: the model must finish it
    wait_until_finished(page)
    sent = requested.bodies("/v1/completions")[-1]["prompt"]
    assert bytes(id - 3 for id in sent) == b"The linnet sings: \xc3"
    assert answer(page).startswith("über")
    assert page.locator("#output .tok.chosen").inner_text() == "ü"


def test_regenerate_uses_another_seed(page: Page, requested: RecordedCalls) -> None:
    page.fill("#f-seed", "5")
    run(page, "again", max_tokens=5)
    page.click("#regenerate")
    wait_until_finished(page)
    first, second = requested.bodies("/v1/completions")
    assert (first.pop("seed"), second.pop("seed")) == (5, 6)
    assert first == second


def test_session_continues_after_save_restore_and_fork(page: Page, requested: RecordedCalls, tmp_path: Path) -> None:
    page.click("#session-new")
    expect(page.locator("#run")).to_have_text("Continue")
    run(page, "ab", max_tokens=10)
    assert answer(page) == expected_verse(2, 10)
    run(page, "cd")
    assert answer(page) == expected_verse(14, 10)
    assert page.locator("#history").inner_text().startswith("ab" + expected_verse(2, 10))
    assert context_length(page) == 24
    page.click("#regenerate")  # from the state before the answer, not after it
    wait_until_finished(page)
    assert answer(page) == expected_verse(14, 10)
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
    assert answer(page) == expected_verse(24, 6)
    page.click("#session-fork")
    expect(page.locator("#session-pick option")).to_have_count(3)
    run(page, "")
    assert answer(page) == expected_verse(30, 6)
    page.select_option("#session-pick", index=1)
    run(page, "xyz")
    assert answer(page) == expected_verse(33, 6)
    page.click("#session-delete")
    expect(page.locator("#session-pick option")).to_have_count(2)
    expect(page.locator("#run")).to_have_text("Run")


def test_page_deletes_its_temporary_sessions(page: Page, text: SingingModel) -> None:
    """A run in a session works on a copy; after leaving the page only the session itself is left."""
    text.store.all.clear()
    page.click("#session-new")
    for _ in range(3):
        run(page, "more", max_tokens=4)
        page.click("#regenerate")
        wait_until_finished(page)
    page.goto("about:blank")
    until(lambda: [session.n_tokens for session in text.store.all.values()] == [24])


def test_session_survives_stop_and_token_fork(page: Page, requested: RecordedCalls, text: SingingModel) -> None:
    page.click("#session-new")
    expect(page.locator("#run")).to_have_text("Continue")
    run(page, "ab", max_tokens=10)
    page.click("#output .tok >> nth=1")
    page.click("#alternatives li button:not([aria-current=true]) >> nth=0")
    wait_until_finished(page)
    assert answer(page) == expected_verse(4, 10)
    text.gate.clear()
    try:
        page.fill("#f-max_tokens", "500")
        page.fill("#prompt", "")
        page.click("#run")
        page.locator("#output .tok").nth(3).wait_for()
        page.keyboard.press("Escape")
        expect(page.locator("#status")).to_contain_text("Stopped")
    finally:
        text.gate.set()
    seen = answer(page)
    assert seen == expected_verse(14, len(seen.encode()))
    run(page, "!", max_tokens=4)
    assert requested.bodies("/v1/completions")[-1]["prompt"] == seen + "!"
    assert answer(page) == expected_verse(14 + len(seen.encode()) + 1, 4)


def _new_session_held_on_its_way(page: Page) -> Route:
    """The request for a new session, which reaches the server only when the test continues it."""
    stored: list[Route] = []
    page.route("**/v1/sessions", lambda route: stored.append(route))  # a built-in method cannot be a handler
    page.click("#session-new")
    end = time.monotonic() + PATIENCE
    while not stored:
        assert time.monotonic() < end, "the page did not ask for a session"
        page.wait_for_timeout(5)  # in which playwright delivers its events
    return stored[0]


def test_run_waits_for_session_creation(page: Page, text: SingingModel) -> None:
    call = _new_session_held_on_its_way(page)
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "true")
    page.fill("#f-max_tokens", "10")
    page.fill("#prompt", "ab")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    assert not text.running
    call.continue_()
    wait_until_finished(page)
    expect(page.locator("#session-about")).to_contain_text("12 tokens")
    run(page, "cd", max_tokens=10)
    assert answer(page) == expected_verse(14, 10)


def test_failed_session_creation_starts_no_run(page: Page, text: SingingModel) -> None:
    n_before = len(text.requests)
    call = _new_session_held_on_its_way(page)
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    call.abort()
    expect(page.locator("#error")).to_be_visible()
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")
    run(page, "one", max_tokens=3)
    assert len(text.requests) == n_before + 1


def test_context_grows_while_state_size_is_constant(page: Page, requested: RecordedCalls) -> None:
    new_session(page)
    seen = []
    for _ in range(3):
        run(page, "more", max_tokens=40)
        seen.append((context_length(page), page.get_attribute("#state", "data-bytes")))
    assert seen == [(44, str(3 << 20)), (88, str(3 << 20)), (132, str(3 << 20))]
    assert len(requested.bodies("/v1/models/text")) >= 6  # measured each time, not remembered
    heights = [
        {point.split(",")[1] for point in str(page.get_attribute(f"#line-{name}", "points")).split()}
        for name in ("ctx", "state")
    ]
    assert page.text_content("#ctx-unit") == "tokens"
    assert len(heights[0]) >= 3  # one a run at the least; on a busy machine tokens come together
    assert len(heights[1]) == 1


def test_meter_shows_the_context_limit(page: Page, text: SingingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "context", 5000)
    run(page, "more", max_tokens=4)
    expect(page.locator("#ctx-unit")).to_have_text(re.compile("^of 5.000 tokens$"))
    expect(page.locator("#meter-note")).to_contain_text("up to its limit")
    assert page.get_attribute("#state", "data-bytes") == str(3 << 20)
