"""Replica processes: start, death, hang, replacement, and shutdown with the server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fake_replicas import ready_command

from linnet.core.errors import UserError
from linnet.serve.replicas import fleet as fleets
from linnet.serve.replicas import upstream
from linnet.serve.replicas.fleet import Fleet, Replica, ReplicaStartError
from linnet.serve.replicas.run import run_front


def with_fleet(what: Callable[[Fleet], Awaitable[None]], folder: Path, n: int = 2) -> None:
    async def run() -> None:
        fleet = Fleet(n, ready_command, folder)
        try:
            async with asyncio.timeout(30):
                await fleet.start()
                await what(fleet)
        finally:
            await fleet.stop(0)
        assert all(one.process.returncode is not None for one in fleet.ready)

    asyncio.run(run())


async def all_ready(fleet: Fleet) -> list[Replica]:
    while len(fleet.ready) < len(fleet.replicas):
        await asyncio.sleep(0.02)
    return fleet.ready


def test_dead_replica_is_restarted_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def kill(fleet: Fleet) -> None:
        old = await all_ready(fleet)
        os.kill(old[0].process.pid, signal.SIGKILL)
        while fleet.replicas[0] is old[0]:
            await asyncio.sleep(0.02)
        assert fleet.choose() is old[1]
        new = await all_ready(fleet)
        assert new[0].process.pid != old[0].process.pid
        assert new[1] is old[1]
        assert fleet.n_restarts == 1

    with_fleet(kill, tmp_path)
    assert "Replica 0 was killed by SIGKILL; restarting in" in capsys.readouterr().err


def test_failed_start_returns_the_replicas_exit_code(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = Fleet(2, lambda number: [sys.executable, "-c", "raise SystemExit(2)"], tmp_path)
        with pytest.raises(ReplicaStartError) as error:
            await fleet.start()
        assert error.value.code == 2
        await fleet.stop(0)

    asyncio.run(run())


def test_hung_replica_is_avoided_then_killed_and_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "GET_SECONDS", 0.3)
    monkeypatch.setattr(fleets, "PROBE_SECONDS", 0.05)

    async def stop(fleet: Fleet) -> None:
        still, other = await all_ready(fleet)
        other.n_running = 3
        assert fleet.choose() is still, "it has the fewest calls"
        os.kill(still.process.pid, signal.SIGSTOP)
        while not still.n_missed:
            await asyncio.sleep(0.02)
        assert fleet.choose() is other
        assert fleet.choose([other]) is still, "better than nobody"
        while fleet.replicas[0] is still:
            await asyncio.sleep(0.02)
        await all_ready(fleet)
        assert fleet.n_restarts == 1

    with_fleet(stop, tmp_path)
    reported = capsys.readouterr().err
    assert "Replica 0 hangs: it missed 4 health probes and is killed." in reported
    assert "Replica 0 was killed by SIGKILL" in reported


def test_late_health_response_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(upstream, "GET_SECONDS", 0.3)
    monkeypatch.setattr(fleets, "PROBE_SECONDS", 0.05)

    async def pause(fleet: Fleet) -> None:
        (one,) = await all_ready(fleet)
        os.kill(one.process.pid, signal.SIGSTOP)
        while one.n_missed < 2:
            await asyncio.sleep(0.02)
        os.kill(one.process.pid, signal.SIGCONT)
        while one.n_missed:
            await asyncio.sleep(0.02)
        assert fleet.ready == [one]

    with_fleet(pause, tmp_path, n=1)
    assert not capsys.readouterr().err


def test_full_replica_is_alive(tmp_path: Path) -> None:
    async def is_full(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def requested() -> list[bool]:
        async with await asyncio.start_unix_server(is_full, str(tmp_path / "s")):
            both = [await upstream.is_alive(tmp_path / "s"), await upstream.is_ready(tmp_path / "s")]
        return [*both, await upstream.is_alive(tmp_path / "nobody")]

    assert asyncio.run(requested()) == [True, False, False]


def test_used_port_is_rejected_before_replicas_start(tmp_path: Path) -> None:
    started: list[int] = []

    def command(number: int, sessions: Path) -> list[str]:
        started.append(number)
        return ready_command(number)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match="--port"):
            run_front(command, 2, keys=(), host="127.0.0.1", port=port, drain_seconds=0, sessions=tmp_path)
    assert not started


def test_rolling_replacement_of_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def roll(fleet: Fleet) -> None:
        old = await all_ready(fleet)
        rolling = asyncio.create_task(fleet.replace_all())
        while not rolling.done():
            assert len(fleet.ready) == 2, "there are always as many as before"
            await asyncio.sleep(0.01)
        await rolling
        assert not {one.process.pid for one in old} & {one.process.pid for one in fleet.ready}
        assert [await one.process.wait() for one in old] == [0, 0], "they were let end by themselves"
        assert fleet.n_restarts == 0

    with_fleet(roll, tmp_path)
    assert "Replica 1 was replaced" in capsys.readouterr().err
