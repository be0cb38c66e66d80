"""`linnet bench`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from linnet.cli.parse import parse

if TYPE_CHECKING:
    from linnet.bench.table import ResultTable


@dataclasses.dataclass(frozen=True)
class Flags:
    job: Annotated[
        Literal["train", "eval", "prefill", "decode", "table", "serve", "moe", "prior"], tyro.conf.Positional
    ]
    """What to measure. train, eval, prefill and decode: one program; table: all rows of docs/benchmarks.md; serve: the serving
    engine; moe: the mixture of experts with float32 and int8 weights; prior: training and sampling the diffusion prior."""
    preset: Annotated[str | None, tyro.conf.Positional] = None
    """Model to measure. Default: bench-s; bench-moe for moe, bench-prior for prior."""
    sequence_len: int | None = None
    """Sequence length in tokens (decode: context length). Default: that of the preset."""
    batch: int | None = None
    """Batch size. Default: that of the preset."""
    seconds: float = 10.0
    """Minimum time in seconds to repeat each measurement."""
    cores: int | None = None
    """Number of CPU cores to bind to. Default: all."""
    compare_cores: bool = False
    """Also measure on one core, and report the speed-up."""
    json: bool = False
    """Print one JSON object instead of text."""
    markdown: bool = False
    """table, serve, moe and prior: print a Markdown table."""


def bench_command(argv: list[str]) -> int:
    flags = parse(
        Flags, argv, "bench", "Measure speed, compile time and memory, each benchmark in a process of its own."
    )
    from linnet.bench import moe, prior, run, serve, table

    def log(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    seconds, preset = flags.seconds, flags.preset or _default_preset(flags.job)
    match flags.job:
        case "table":
            rows = run.run_table(seconds=seconds, log=log)
            print(json.dumps(rows) if flags.json else table.to_markdown(table.throughput_table(rows)))
        case "moe":
            result = moe.run_moe(preset, seconds=seconds, log=log)
            print(json.dumps(result) if flags.json else table.to_markdown(moe.moe_table(result)))
        case "serve":
            result = serve.run_serve(preset, seconds=seconds, log=log)
            _show(flags, result, serve.serve_table(result))
        case "prior":
            result = prior.run_prior(preset, seconds=seconds, log=log)
            _show(flags, result, prior.prior_table(result))
        case _:
            result = run.run_bench(
                flags.job,
                preset,
                sequence_len=flags.sequence_len,
                batch=flags.batch,
                seconds=seconds,
                cores=flags.cores,
                compare_cores=flags.compare_cores,
            )
            _show(flags, result, None)
    return 0


def _default_preset(job: str) -> str:
    from linnet.bench.targets import MOE_PRESET, PRESET, PRIOR_PRESET

    return {"moe": MOE_PRESET, "prior": PRIOR_PRESET}.get(job, PRESET)


def _show(flags: Flags, result: dict[str, Any], shown: ResultTable | None) -> None:
    from rich.console import Console

    from linnet.bench import table

    if flags.json:
        print(json.dumps(result))
    elif shown is None:
        Console().print(table.metrics_table(result))
    else:
        print(table.to_markdown(shown)) if flags.markdown else Console().print(table.to_rich(shown))
