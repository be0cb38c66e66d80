"""`linnet bench serve`: all serving benchmarks, each in its own process, compared with their targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from linnet.bench.run import CONTEXT, check_seconds, measure_apart, sized
from linnet.bench.targets import GEMM_SIZE, PRESET
from linnet.config import presets
from linnet.config.schema import RunConfig
from linnet.core.errors import invalid
from linnet.core.special_tokens import N_BYTE_IDS

JOBS = {
    "serve-engine": "the engine beside raw decoding",
    "serve-http": "a real server: restart, first tokens, sessions, 64 streaming clients",
    "serve-pause": "others while a prompt of 32,768 tokens is read",
    "serve-context": "decoding after 65,536 tokens beside 1,024",
}
UNBOUNDED = ("serve-pause", "serve-context")
"""Jobs that need an unbounded context."""
LONGEST_OVER_PREFILL, LONGEST_SESSION, LONGEST_RESTART = 0.015, 0.050, 10.0
Unit = Literal["share", "times", "chunks", "ms", "s"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One metric with its target."""

    what: str
    value: float
    unit: Unit
    target: float
    at_least: bool
    """Whether the target is a minimum; otherwise it is a maximum."""
    also: bool = True
    """A further condition that must hold."""
    told: str
    """Details of the measurement."""

    @property
    def reached(self) -> bool:
        return self.also and (self.value >= self.target if self.at_least else self.value <= self.target)


