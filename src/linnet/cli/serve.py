"""`linnet serve`."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from linnet.cli.flags import Layout
from linnet.cli.parse import parse
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import invalid

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from linnet.serve.loading import ServeSettings
    from linnet.serve.prior.served import ServedPrior
    from linnet.serve.served import ServedModel

KEYS = "LINNET_API_KEYS"
LOG_SECONDS = 5.0
"""Interval of progress lines in batch mode."""


@dataclasses.dataclass(frozen=True)
class Flags:
    layout: ClassVar[Layout] = {
        "": ("host", "port", "keys-file", "slots", "sessions", "checkpoint", "weights"),
        "capacity": ("queue", "prefix-mb", "sessions-mb", "replicas", "mesh", "drain-seconds"),
        "batch": ("batch",),
    }
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders to serve. NAME=RUN sets the model name in the API, which is otherwise the folder's name."""
    host: str = "127.0.0.1"
    """Address to bind to. An address other than loopback requires API keys."""
    port: int = 8000
    """Port to bind to. 0: any free port."""
    slots: int = 8
    """Maximum number of concurrent requests per model."""
    queue: int = 64
    """Maximum number of queued requests per model. Further requests receive status 429."""
    prefix_mb: int = 512
    """Size of the prefix cache per model, in MB. 0: no prefix cache."""
    sessions_mb: int = 4096
    """Memory for session states per model, in MB. When it is full, new sessions are refused and existing ones continue."""
    sessions: Path | None = None
    """Store sessions in this folder, so that they survive a restart and can be shared by several servers. Default: in memory."""
    replicas: int = 1
    """Number of engine processes behind the endpoint, each with its own slots. Every replica can continue every session."""
    keys_file: Path | None = None
    """File with API keys, one per line. Keys are also read from the environment variable LINNET_API_KEYS, separated by commas.
    Default: no keys."""
    drain_seconds: float = 30.0
    """Time for running requests to finish after SIGTERM, in seconds."""
    batch: tuple[Path, Path] | None = None
    """Offline batch mode: run the requests of the first file (OpenAI batch format), write the responses to the second, and
    exit. An interrupted batch is resumed. Default: serve over HTTP."""
    checkpoint: str = "best"
    """Checkpoint to load: best (by validation loss; the latest if none was evaluated), latest, or a step."""
    weights: WeightDtype = "float32"
    """Weight dtype. `linnet eval RUN --weights int8` measures the effect on the loss."""
    mesh: str = ""
    """Device mesh of each model, such as model=2 or model=2,expert=2. Default: one device."""


def serve_command(argv: list[str]) -> int:
    description = (
        "Serve runs over an OpenAI-compatible HTTP API, with sessions, diffusion priors, and a playground at /."
    )
    flags = parse(Flags, argv, "serve", description)
    if not flags.runs:
        raise invalid("RUN", "missing", "at least one run", "give the folder of a run")
    if flags.sessions_mb < 1:
        raise invalid("--sessions-mb", flags.sessions_mb, "at least 1", "use 4096")
    if flags.replicas < 1 or (flags.replicas > 1 and flags.batch is not None):
        raise invalid("--replicas", flags.replicas, "at least 1, and exactly 1 with --batch", "omit it")
    if flags.queue < flags.replicas:
        raise invalid("--queue", flags.queue, f"at least one per replica ({flags.replicas})", "use 64")
    if not 0 <= flags.port < 65536:
        raise invalid("--port", flags.port, "0 to 65535", "use 8000")
    from linnet.serve.replicas.fleet import SOCKET

    socket = os.environ.get(SOCKET)
    keys = [] if socket else _keys(flags.keys_file)
    from linnet.parallel.cluster import init_jax
    from linnet.serve.chat_template import read_template
    from linnet.serve.http.app import make_app
    from linnet.serve.http.auth import ApiKeys
    from linnet.serve.http.batch import read_lines
    from linnet.serve.http.lifecycle import Lifecycle, check_host, check_port, run, run_replica
    from linnet.serve.loading import load_model

    if socket is None:
        check_host(flags.host, bool(keys))
        if flags.batch is None:
            check_port(flags.host, flags.port)
    ApiKeys(keys)  # rejects weak keys before anything is loaded
    names = [_name(run) for run in flags.runs]
    if len({name for name, _ in names}) < len(names):
        raise invalid("RUN", " ".join(flags.runs), "runs with unique names", "name one with NAME=FOLDER")
    lines = [] if flags.batch is None else read_lines(flags.batch[0])
    templates = [read_template(folder) for _, folder in names]
    if flags.replicas > 1:
        return _replicas(argv, flags, keys)
    init_jax()
    models = [
        load_model(name, folder, template, _settings(flags), log=lambda line: print(line, file=sys.stderr))
        for (name, folder), template in zip(names, templates, strict=True)
    ]
    lifecycle = Lifecycle()
    if flags.batch is None and socket is None:
        print(f"Serving on http://{flags.host}:{flags.port} (Ctrl-C drains and stops).", file=sys.stderr, flush=True)
    app = make_app(
        models,
        keys=keys,
        lifecycle=lifecycle,
        host=None if flags.batch or socket else flags.host,
        is_replica=socket is not None,
    )
    if flags.batch is not None:
        return _batch(app, models, lines, flags)
    if socket is not None:
        run_replica(app, lifecycle, address=Path(socket), drain_seconds=flags.drain_seconds)
    else:
        run(
            app,
            lifecycle,
            host=flags.host,
            port=flags.port,
            has_keys=bool(keys),
            drain_seconds=flags.drain_seconds,
        )
    for model in models:
        model.engine.stop(within=1.0)
    return 0


