"""`linnet bench`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from linnet.cli.parse import parse


@dataclasses.dataclass(frozen=True)
class Flags:
    job: Annotated[
        Literal["train", "eval", "prefill", "decode", "scaling", "table", "serve", "moe", "prior"], tyro.conf.Positional
    ]
    """What to measure. `scaling`: sequence lengths against a dense baseline; `table`: all rows of docs/benchmarks.md; `serve`: the
    engine and the server; `moe`: the mixture of experts with float32 and int8 weights; `prior`: training and sampling the diffusion
    prior."""
    preset: Annotated[str | None, tyro.conf.Positional] = None
    """Preset. Default: bench-s; bench-moe for `moe`, bench-prior for `prior`."""
    sequence_len: int | None = None
    """Sequence length in tokens (`decode`: context length; `scaling`: the longest sequence)."""
    batch: int | None = None
    seconds: float = 10.0
    """Minimum time in seconds to repeat each measurement."""
    cores: int | None = None
    """Number of CPU cores to bind to."""
    compare_cores: bool = False
    """Also measure on one core, and report the speed-up."""
    forward_only: bool = False
    """`scaling`: evaluation instead of training."""
    out: Path = Path("scaling.svg")
    """`scaling`: output file of the plot."""
    json: bool = False
    """Print one JSON object."""
    markdown: bool = False
    """`table`, `scaling`, `serve`, `moe` and `prior`: print a Markdown table."""


def bench_command(argv: list[str]) -> int:
    flags = parse(Flags, argv, "bench", "Measures speed, compile time and memory, each job in a process of its own.")
    from linnet.bench import moe, prior, run, scaling, serve, table

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    seconds, preset = flags.seconds, flags.preset or _usual_preset(flags.job)
    match flags.job:
        case "table":
            rows = run.run_table(seconds=seconds, say=say)
            print(json.dumps(rows) if flags.json else table.markdown(rows))
        case "moe":
            result = moe.run_moe(preset, seconds=seconds, say=say)
            print(json.dumps(result) if flags.json else table.markdown(result["rows"], moe.notes(result)))
        case "serve":
            result = serve.run_serve(preset, seconds=seconds, say=say)
            _show(flags, result, table.markdown_serve, table.render_serve)
        case "prior":
            result = prior.run_prior(preset, seconds=seconds, say=say)
            _show(flags, result, table.markdown_prior, table.render_prior)
        case "scaling":
            lengths = scaling.lengths_up_to(flags.sequence_len or scaling.LONGEST)
            job = "eval" if flags.forward_only else "train"
            result = scaling.run_scaling(preset, lengths, job=job, seconds=seconds, out=flags.out, say=say)
            _show(flags, result, table.markdown_scaling, table.render_scaling)
            if not flags.json and not flags.markdown:
                print(f"The plot is in {flags.out}.")
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
            _show(flags, result, None, table.render)
    return 0


def _usual_preset(job: str) -> str:
    from linnet.bench.targets import MOE_PRESET, PRESET, PRIOR_PRESET

    return {"moe": MOE_PRESET, "prior": PRIOR_PRESET}.get(job, PRESET)


def _show(
    flags: Flags,
    result: dict[str, Any],
    markdown: Callable[[dict[str, Any]], str] | None,
    render: Callable[[dict[str, Any]], Any],
) -> None:
    from rich.console import Console

    if flags.json:
        print(json.dumps(result))
    elif flags.markdown and markdown is not None:
        print(markdown(result))
    else:
        Console().print(render(result))
