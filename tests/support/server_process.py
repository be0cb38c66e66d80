"""`linnet serve` as a process of its own over a tiny run, for the tests that meet it as users do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest
import tiny

from linnet.cli import main
from linnet.config import codec

TEMPLATE = {
    "beginning": "A talk.\n",
    "roles": {"user": {"prefix": "<", "suffix": ">\n"}, "assistant": {"prefix": "", "suffix": "~\n"}},
    "stop": ["~"],
}
"""The run's chat template."""


def train_tiny(folder: Path, family: Literal["vq", "moe"] = "vq") -> Path:
    cfg = tiny.config(tiny.corpus(folder), family, **{"optim.steps": 12, "train.eval_every": 0})
    codec.save(cfg, folder / "config.json")
    with pytest.raises(SystemExit) as exit:
        main(["train", str(folder / "config.json"), "--out", str(folder / "tiny"), "--quiet"])
    assert not exit.value.code
    (folder / "tiny" / "chat_template.json").write_text(json.dumps(TEMPLATE))
    return folder / "tiny"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def serving(
    run: Path, *flags: str, beside: Sequence[Path] = (), keys: str = ""
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    port = free_port()
    program = str(Path(sys.executable).with_name("linnet"))
    command = [program, "serve", str(run), *map(str, beside), "--port", str(port), "--slots", "2", *flags]
    environment = {**os.environ, "LINNET_API_KEYS": keys}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            try:
                if httpx.get(f"{address}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                if process.poll() is not None:
                    pytest.fail(f"the server ended: {process.stderr and process.stderr.read()}")
            time.sleep(0.1)
        yield address, process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
