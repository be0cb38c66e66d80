"""More asked than can be done: the excess is rejected at once, and costs those who are served nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
import time
from collections import Counter

import pytest
from trial_server import Answer, Client, Server, asking, serving, shared_server

MB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Flood:
    answers: dict[int, Answer]
    tokens_a_second: float
    """Of answers that all finished, from when everyone had come to when the last request was sent."""

    def seconds(self, status: int) -> list[float]:
        return sorted(answer.seconds for answer in self.answers.values() if answer.status == status)

    @property
    def statuses(self) -> Counter[int]:
        return Counter(answer.status for answer in self.answers.values())


async def _flood(server: Server, n: int, at_once: int, n_tokens: int, come_seconds: float = 1.0) -> Flood:
    """Clients that come within a second, ask one thing after the other, and wait as long as the server says, like ours do."""
    left, n_sent = iter(range(n)), 0
    answers: dict[int, Answer] = {}
    rest = random.Random(0)

    async def one(place: int) -> None:
        nonlocal n_sent
        await asyncio.sleep(come_seconds * place / at_once)
        async with Client(server.port) as client:
            for i in left:
                n_sent += 1
                answer = await client.ask(asking(n_tokens, i))
                assert i not in answers
                answers[i] = answer
                if answer.status == 429:
                    await asyncio.sleep(float(answer.headers["retry-after"]) * (1 + rest.random()))

    clients = [asyncio.create_task(one(place)) for place in range(at_once)]
    await asyncio.sleep(come_seconds)
    first = (time.perf_counter(), await asyncio.to_thread(_n_produced, server))
    while n_sent < n:
        await asyncio.sleep(0.02)
    last = (time.perf_counter(), await asyncio.to_thread(_n_produced, server))
    await asyncio.gather(*clients)
    return Flood(answers, (last[1] - first[1]) / (last[0] - first[0]))


def _n_produced(server: Server) -> float:
    return server.stats()["tokens_total"]


def _check(server: Server, flood: Flood, n: int, n_tokens: int) -> None:
    """Everyone got one answer: the right one, or a rejection that says when to come again."""
    assert sorted(flood.answers) == list(range(n))
    assert set(flood.statuses) <= {200, 429}, flood.statuses
    for answer in flood.answers.values():
        body = answer.json()
        if answer.status == 200:
            assert body["usage"]["completion_tokens"] == n_tokens
            assert body["choices"][0]["finish_reason"] == "length"
        else:
            assert int(answer.headers["retry-after"]) >= 1
            assert body["error"]["code"] == "queue_full"
    served = [i for i, answer in flood.answers.items() if answer.status == 200]
    again = asyncio.run(_alone(server, served[:: max(1, len(served) // 10)], n_tokens))
    for i, text in again.items():
        assert flood.answers[i].json()["choices"][0]["text"] == text, f"request {i} is not what it is alone"
    assert server.n_busy() == 0


async def _alone(server: Server, seeds: list[int], n_tokens: int) -> dict[int, str]:
    async with Client(server.port) as client:
        return {i: (await client.ask(asking(n_tokens, i))).json()["choices"][0]["text"] for i in seeds}


def test_small_flood_is_answered_or_gets_429() -> None:
    n, n_tokens, server = 120, 100, shared_server()
    flood = asyncio.run(_flood(server, n, 100, n_tokens, come_seconds=0.1))
    _check(server, flood, n, n_tokens)
    assert flood.statuses[429], "it was no flood"
    rejected = sorted(line["seconds"] for line in server.log_lines() if line.get("status") == 429)
    assert len(rejected) == flood.statuses[429]
    assert rejected[len(rejected) // 2] < 0.05


@pytest.mark.trial
def test_thousand_requests_at_two_hundred_at_once_do_not_slow_admitted_ones() -> None:
    n, at_once, n_tokens = 1000, 200, 256
    with serving("--queue", "32", slots=8) as server:
        asyncio.run(_flood(server, 100, 36, n_tokens))  # memory that is taken once
        rates, rejected, statuses = [], [], Counter[int]()
        before = server.rss()
        for _ in range(5):  # in turns, so that a neighbour on the machine disturbs both alike
            full = asyncio.run(_flood(server, 400, 36, n_tokens))
            assert full.statuses == {200: 400}
            flood = asyncio.run(_flood(server, n, at_once, n_tokens))
            _check(server, flood, n, n_tokens)
            rates.append((full.tokens_a_second, flood.tokens_a_second))
            rejected += flood.seconds(429)
            statuses = flood.statuses
        grown = server.rss() - before
    rejected.sort()
    goodput = statistics.median(flooded / undisturbed for undisturbed, flooded in rates)
    p99 = rejected[int(0.99 * (len(rejected) - 1))]
    print(
        f"{statuses}, goodput {goodput:.1%} of undisturbed tokens/s ({rates}), 429 in"
        f" {1e3 * rejected[len(rejected) // 2]:.1f} ms, p99 {1e3 * p99:.1f}, most {1e3 * rejected[-1]:.1f}; {grown / MB:.1f} MB more"
    )
    assert statuses[429] > 300, "it was no flood"
    assert grown < 100 * MB
    assert goodput > 0.95
    assert p99 < 0.05
