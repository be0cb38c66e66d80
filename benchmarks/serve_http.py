"""A real server with random weights: restart, time to first token, sessions, and 64 streaming clients.

While the server is idle, the worker measures what it is compared with: raw decoding and prefill.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jax

from benchmarks.command import Output, log, run_command
from benchmarks.http_server import Server, serving
from benchmarks.worker import measure_in_subprocess
from linnet.bench import jobs
from linnet.bench.load import ANSWER, N_SLOTS, random_prompt
from linnet.bench.measure import Gemm, time_call
from linnet.bench.paired import TURNS, Rate, interleave, raw_rate
from linnet.bench.run import check_seconds, with_shape
from linnet.bench.serve import Row, at_least, at_most, format_ms, serve_table, serving_config, summarise
from linnet.bench.table import ResultTable
from linnet.bench.targets import PRESET
from linnet.config.schema import RunConfig
from linnet.models import registry
from linnet.runs.load import write_run

CLIENTS = 64
PROMPT = 512
SHARED_PROMPT, OWN_PROMPT = 2048, 8
MIN_REPETITIONS = 5
MAX_OVER_PREFILL, MAX_SESSION, MAX_RESTART = 0.015, 0.050, 10.0
"""Targets in seconds: first token after its prefill, saving or restoring a session, and restart to ready."""


def over_http(
    cfg: RunConfig, *, seconds: float, gemm_size: int, clients: int = CLIENTS, answer: int = ANSWER
) -> dict[str, Any]:
    gemm = Gemm(gemm_size)
    params, buffers = jobs.fresh_weights(cfg)
    with tempfile.TemporaryDirectory(prefix="linnet-bench-") as folder:
        run, cache = Path(folder) / "run", Path(folder) / "compiled"
        write_run(run, cfg, params, buffers)
        flags = ("--slots", str(N_SLOTS), "--queue", str(max(64, clients)))
        with serving(run, cache, *flags) as cold:
            pass
        with serving(run, cache, *flags) as server:
            n = max(MIN_REPETITIONS, round(seconds))
            figures = {
                "cold_ready_seconds": cold.ready_seconds,
                "ready_seconds": server.ready_seconds,
                **first_tokens(server, cfg, params, buffers, n),
                **sessions(server, n),
                **streams(server, cfg, clients, answer, seconds, gemm),
            }
            if _fits(cfg, SHARED_PROMPT + OWN_PROMPT):
                figures |= prefix_hits(server, n)
    return {**figures, **gemm.stats()}


def _fits(cfg: RunConfig, n: int) -> bool:
    """Return whether a prompt of `n` tokens fits into the context, with room for a few generated tokens."""
    return cfg.lm.context is None or n + 8 <= cfg.lm.context


def first_tokens(server: Server, cfg: RunConfig, params: Any, buffers: Any, n: int) -> dict[str, Any]:
    """Measure the time to first token with a new prompt each time, so that the prefix cache has no hit, and the prefill of the same
    prompt in this process while the server is idle."""
    decoder, model = cast(Any, registry.tokens(cfg.family).decoder), cast(Any, cfg.model)
    length = PROMPT if _fits(cfg, PROMPT) else cast(int, model.context) // 2
    weights = decoder.cast_weights(params)

    def read(prompt: tuple[int, ...]) -> None:
        jax.block_until_ready(decoder.prefill(weights, buffers, [model.end_id, *prompt[:-1]], model))

    read(random_prompt(length, 1))
    server.first_token_seconds(random_prompt(length, 2))
    times: list[tuple[float, float]] = []
    for i in range(n):
        prompt = random_prompt(length, 1000 + i)
        times.append((server.first_token_seconds(prompt), time_call(lambda prompt=prompt: read(prompt)).seconds))
    return {
        "prompt": length,
        "first_token_seconds": statistics.median(first for first, _ in times),
        "prefill_seconds": statistics.median(own for _, own in times),
        "over_prefill_seconds": statistics.median(first - own for first, own in times),
    }


def prefix_hits(server: Server, n: int) -> dict[str, Any]:
    """Measure the time to first token of two prompts with the same long prefix and different ends."""
    times: list[tuple[float, float]] = []
    for i in range(n):
        shared = random_prompt(SHARED_PROMPT, 2000 + i)
        cold, hit = (server.first_token_seconds((*shared, *random_prompt(OWN_PROMPT, 10 * i + own))) for own in (1, 2))
        times.append((cold, hit))
    return {
        "prefix": SHARED_PROMPT,
        "prefix_cold_seconds": statistics.median(cold for cold, _ in times),
        "prefix_hit_seconds": statistics.median(hit for _, hit in times),
        "prefix_hit_share": statistics.median(hit / cold for cold, hit in times),
    }


def sessions(server: Server, n: int) -> dict[str, Any]:
    """Measure saving a session to bytes on the client, and restoring it."""
    session = json.loads(server.call("POST", "/v1/sessions", {})[0])["id"]
    request = {"session": session, "prompt": list(random_prompt(64, 3)), "max_tokens": 8, "ignore_eos": True}
    server.call("POST", "/v1/completions", request)
    saved, restored, data = [], [], b""
    for _ in range(n):
        data, took = server.call("GET", f"/v1/sessions/{session}/state")
        saved.append(took)
        card, took = server.call("POST", "/v1/sessions/restore", data)
        restored.append(took)
        server.call("DELETE", f"/v1/sessions/{json.loads(card)['id']}")
    return {
        "session_bytes": len(data),
        "save_seconds": statistics.median(saved),
        "restore_seconds": statistics.median(restored),
    }


def streams(server: Server, cfg: RunConfig, clients: int, answer: int, seconds: float, gemm: Gemm) -> dict[str, Any]:
    """Return the token rate of all clients relative to the `decode` job in this process. CPU time is that of the server."""
    raw = jobs.decode(with_shape(cfg, cfg.tokens.sequence_len, N_SLOTS))
    raw.compile()
    raw.run()
    client_cpu: list[float] = []

    with _clients() as process:

        def served(seconds: float) -> Rate:
            load = {"port": server.port, "server": server.process.pid, "clients": clients, "answer": answer}
            got = _measure_clients(process, load | {"seconds": seconds})
            time.sleep(0.3)  # until the server has noticed that all clients disconnected
            client_cpu.append(1e3 * got["client_cpu_seconds"] / max(got["tokens"], 1))
            return Rate(
                tokens_per_second=got["tokens_per_second"],
                tokens_per_cpu_second=got["tokens"] / max(got["server_cpu_seconds"], 1e-9),
            )

        served(0.2)
        own, share = interleave(served, lambda s: raw_rate(raw, s), each=seconds / 2, n=TURNS, gemm=gemm)
    return {
        "clients": clients,
        "http_tokens_per_second": own.tokens_per_second,
        "http_tokens_per_cpu_second": own.tokens_per_cpu_second,
        "http_share_of_raw": share.tokens_per_second,
        "http_share_of_raw_cpu": share.tokens_per_cpu_second,
        "client_cpu_ms_per_token": statistics.median(client_cpu),
    }


@contextmanager
def _clients() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.http_clients"]
    folder = Path(__file__).parents[1]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _measure_clients(process: subprocess.Popen[str], load: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(load) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the clients failed; their error is in the output above")
    return json.loads(line)


def rows(r: dict[str, Any]) -> list[Row]:
    clients = (
        f"{r['http_tokens_per_second']:,.0f} tokens / s; by the server's CPU time {r['http_share_of_raw_cpu']:.1%}; "
        f"the clients took {r['client_cpu_ms_per_token']:.3f} CPU-ms per token of the same cores"
    )
    first = f"first token {format_ms(r['first_token_seconds'])}, the prefill alone {format_ms(r['prefill_seconds'])}"
    size, cold = f"{r['session_bytes'] / 1e6:.2f} MB", f"cold {r['cold_ready_seconds']:.1f} s"
    streaming = f"HTTP with {r['clients']} streaming clients, relative to raw decoding"
    compared = [
        at_least(streaming, r["http_share_of_raw"], 0.8, clients),
        at_most(
            f"first token after prefill of {r['prompt']:,} tokens",
            r["over_prefill_seconds"],
            "ms",
            MAX_OVER_PREFILL,
            first,
        ),
        at_most("restart to ready, warm cache", r["ready_seconds"], "s", MAX_RESTART, cold),
        at_most("save a session", r["save_seconds"], "ms", MAX_SESSION, size),
        at_most("restore a session", r["restore_seconds"], "ms", MAX_SESSION, size),
    ]
    if "prefix_hit_share" in r:
        details = f"{format_ms(r['prefix_hit_seconds'])}, cold {format_ms(r['prefix_cold_seconds'])}"
        metric = f"first token with a prefix hit of {r['prefix']:,} tokens, relative to cold"
        compared.append(at_most(metric, r["prefix_hit_share"], "share", 0.1, details))
    return compared


@dataclasses.dataclass(frozen=True)
class Flags(Output):
    preset: str = PRESET
    """Preset of a model that reads bytes."""
    seconds: float = 10.0
    """Minimum time in seconds to repeat each measurement."""


def main(flags: Flags) -> tuple[dict[str, Any], ResultTable]:
    check_seconds(flags.seconds)
    cfg = serving_config(flags.preset)
    log("a server with random weights; this takes a few minutes")
    measured = measure_in_subprocess("serve-http", cfg, seconds=flags.seconds)
    result = summarise(cfg.preset, {"serve-http": measured}, rows(measured))
    return result, serve_table(result)


if __name__ == "__main__":
    run_command(Flags, "serve_http", main)
