"""The playground with a prior: a caption, and the nearest images during denoising."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fake_prior import FakePrior
from playground_page import RecordedCalls, needs_browser, wait_until_finished
from playground_server import SingingModel, serving
from playwright.sync_api import Page, expect
from waiting import until

pytestmark = needs_browser
N_PROGRESS = 32
"""Times that the page asks to be shown each candidate before its last step."""


@pytest.fixture(scope="module")
def prior() -> FakePrior:
    return FakePrior("prior")


@pytest.fixture(scope="module")
def address(text: SingingModel, prior: FakePrior) -> Iterator[str]:
    with serving(text, prior) as address:
        yield address


def test_nearest_images_update_and_the_best_candidate_moves_first(
    page: Page, requested: RecordedCalls, prior: FakePrior
) -> None:
    prior.pace = threading.Semaphore(0)  # the page shows each progress before the next is sent
    page.select_option("#model", "prior")
    for hidden in ("#output", "#canvas", "#sessions", "#sampling", "#memory"):
        expect(page.locator(hidden)).to_be_hidden()
    for name, value in {"steps": 40, "guidance": 2.5, "n": 4, "seed": 0}.items():
        page.fill(f"#p-{name}", str(value))
    page.evaluate(
        """() => {
            window.seen = [];
            new MutationObserver(() => seen.push([...neighbors.querySelectorAll('.row')].map(
                row => [...row.querySelectorAll('img')].map(one => one.alt).join(' '))))
                .observe(neighbors, { subtree: true, childList: true });
        }"""
    )
    page.fill("#prompt", "blue")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#neighbors .row")).to_have_count(4)
    for k in range(4 * N_PROGRESS):
        n_seen = page.evaluate("seen.length")
        prior.pace.release()
        page.wait_for_function("n => seen.length > n", arg=n_seen)
        assert k == 4 * N_PROGRESS - 1 or "Step" in page.inner_text("#status")  # after the last it may be done
    prior.pace = None
    wait_until_finished(page)
    expect(page.locator("#status")).to_contain_text("Done, 40 steps · cosine to the text 1.000, the best of 4 · seed 0")
    body = requested.bodies("/v1/priors/sample")[-1]
    assert [body[name] for name in ("input", "steps", "guidance", "n", "seed")] == ["blue", 40, 2.5, 4, 0]
    assert len({rows[0] for rows in page.evaluate("seen") if rows and rows[0]}) > 2
    best = page.locator("#neighbors .row").first
    expect(best).to_have_class("row best")
    expect(best.locator("p")).to_contain_text("Seed 2")
    expect(best.locator("img").first).to_have_attribute("alt", "blue")
    expect(best.locator("figcaption").first).to_have_text("blue1.000")
    assert page.evaluate("[...neighbors.querySelectorAll('img')].every(one => one.naturalWidth === 1)")
    page.click("#regenerate")
    wait_until_finished(page)
    assert requested.bodies("/v1/priors/sample")[-1]["seed"] == 4
    page.select_option("#model", "text")
    expect(page.locator("#neighbors")).to_be_hidden()
    expect(page.locator("#sampling")).to_be_visible()


def test_stop_and_empty_caption(page: Page, prior: FakePrior) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.select_option("#model", "prior")
    page.click("#run")
    expect(page.locator("#error")).to_contain_text("Enter a caption first.")
    page.fill("#prompt", "green")
    page.evaluate("document.querySelector('#p-steps').value = 90")
    prior.pace = threading.Semaphore(1)
    page.click("#run")
    expect(page.locator("#neighbors img").first).to_be_visible()
    page.keyboard.press("Escape")
    wait_until_finished(page)
    expect(page.locator("#status")).to_contain_text("Stopped")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select')].filter(n => !(n.getAttribute('aria-label') || n.labels?.length)).length"
    )
    assert unnamed == 0
    until(lambda: prior.requests[-1].id in prior.cancelled)
    prior.pace.release(N_PROGRESS)
    prior.pace = None
