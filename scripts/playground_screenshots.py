"""Take the screenshots of the playground for docs/: `python scripts/playground_screenshots.py TEXT_RUN PIXEL_RUN`, or PRIOR_RUN alone.

They show Chromium on a real server with trained runs. The palette of each PNG is reduced to keep the file small.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
DOCS = Path(__file__).parent.parent / "docs"
MAX_BYTES = 150_000
WIDE, TALL, PHONE = (ViewportSize(width=w, height=h) for w, h in ((1120, 760), (1120, 880), (390, 780)))
PROMPT, TURNS = (
    "class Linnet:\n",
    ("\n    def sing(self, ", "\n    def build_nest(self, "),
)  # for the run of `linnet quickstart`


@contextlib.contextmanager
def serving(**runs: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("linnet"))
    named = [f"{name}={folder}" for name, folder in runs.items()]
    command = [program, "serve", *named, "--port", str(port), "--slots", "8" if "prior" in runs else "1"]
    process = subprocess.Popen(command, env={**os.environ, "LINNET_API_KEYS": ""}, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{address}/ready"):
                break
            time.sleep(0.2)
        if process.poll() is not None:
            raise SystemExit(f"the server exited. Fix: see the output of `{' '.join(command)}`.")
        yield address
    finally:
        process.terminate()
        process.wait()


def run(page: Page, prompt: str, n_tokens: int, seed: int) -> None:
    for field, value in (("max_tokens", n_tokens), ("temperature", 0.7), ("seed", seed)):
        page.fill(f"#f-{field}", str(value))
    page.fill("#prompt", prompt)
    page.click("#run")
    wait_until_done(page)


def wait_until_done(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text("seed", timeout=60_000)
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false", timeout=60_000)


def save_screenshot(page: Page, name: str) -> None:
    with Image.open(io.BytesIO(page.screenshot())) as shot:
        file = io.BytesIO()
        shot.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    if len(file.getvalue()) > MAX_BYTES:
        raise SystemExit(f"{name} has {len(file.getvalue())} bytes, more than {MAX_BYTES}")
    path = DOCS / f"playground_{name}.png"
    path.write_bytes(file.getvalue())
    print(f"{path.name}: {len(file.getvalue()):,} bytes")


def hover_surprise(page: Page) -> None:
    """Show the alternatives of the token with the deepest shade, among those so far to the left that the popup hides nothing else."""
    deepest = """nodes => {
        const shade = n => Number(getComputedStyle(n).backgroundColor.match(/[\\d.]+/g)[3] ?? 1);
        const rows = nodes.map((n, i) => [n.getBoundingClientRect(), n.textContent.trim() ? shade(n) : 0, i]);
        const top = rows[0][0].top;
        const near = rows.filter(([box]) => box.left > 100 && box.left < 400 && box.top > top + 30 && box.top < top + 130);
        return near.reduce((best, one) => one[1] > best[1] ? one : best)[2];
    }"""
    tokens = page.locator("#output .tok")
    tokens.nth(tokens.evaluate_all(deepest)).hover()
    expect(page.locator("#alternatives li")).to_have_count(8)
    expect(page.locator("#alternatives")).to_be_visible()


def shoot(page: Page, address: str) -> None:
    page.set_viewport_size(WIDE)
    page.emulate_media(color_scheme="light")
    page.goto(address)
    expect(page.locator("#model option")).to_have_count(2)
    page.select_option("#model", "text")
    run(page, PROMPT, 420, 3)
    hover_surprise(page)
    save_screenshot(page, "text")

    page.mouse.move(2, 2)
    page.click("#session-new")
    expect(page.locator("#run")).to_have_text("Continue")
    page.set_viewport_size(TALL)
    for i, prompt in enumerate((PROMPT, *TURNS)):
        run(page, prompt, 150, i)
    page.evaluate("scrollTo(0, 0)")
    save_screenshot(page, "meter")
    page.set_viewport_size(WIDE)

    page.emulate_media(color_scheme="dark")
    page.select_option("#session-pick", index=0)
    run(page, PROMPT, 420, 5)
    hover_surprise(page)
    save_screenshot(page, "dark")

    page.mouse.move(2, 2)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(TALL)
    page.select_option("#model", "pixels")
    page.fill("#f-temperature", "1")
    for seed in range(4):  # earlier images stay below as thumbnails
        page.fill("#f-seed", str(seed))
        page.click("#run")
        expect(page.locator("#status")).to_contain_text("Done", timeout=60_000)
        wait_until_done(page)
    # An image takes less than a second, so the page itself stops it in the middle; otherwise it would be complete in the screenshot.
    page.evaluate(
        """() => new MutationObserver(() => { if (canvas.dataset.rows >= 9) document.querySelector("#stop").click(); })
            .observe(canvas, { attributeFilter: ["data-rows"] })"""
    )
    page.fill("#f-seed", "4")
    page.click("#run")
    expect(page.locator("#status")).to_contain_text("Stopped", timeout=60_000)
    save_screenshot(page, "pixels")

    page.set_viewport_size(PHONE)
    page.select_option("#model", "text")
    run(page, PROMPT, 200, 3)
    page.evaluate("document.querySelector('#answer').scrollIntoView()")
    page.locator("#output .tok").nth(30).click()
    save_screenshot(page, "phone")


def shoot_prior(page: Page, address: str) -> None:
    page.set_viewport_size(TALL)
    page.emulate_media(color_scheme="light")
    page.goto(address)
    expect(page.locator("#run")).to_have_text("Sample")
    for name, value in {"steps": 64, "guidance": 1.5, "n": 3, "seed": 0}.items():
        page.fill(f"#p-{name}", str(value))
    page.fill("#prompt", "red heart")
    page.click("#run")
    expect(page.locator("#status")).to_contain_text("Done", timeout=60_000)
    page.mouse.move(2, 2)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    save_screenshot(page, "prior")


def main() -> None:
    runs = sys.argv[1:]
    if len(runs) not in (1, 2):
        raise SystemExit(__doc__)
    named = {"prior": runs[0]} if len(runs) == 1 else {"text": runs[0], "pixels": runs[1]}
    with serving(**named) as address, sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=flags)
        (shoot_prior if "prior" in named else shoot)(browser.new_page(), address)
        browser.close()


if __name__ == "__main__":
    main()
