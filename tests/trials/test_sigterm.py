"""SIGTERM while eight requests run: the probe tells, nothing new is taken, what runs ends whole, or with a word if the time is up.

Quick ones of the kind are in `serve/test_http_server.py`, `serve/test_http_connections.py` and `e2e/test_serve.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from typing import Any

import httpx
import pytest
from trial_server import Client, Server, asking, serving, text_of

N_RUNNING = 8


@dataclasses.dataclass
class Seen:
    """What others saw while the server drained."""

    not_ready: int = 0
    refused: int = 0
    health: int = 0


async def _first_then_rest(port: int, body: dict[str, Any], begun: asyncio.Event) -> list[dict[str, Any]]:
    events = []
    async with Client(port) as client:
        async for _, event in client.stream(body):
            events.append(event)
            begun.set()
    return events


async def _terminate(server: Server, n_tokens: int, seen: Seen) -> list[list[dict[str, Any]]]:
    """Streams that all had begun when the signal came, to their ends."""
    begun = [asyncio.Event() for _ in range(N_RUNNING)]
    streams = [
        asyncio.create_task(_first_then_rest(server.port, asking(n_tokens, seed), event))
        for seed, event in enumerate(begun)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    server.process.send_signal(signal.SIGTERM)
    async with httpx.AsyncClient(base_url=server.address, timeout=10) as http:
        await asyncio.sleep(0.05)
        while not all(stream.done() for stream in streams):
            try:
                ready = await http.get("/ready")
                new = await http.post("/v1/completions", json=asking(1, 0))
                health = await http.get("/health")
            except httpx.TransportError:
                break  # it has closed its door
            if ready.status_code == 503 and new.status_code == 503:
                assert new.json()["error"]["code"] == "draining"
                seen.not_ready += 1
                seen.refused += 1
                seen.health += health.status_code == 200
    return await asyncio.gather(*streams)


async def _undisturbed(server: Server, n_tokens: int) -> list[tuple[str, str | None]]:
    async def one(seed: int) -> tuple[str, str | None]:
        async with Client(server.port) as client:
            return await text_of(client, asking(n_tokens, seed))

    return await asyncio.gather(*(one(seed) for seed in range(N_RUNNING)))


def _drain(n_tokens: int) -> float:
    """Seconds from the last stream's end to the exit."""
    with serving("--drain-seconds", "60", slots=N_RUNNING) as server:
        want = asyncio.run(_undisturbed(server, n_tokens))
        seen = Seen()
        got = asyncio.run(_terminate(server, n_tokens, seen))
        end = time.monotonic()
        assert server.process.wait(timeout=30) == 0
        exit_seconds = time.monotonic() - end
    for events, (text, reason) in zip(got, want, strict=True):
        choices = [choice for event in events for choice in event["choices"]]
        assert "".join(choice["text"] for choice in choices) == text
        assert choices[-1]["finish_reason"] == reason == "length"
    assert seen.not_ready, "/ready must have been 503 while they ran"
    assert seen.refused
    assert seen.health == seen.refused, "it lives, and says so, to its end"
    return exit_seconds


def _cut(seconds: float) -> float:
    """Seconds from the signal to the exit, of a server whose requests would run far longer than it may."""
    with serving("--drain-seconds", str(seconds), slots=N_RUNNING) as server:
        start = time.monotonic()
        got = asyncio.run(_terminate(server, 60_000, Seen()))
        assert server.process.wait(timeout=30) == 0
        full = time.monotonic() - start
    for events in got:
        assert events[-1]["error"]["code"] == "cancelled", "the last event says that it is not whole"
        assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])
    return full


@pytest.mark.trial
def test_sigterm_lets_eight_long_requests_complete() -> None:
    print("exit after the last end:", _drain(20_000))


@pytest.mark.trial
@pytest.mark.parametrize("seconds", [0.1, 1.0, 3.0])
def test_drain_that_is_too_short_ends_requests_in_time(seconds: float) -> None:
    full = _cut(seconds)
    print("from the first request to the exit:", full)
    assert full < seconds + 8
