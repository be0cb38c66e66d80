"""The text that `linnet eval` prints for a prior: losses, five cosines, and retrieval compared with three baselines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from linnet.api.evaluation import EvaluationResult

WEIGHTS = {"online": "the online weights", "ema": "the EMA weights"}


def print_prior_result(evaluated: EvaluationResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from linnet.evaluate.prior import FIGURES
    from linnet.evaluate.run import PriorRunEvaluation
    from linnet.report.prior import NAMES, verdict

    record, details, console = evaluated.metrics, evaluated.details, Console()
    assert isinstance(details, PriorRunEvaluation)
    result, rows = details.result, details.rows
    losses = ", ".join(f"{value:.4f} with {WEIGHTS[kind]}" for kind, value in result.losses.items())
    console.print(
        f"{record['split']} at step {record['step']}: {result.loss_type} loss {losses}; {result.pairs:,} pairs."
    )
    if result.cosines:
        table = Table(title="Five cosines, by number of denoising steps")
        table.add_column("")
        for n in result.cosines:
            table.add_column(f"{n:,}", justify="right")
        for name in FIGURES:
            table.add_row(name, *(_cell(figures[name]) for figures in result.cosines.values()))
        console.print(table)
    if rows:
        n_steps = next(iter(result.cosines))
        table = Table(title=f"Finding the true image among {rows[0].n:,}, in {n_steps:,} steps", caption=verdict(rows))
        for title in ("predicted by", "cosine", "recall@1", "recall@10"):
            table.add_column(title, justify="left" if title == "predicted by" else "right")
        for row in rows:
            table.add_row(NAMES.get(row.name, row.name), *map(_cell, (row.cosine, row.recall_1, row.recall_10)))
        console.print(table)
    for note in details.notes:
        console.print(note)


def _cell(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "–"
