"""`linnet serve --replicas 2` end to end: one server, bit-identical, whichever replica answers or dies."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import serving

from linnet.cli import main

SEEDS = range(6)
N_LONG = 5000
"""Tokens that take long enough to be killed among them."""


class Fleet:
    """The server's process and its replicas."""

    def __init__(self, address: str, process: subprocess.Popen[str]) -> None:
        self.address, self.process = address, process

    def pids(self) -> dict[int, int]:
        """Return the process ids of the ready replicas by number."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        sockets = {}
        for pid in children:
            found = re.search(rb"LINNET_REPLICA_SOCKET=[^\0]*/(\d+)\.sock", Path(f"/proc/{pid}/environ").read_bytes())
            if found is not None:
                sockets[int(pid)] = int(found[1])
        # They were started in this order, and only replica 0 or 1 is ever killed once: the newest of two is the one that came anew.
        return dict(enumerate(sorted(sockets, key=lambda pid: sockets[pid])))

    def counts(self, name: str) -> dict[str, float]:
        text = httpx.get(f"{self.address}/metrics", timeout=30).text
        found = re.findall(rf'^{name}{{.*?replica="(\d+)".*?}} (\S+)$', text, re.MULTILINE)
        return {number: float(value) for number, value in found}

    def wait_ready(self, n: int) -> None:
        until = time.monotonic() + 120
        while f"linnet_replicas_ready {n}.0" not in httpx.get(f"{self.address}/metrics", timeout=30).text:
            assert time.monotonic() < until, "a replica did not come"
            time.sleep(0.5)  # not often: each is a line in a log that no one reads


@pytest.fixture(scope="module")
def fleet(tiny_run: Path) -> Iterator[Fleet]:
    with serving(tiny_run, "--replicas", "2", "--queue", "4") as (address, process):
        found = Fleet(address, process)
        found.wait_ready(2)
        yield found
        process.send_signal(signal.SIGTERM)  # it takes its replicas and its folder along
        assert process.wait(timeout=30) == 0


def ask(address: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{address}{path}", json={"ignore_eos": True, **body}, timeout=120)


def new_session(address: str) -> str:
    return httpx.post(f"{address}/v1/sessions", json={}, timeout=30).json()["id"]


def turns(address: str, session: str, numbers: range) -> list[Any]:
    """Return texts with log-probabilities, which JSON preserves exactly."""
    told = []
    for i in numbers:
        answer = ask(address, session=session, prompt=f"turn {i} ", max_tokens=12, seed=i, logprobs=2)
        assert answer.status_code == 200, answer.text
        told.append(answer.json()["choices"])
    return told


def saved(address: str, session: str) -> bytes:
    return httpx.get(f"{address}/v1/sessions/{session}/state", timeout=30).content


@pytest.mark.slow
def test_answers_equal_a_single_servers(server: str, fleet: Fleet) -> None:
    def told(address: str, seed: int) -> tuple[Any, str]:
        requested = {"prompt": "linear time ", "max_tokens": 30, "seed": seed}
        full = ask(address, **requested, logprobs=3).json()["choices"]
        events = ask(address, **requested, stream=True).text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        text = "".join(json.loads(one[6:])["choices"][0]["text"] for one in events[:-2])
        assert text == full[0]["text"]
        return full, text

    assert [told(fleet.address, seed) for seed in SEEDS] == [told(server, seed) for seed in SEEDS]
    assert min(fleet.counts("linnet_completion_tokens_total").values()) > 0, "both have answered"


def until_replicas_alternate(fleet: Fleet) -> None:
    """Call until two calls in a row are answered by different replicas: one restarted by another test gets more at first."""
    while True:
        counts = [fleet.counts("linnet_completion_tokens_total")]
        for _ in range(2):
            ask(fleet.address, prompt="even ", max_tokens=1)
            counts.append(fleet.counts("linnet_completion_tokens_total"))
        first, second = ({i for i in "01" if b.get(i, 0) > a.get(i, 0)} for a, b in itertools.pairwise(counts))
        if first != second:
            return


def test_session_continues_on_any_replica(server: str, fleet: Fleet) -> None:
    straight, moving = new_session(server), new_session(fleet.address)
    until_replicas_alternate(fleet)
    before = fleet.counts("linnet_completion_tokens_total")
    assert turns(fleet.address, moving, range(6)) == turns(server, straight, range(6))
    after = fleet.counts("linnet_completion_tokens_total")
    assert [after[one] - before.get(one, 0) for one in "01"] == [36, 36], "every second turn was the other's"
    assert saved(fleet.address, moving) == saved(server, straight)
    fork = httpx.post(f"{fleet.address}/v1/sessions/{moving}/fork", timeout=30).json()["id"]
    assert turns(fleet.address, fork, range(6, 8)) == turns(server, straight, range(6, 8))


def test_session_allows_one_call_at_a_time_over_all_replicas(server: str, fleet: Fleet) -> None:
    async def together(session: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"session": session, "prompt": "x", "max_tokens": 3000, "seed": 1, "ignore_eos": True}
            calls = [client.post(f"{fleet.address}/v1/completions", json=body) for _ in range(4)]
            return list(await asyncio.gather(*calls))

    session = new_session(fleet.address)
    answers = asyncio.run(together(session))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    alone = new_session(server)
    want = ask(server, session=alone, prompt="x", max_tokens=3000, seed=1).json()["choices"]
    (got,) = [answer.json()["choices"] for answer in answers if answer.status_code == 200]
    assert got == want
    assert turns(fleet.address, session, range(2)) == turns(server, alone, range(2))


def test_queue_limit_is_shared(fleet: Fleet) -> None:
    """Two replicas of two slots, and a queue of four in total."""

    async def flood() -> list[int]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=40)) as client:
            body = {"prompt": "x", "max_tokens": 3000, "seed": 1, "ignore_eos": True}
            calls = [client.post(f"{fleet.address}/v1/completions", json=body) for _ in range(24)]
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    statuses = asyncio.run(flood())
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 6, "no replica stood idle while the other was full"


@pytest.mark.slow
def test_killed_replica_loses_no_completed_answer(server: str, fleet: Fleet) -> None:
    """One kill during answers tests everything: a stream gets an error, other calls are retried, the session continues."""
    straight, moving = new_session(server), new_session(fleet.address)
    assert turns(fleet.address, moving, range(2)) == turns(server, straight, range(2))
    long = {"prompt": "a long one ", "max_tokens": N_LONG, "seed": 5, "ignore_eos": True}
    want = ask(server, **long).json()["choices"]

    async def kill_in_mid_answer() -> list[str]:
        url = f"{fleet.address}/v1/completions"
        async with httpx.AsyncClient(timeout=120) as client:
            in_session = {**long, "max_tokens": 10 * N_LONG, "session": moving, "stream": True}
            async with client.stream("POST", url, json=in_session) as stream:
                lines = stream.aiter_lines()
                told = [await anext(lines)]
                (number,) = [number for number, n in fleet.counts("linnet_replica_calls").items() if n]
                doomed = fleet.pids()[int(number)]
                os.kill(doomed, signal.SIGSTOP)  # nothing that it has can end before it is killed
                # Three more make two on each; were the other so quick that it took them one by one, there are more.
                full = [asyncio.create_task(client.post(url, json=long)) for _ in range(3)]
                await asyncio.sleep(0.2)
                while (await asyncio.to_thread(fleet.counts, "linnet_replica_calls"))[number] < 2:
                    full.append(asyncio.create_task(client.post(url, json=long)))
                os.kill(doomed, signal.SIGKILL)
                told += [line async for line in lines if line]
            answers = [await one for one in full]
        assert {answer.status_code for answer in answers} == {200}
        assert [answer.json()["choices"] for answer in answers] == [want] * len(full)
        return told

    told = asyncio.run(kill_in_mid_answer())
    assert json.loads(told[-1][6:])["error"]["code"] == "replica_lost"
    # The turn that was cut short did not count, and the session is free.
    assert turns(fleet.address, moving, range(2, 4)) == turns(server, straight, range(2, 4))
    fleet.wait_ready(2)
    assert turns(fleet.address, moving, range(4, 6)) == turns(server, straight, range(4, 6))
    assert saved(fleet.address, moving) == saved(server, straight)
    text = httpx.get(f"{fleet.address}/metrics", timeout=30).text
    assert "linnet_replica_restarts_total 1.0" in text
    assert 'status="499"' not in text, "nobody went away"


def test_invalid_flags_are_rejected(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for flags, words in (
        (["--replicas", "0"], "--replicas"),
        (["--replicas", "2", "--batch", "a", "b"], "--replicas"),
        (["--replicas", "3", "--queue", "2"], "--queue"),
        (["--replicas", "2", "--host", "0.0.0.0"], "API key"),
    ):
        with pytest.raises(SystemExit) as exit:
            main(["serve", str(tiny_run), *flags])
        assert exit.value.code == 2
        assert words in capsys.readouterr().err