def _settings(flags: Flags) -> ServeSettings:
    from linnet.serve.loading import ServeSettings

    return ServeSettings(
        checkpoint=flags.checkpoint,
        weights=flags.weights,
        mesh=flags.mesh,
        n_slots=flags.slots,
        max_waiting=flags.queue,
        prefix_bytes=flags.prefix_mb << 20,
        session_bytes=flags.sessions_mb << 20,
        session_folder=flags.sessions,
    )


def _replicas(argv: list[str], flags: Flags, keys: list[str]) -> int:
    """Run the same command for each replica, on a Unix socket and with its share of the queue. The appended flags take precedence."""
    from linnet.serve.replicas.run import run_front

    def command(number: int, sessions: Path) -> list[str]:
        queue = flags.queue // flags.replicas + (number < flags.queue % flags.replicas)
        own = ["--replicas", "1", "--queue", str(queue), "--sessions", str(sessions)]
        return [sys.executable, "-c", "from linnet.cli import main; main()", "serve", *argv, *own]

    return run_front(
        command,
        flags.replicas,
        keys=keys,
        host=flags.host,
        port=flags.port,
        drain_seconds=flags.drain_seconds,
        sessions=flags.sessions,
    )


def _batch(app: ASGIApp, models: list[ServedModel | ServedPrior], lines: list[dict[str, Any]], flags: Flags) -> int:
    import asyncio

    from linnet.serve.http.batch import run_batch

    assert flags.batch is not None
    key = next(iter(_keys(flags.keys_file)), None)
    n_workers = 2 * flags.slots * len(models)
    n_done, n_failed = asyncio.run(run_batch(app, lines, flags.batch[1], n_workers=n_workers, key=key, log=_progress()))
    for model in models:
        model.engine.stop(within=1.0)
    before = len(lines) - n_done
    print(f"{n_done} responses written to {flags.batch[1]}, {n_failed} of them errors; {before} were written earlier.")
    return 0


def _progress() -> Callable[[int, int], None]:
    """Return a callback that prints progress at intervals and at the end."""
    last = time.monotonic()

    def log(n: int, n_all: int) -> None:
        nonlocal last
        if n == n_all or time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            print(f"{n} of {n_all} requests done.", file=sys.stderr, flush=True)

    return log


def _name(run: str) -> tuple[str, Path]:
    name, equals, folder = run.partition("=")
    if equals and name and not Path(run).exists():
        return name, Path(folder)
    return Path(run).resolve().name, Path(run)


def _keys(path: Path | None) -> list[str]:
    candidates = [key.strip() for key in os.environ.get(KEYS, "").split(",")]
    if path is not None:
        try:
            candidates += [line.strip() for line in path.read_text().splitlines() if not line.startswith("#")]
        except (OSError, UnicodeDecodeError) as error:
            raise invalid("--keys-file", str(path), f"a readable text file ({error})", "check the path") from None
    keys = [key for key in candidates if key]
    if path is not None and not keys:
        raise invalid("--keys-file", str(path), "a file with at least one key", "write one key per line")
    return keys
