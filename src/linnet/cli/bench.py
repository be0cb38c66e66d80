"""`linnet bench`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from linnet.cli.parse import parse


@dataclasses.dataclass(frozen=True)
class Flags:
    job: Annotated[Literal["train", "eval", "prefill", "decode", "scaling", "table"], tyro.conf.Positional]
    """What to measure; `scaling`: sequence lengths against a dense baseline; `table`: all rows of docs/benchmarks.md."""
    preset: Annotated[str, tyro.conf.Positional] = "bench-s"
    sequence_len: int | None = None
    """Tokens of a sequence; of the context for decode. `scaling`: the longest."""
    batch: int | None = None
    seconds: float = 10.0
    """How long to repeat each measurement."""
    cores: int | None = None
    """Bind to so many cores."""
    compare_cores: bool = False
    """Measure on one core as well, and tell the speed-up."""
    forward_only: bool = False
    """`scaling`: evaluation instead of training."""
    out: Path = Path("scaling.svg")
    """`scaling`: where the plot goes."""
    json: bool = False
    """One JSON object."""
    markdown: bool = False
    """`table` and `scaling`: a table to paste into a document."""


def bench_command(argv: list[str]) -> int:
    flags = parse(Flags, argv, "bench", "Measures speed, compile time and memory, each job in a process of its own.")
    from rich.console import Console

    from linnet.bench import run, scaling, table

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    if flags.job == "table":
        rows = run.run_table(seconds=flags.seconds, say=say)
        print(json.dumps(rows) if flags.json else table.markdown(rows))
        return 0
    if flags.job == "scaling":
        lengths = scaling.lengths_up_to(flags.sequence_len or scaling.LONGEST)
        job = "eval" if flags.forward_only else "train"
        result = scaling.run_scaling(flags.preset, lengths, job=job, seconds=flags.seconds, out=flags.out, say=say)
        if flags.json:
            print(json.dumps(result))
        elif flags.markdown:
            print(table.markdown_scaling(result))
        else:
            Console().print(table.render_scaling(result))
            print(f"The plot is in {flags.out}.")
        return 0
    result = run.run_bench(
        flags.job,
        flags.preset,
        sequence_len=flags.sequence_len,
        batch=flags.batch,
        seconds=flags.seconds,
        cores=flags.cores,
        compare_cores=flags.compare_cores,
    )
    if flags.json:
        print(json.dumps(result))
    else:
        Console().print(table.render(result))
    return 0
