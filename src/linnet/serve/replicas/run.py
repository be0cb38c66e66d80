"""Runs the front and its replicas from startup to shutdown."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from linnet.serve.http.lifecycle import DrainingServer, Lifecycle, check_host, check_port, log_json, server_config
from linnet.serve.http.limits import Limits
from linnet.serve.replicas.fleet import Fleet, ReplicaStartError
from linnet.serve.replicas.front import make_front
from linnet.serve.replicas.upstream import get_json


def run_front(
    command: Callable[[int, Path], Sequence[str]],
    n: int,
    *,
    keys: Sequence[str],
    host: str,
    port: int,
    drain_seconds: float,
    sessions: Path | None,
) -> int:
    """Serve until a signal, drain, and return the exit code. `command(i, folder)` returns the command line of replica i with its
    sessions in `folder`. Without `sessions`, a temporary folder is used, and sessions end with the server."""
    check_host(host, bool(keys))
    check_port(host, port)
    log_json(sys.stderr)
    with tempfile.TemporaryDirectory(prefix="linnet-", ignore_cleanup_errors=True) as path:  # created with mode 0700
        folder = Path(path)
        session_folder = folder / "sessions" if sessions is None else sessions.resolve()
        fleet = Fleet(n, lambda number: command(number, session_folder), folder)
        return asyncio.run(_serve(fleet, keys=keys, host=host, port=port, drain_seconds=drain_seconds))


async def _serve(fleet: Fleet, *, keys: Sequence[str], host: str, port: int, drain_seconds: float) -> int:
    lifecycle = Lifecycle()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, fleet.replace_all_soon)
    try:
        if (ended_by := await _start(fleet)) is not None:
            return 128 + ended_by
        app = make_front(
            fleet,
            keys=keys,
            limits=Limits(),
            lifecycle=lifecycle,
            host=host,
            state_bytes=await _max_state_bytes(fleet),
        )
        message = f"Serving on http://{host}:{port} with {len(fleet.replicas)} replicas (Ctrl-C drains and stops)."
        print(message, file=sys.stderr, flush=True)
        await DrainingServer(server_config(app, host, port), lifecycle, drain_seconds).serve()
    except ReplicaStartError as error:
        return error.code if error.code > 0 else 1
    finally:
        await fleet.stop(drain_seconds)
    return 0


async def _start(fleet: Fleet) -> int | None:
    """Wait until the first replica is ready. If a signal arrives first, return its number."""
    loop, starting = asyncio.get_running_loop(), asyncio.create_task(fleet.start())
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        starting.cancel()

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, end, one)
    try:
        await starting
    except asyncio.CancelledError:
        if not received:
            raise
    finally:  # uvicorn installs its own handlers
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(one)
    return received[0] if received else None


async def _max_state_bytes(fleet: Fleet) -> int:
    """Maximum size of a serialized state, computed as in `Service.max_state_bytes`: only token models have states."""
    cards = (await get_json(fleet.ready[0].socket, b"/v1/models"))["data"]
    return 2 * max((card["state_bytes"] for card in cards if "n_vocab" in card), default=0)
