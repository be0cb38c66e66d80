"""Conversations through two replicas of which one is killed again and again, or replaced, or whose front is killed: every answer that
comes, and every state in the end, is the one of a server that no one disturbs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from trial_server import Server, serving

N_SESSIONS, N_KILLS, N_TOKENS = 4, 8, 400
READY_SECONDS = 200


def ask(i: int, session: str) -> dict[str, Any]:
    more = {"max_tokens": N_TOKENS, "ignore_eos": True, "logprobs": 1}
    return {"session": session, "prompt": f"turn {i} ", "seed": i, **more}


class Talker:
    """One conversation, by a client that knows what to do when a server is in trouble."""

    def __init__(self, address: str, id: str | None = None) -> None:
        self._address = address
        self.id = id or self._patiently("POST", "/v1/sessions", json={}).json()["id"]
        self.answers: dict[int, Any] = {}
        """By turn. None: it was taken, but its answer lost."""

    def talk(self, first: int, goes_on: Callable[[int], bool]) -> None:
        i = first
        while goes_on(i):
            answer = self._patiently("POST", "/v1/completions", json=ask(i, self.id))
            if answer.status_code != 200:
                assert answer.json()["error"]["code"] == "answer_lost", answer.text
            self.answers[i] = answer.json()["choices"] if answer.status_code == 200 else None
            i += 1

    def state(self) -> bytes:
        return self._patiently("GET", f"/v1/sessions/{self.id}/state").content

    def _patiently(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Again after whatever says that nothing has happened."""
        while True:
            answer = httpx.request(method, f"{self._address}{path}", timeout=120, **more)
            code = "" if answer.status_code == 200 else answer.json()["error"]["code"]
            if code not in ("no_replica", "replica_lost", "session_in_use", "queue_full"):
                return answer
            time.sleep(0.2)


def _children(server: Server) -> list[int]:
    pid = server.process.pid
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _wait_ready(server: Server) -> None:
    until = time.monotonic() + READY_SECONDS
    while "linnet_replicas_ready 2.0" not in httpx.get(f"{server.address}/metrics", timeout=60).text:
        assert time.monotonic() < until, "a replica did not come back"
        time.sleep(0.2)


def _kill_now_and_then(server: Server, done: threading.Event) -> None:
    """Only replicas that are at work."""
    draw = random.Random(7)
    try:
        for _ in range(N_KILLS):
            _wait_ready(server)
            time.sleep(draw.uniform(0.0, 1.5))
            os.kill(draw.choice(_children(server)), signal.SIGKILL)
        _wait_ready(server)
    finally:
        done.set()


@pytest.mark.trial
def test_killed_replicas_change_no_answer_and_no_conversation() -> None:
    with serving("--replicas", "2", slots=4) as server:
        talkers, done = [Talker(server.address) for _ in range(N_SESSIONS)], threading.Event()
        with ThreadPoolExecutor(N_SESSIONS + 1) as pool:
            killing = pool.submit(_kill_now_and_then, server, done)
            for one in [pool.submit(talker.talk, 0, lambda i: not done.is_set()) for talker in talkers]:
                one.result()
            killing.result()
        ends = {len(talker.answers): talker.state() for talker in talkers}
        assert f"linnet_replica_restarts_total {N_KILLS}.0" in httpx.get(f"{server.address}/metrics").text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
    with serving(slots=4) as alone:
        right, last = Talker(alone.address), 0
        for n in sorted(ends):
            right.talk(last, lambda i, n=n: i < n)
            assert right.state() == ends[n]
            last = n
    n_lost = 0
    for talker in talkers:
        for i, got in talker.answers.items():
            assert got in (right.answers[i], None)
            n_lost += got is None
    n_turns = [len(talker.answers) for talker in talkers]
    print(f"{N_KILLS} kills, {n_turns} turns, {n_lost} answers lost")


@pytest.mark.trial
def test_replacing_replicas_loses_no_call_and_a_killed_server_no_session(tmp_path: Path) -> None:
    n, half = 20, 10
    with serving(slots=4) as alone:
        right = Talker(alone.address)
        right.talk(0, lambda i: i < n)
        end = right.state()
    with serving("--replicas", "2", "--sessions", str(tmp_path), slots=4) as server:
        talker = Talker(server.address)
        talker.talk(0, lambda i: i < half)
        _wait_ready(server)
        old, n_calls, until = set(_children(server)), 0, time.monotonic() + READY_SECONDS
        server.process.send_signal(signal.SIGHUP)
        while old & set(_children(server)):
            fork = httpx.post(f"{server.address}/v1/sessions/{talker.id}/fork", timeout=60).json()["id"]
            answer = httpx.post(f"{server.address}/v1/completions", json=ask(half, fork), timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == right.answers[half]
            assert httpx.delete(f"{server.address}/v1/sessions/{fork}", timeout=60).status_code == 200
            n_calls += 1
            assert time.monotonic() < until, "the replicas were not replaced"
        print(f"{n_calls} calls while both replicas were replaced")
        assert n_calls >= 10
        orphans = _children(server)
        server.process.kill()
        server.process.wait()
        until = time.monotonic() + 30
        while any(Path(f"/proc/{pid}/exe").exists() for pid in orphans):
            assert time.monotonic() < until, "a replica outlived its front"
            time.sleep(0.05)
    with serving("--sessions", str(tmp_path), slots=4) as server:
        again = Talker(server.address, talker.id)
        again.talk(half, lambda i: i < n)
        assert talker.answers | again.answers == right.answers
        assert again.state() == end
