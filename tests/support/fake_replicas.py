"""Replicas for the tests of their front: apps over fake models on real Unix sockets, all in one loop; and a process that only says
that it is ready and has no models."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fake_model import FakeModel

from linnet.serve.http.app import make_app
from linnet.serve.http.lifecycle import Lifecycle
from linnet.serve.http.limits import Limits
from linnet.serve.replicas.fleet import Fleet, Replica
from linnet.serve.replicas.front import make_front

Harm = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class FakeProcess:
    """Of a replica that lives in the test's own process."""

    returncode: int | None = None
    pid = 0

    async def wait(self) -> int:
        self.returncode = -9
        return -9


class FakeFleet(Fleet):
    def __init__(self, sockets: list[Path]) -> None:
        super().__init__(len(sockets), lambda number: [], sockets[0].parent)
        self.replicas = [Replica(i, FakeProcess(), socket) for i, socket in enumerate(sockets)]  # type: ignore[arg-type]


class LocalServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def listening(replica: FakeModel | Harm, socket: Path) -> AsyncIterator[None]:
    """A whole server over a model; or one that does something else with whoever calls."""
    if not isinstance(replica, FakeModel):
        async with await asyncio.start_unix_server(replica, str(socket)):
            yield
        return
    config = uvicorn.Config(
        make_app([replica], keys=(), is_replica=True), uds=str(socket), log_config=None, access_log=False, ws="none"
    )
    server = LocalServer(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await task


@contextlib.asynccontextmanager
async def fronted(*replicas: FakeModel | Harm, **more: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeFleet]]:
    """A client of the front before these replicas."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="linnet-test-"))
        )  # a short path: it is a socket's
        sockets = [folder / f"{i}.sock" for i in range(len(replicas))]
        for replica, socket in zip(replicas, sockets, strict=True):
            await stack.enter_async_context(listening(replica, socket))
        fleet = FakeFleet(sockets)
        given = {"keys": (), "limits": Limits(), "lifecycle": Lifecycle(), "host": "127.0.0.1", "state_bytes": 1 << 20}
        transport = httpx.ASGITransport(make_front(fleet, **{**given, **more}), raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        async with asyncio.timeout(20), client:
            yield client, fleet


READY = """
import asyncio, os, sys
async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 11\\r\\n\\r\\n{\\"data\\":[]}")
    await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_unix_server(answer, os.environ["LINNET_REPLICA_SOCKET"])
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(15, end.set)
    loop.add_reader(0, end.set)
    await end.wait()
asyncio.run(main())
"""


def ready_command(number: int) -> list[str]:
    """Starts in a fraction of a second."""
    return [sys.executable, "-c", READY]