def run_serve(
    preset: str | RunConfig = PRESET,
    *,
    seconds: float = 10.0,
    gemm_size: int = GEMM_SIZE,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    cfg = presets.get(preset) if isinstance(preset, str) else preset
    check_seconds(seconds)
    if cfg.writer.n_vocab != N_BYTE_IDS:
        needs = f"a preset that reads bytes ({N_BYTE_IDS} ids): fresh weights come without a tokenizer"
        raise invalid("PRESET", f"{cfg.preset} ({cfg.writer.n_vocab} ids)", needs, f"use {PRESET}")
    room = cfg.writer.context
    cfg = sized(cfg, CONTEXT if room is None else min(CONTEXT, room // 2), 1)
    results: dict[str, dict[str, Any]] = {}
    for job, words in JOBS.items():
        if room is not None and job in UNBOUNDED:
            say(f"{words}: left out, for model.context is {room}")
            continue
        say(words)
        results[job] = measure_apart(job, cfg, seconds=seconds, gemm_size=gemm_size)
    return summarise(cfg.preset, results)


def summarise(preset: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    latest = list(results.values())[-1]
    where = {name: latest[name] for name in ("date", "commit", "machine", "cores")}
    gemm = {job: one["gemm_gflops_per_cpu_second"] for job, one in results.items()}
    told = [{**dataclasses.asdict(row), "reached": row.reached} for row in rows(results)]
    return {"job": "serve", "preset": preset, "rows": told, "gemm": gemm, "figures": results, **where}


def rows(results: dict[str, dict[str, Any]]) -> list[Row]:
    found: list[Row] = []
    if "serve-engine" in results:
        found += _engine(results["serve-engine"])
    if "serve-http" in results:
        found += _http(results["serve-http"])
    if "serve-pause" in results:
        found += _pause(results["serve-pause"])
    if "serve-context" in results:
        found += _context(results["serve-context"])
    return found


def _engine(r: dict[str, Any]) -> list[Row]:
    told = f"{r['tokens_per_second']:,.0f} tokens / s; by CPU time {r['share_of_raw_cpu']:.1%}"
    return [_least("engine, 8 slots, of raw decode", r["share_of_raw"], 0.9, told)]


def _http(r: dict[str, Any]) -> list[Row]:
    clients = (
        f"{r['http_tokens_per_second']:,.0f} tokens / s; by the server's CPU time {r['http_share_of_raw_cpu']:.1%}; "
        f"the clients took {r['client_cpu_ms_per_token']:.3f} CPU-ms a token of the same cores"
    )
    first = f"first token {_ms(r['first_token_seconds'])}, the prefill alone {_ms(r['prefill_seconds'])}"
    size = f"{r['session_bytes'] / 1e6:.2f} MB"
    found = [
        _least(f"HTTP, {r['clients']} clients streaming, of raw decode", r["http_share_of_raw"], 0.8, clients),
        _most(
            f"first token over prefill, {r['prompt']:,} tokens",
            r["over_prefill_seconds"],
            "ms",
            LONGEST_OVER_PREFILL,
            first,
        ),
        _most(
            "restart to ready, warm cache",
            r["ready_seconds"],
            "s",
            LONGEST_RESTART,
            f"cold {r['cold_ready_seconds']:.1f} s",
        ),
        _most("save a session", r["save_seconds"], "ms", LONGEST_SESSION, size),
        _most("restore a session", r["restore_seconds"], "ms", LONGEST_SESSION, size),
    ]
    if "prefix_hit_share" in r:
        told = f"{_ms(r['prefix_hit_seconds'])}, cold {_ms(r['prefix_cold_seconds'])}"
        what = f"first token, prefix hit of {r['prefix']:,} tokens, of cold"
        found.append(_most(what, r["prefix_hit_share"], "share", 0.1, told))
    return found


def _pause(r: dict[str, Any]) -> list[Row]:
    longest = (
        f"longest gap {_ms(r['longest_seconds'])} (undisturbed: median {_ms(r['idle_median_seconds'])}, longest "
        f"{_ms(r['idle_longest_seconds'])}); a chunk {_ms(r['chunk_seconds'])}"
    )
    p95 = f"{_ms(r['p95_seconds'])}, undisturbed {_ms(r['idle_p95_seconds'])}; read in {r['admission_seconds']:.1f} s"
    during = f"while {r['prompt']:,} tokens are read"
    return [
        _most(
            f"others' longest gap {during}, over that of as long a time without",
            r["pause_in_chunks"],
            "chunks",
            2.0,
            longest,
        ),
        _most(f"others' p95 between deliveries {during}", r["p95_over_idle"], "times", 3.0, p95),
    ]


def _context(r: dict[str, Any]) -> list[Row]:
    equal = r["state_bytes"] == r["near_state_bytes"]
    told = (
        f"{r['tokens_per_cpu_second']:,.0f} tokens / CPU-s; by the wall clock {r['share_of_near']:.1%}; state "
        f"{r['state_bytes']:,} and {r['near_state_bytes']:,} bytes"
    )
    what = f"decode at a context of {r['context']:,}, of 1,024 (by CPU time)"
    return [dataclasses.replace(_least(what, r["share_of_near_cpu"], 0.95, told), also=equal)]


def _least(what: str, value: float, target: float, told: str) -> Row:
    return Row(what=what, value=value, unit="share", target=target, at_least=True, told=told)


def _most(what: str, value: float, unit: Unit, target: float, told: str) -> Row:
    return Row(what=what, value=value, unit=unit, target=target, at_least=False, told=told)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


COLUMNS = ("what", "measured", "to reach", "reached", "how it came about")


def cells(row: dict[str, Any]) -> Sequence[str]:
    bound = "at least" if row["at_least"] else "at most"
    verdict = "yes" if row["reached"] else "no"
    return (
        row["what"],
        in_unit(row["value"], row["unit"]),
        f"{bound} {in_unit(row['target'], row['unit'])}",
        verdict,
        row["told"],
    )


def in_unit(value: float, unit: Unit) -> str:
    match unit:
        case "share":
            return f"{value:.1%}"
        case "times":
            return f"{value:.2f}x"
        case "chunks":
            return f"{value:.2f} chunks"
        case "ms":
            return _ms(value)
        case "s":
            return f"{value:.1f} s"
