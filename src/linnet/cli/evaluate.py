"""`linnet eval`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from linnet.cli.evaluate_flags import Flags
from linnet.cli.evaluate_prior import print_prior_result
from linnet.cli.parse import named_as_flags, parse
from linnet.core.errors import invalid

if TYPE_CHECKING:
    from linnet.api.evaluation import EvaluationResult


def eval_command(argv: list[str]) -> int:
    flags = parse(
        Flags,
        argv,
        "eval",
        "Evaluate a run. Every token (or pair) of the split counts once, and the state is carried through each sequence.",
    )
    from linnet.api.load import load
    from linnet.evaluate.run import EvalSettings
    from linnet.runs.load import read_config

    cast_to = None if flags.weights == "float32" else flags.weights
    with named_as_flags(flags):
        settings = EvalSettings(
            **{field.name: getattr(flags, field.name) for field in dataclasses.fields(EvalSettings)}
        )
        cfg = read_config(flags.run)
        settings.check_fit(cfg)
        if not cfg.reads_tokens and cast_to is not None:
            raise invalid("weights", cast_to, "float32 for a prior", "leave it out")
        run = load(flags.run, checkpoint=flags.checkpoint)
        result = run.evaluate(**vars(settings), weights=cast_to, quiet=flags.json)
    # Printed before it is written: a full or read-only disk must not lose the result.
    if flags.json:
        print(json.dumps(result.metrics, allow_nan=run.kind != "prior"), flush=True)
    elif run.kind == "prior":
        print_prior_result(result)
    else:
        _print_result(result)
    file = result.save()
    if not flags.json:
        prior = f"All figures are in {file}; `linnet report` shows them."
        print(prior if run.kind == "prior" else f"The plot is in {file}.")
    return 0


def _print_result(evaluated: EvaluationResult) -> None:
    from rich.console import Console

    from linnet.evaluate.language_model import Evaluation
    from linnet.report.positions import describe_positions, position_table

    record, result, console = evaluated.metrics, evaluated.details, Console()
    assert isinstance(result, Evaluation)
    console.print(
        f"{record['split']} at step {record['step']}: {record['bits_per_byte']:.4f} bits per {result.unit}, "
        f"{record['nats_per_token']:.4f} nats ({record['bits_per_token']:.4f} bits) per token, "
        f"perplexity {record['perplexity']:.3f}; "
        f"{result.tokens:,} tokens, {result.bytes:,} {'bytes' if result.unit == 'byte' else 'dimensions'}."
    )
    if result.words:
        console.print(f"By word: perplexity {result.word_perplexity:.3f}, {result.words:,} words.")
    before = record.get("float32")
    if before is not None:
        console.print(
            f"With float32 weights: {before['bits_per_byte']:.4f} bits per {result.unit}; {record['weights']} weights cost "
            f"{record['bits_per_byte'] - before['bits_per_byte']:+.4f} and take {record['weight_bytes'] / 1e6:.1f} MB instead of "
            f"{before['weight_bytes'] / 1e6:.1f}."
        )
    by_position = result.by_position.to_json()
    console.print(position_table(by_position))
    if result.unit == "byte":  # in images the loss by position also depends on what is shown there
        console.print(describe_positions(by_position))
