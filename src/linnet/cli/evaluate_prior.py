"""`linnet eval` for a prior: losses of the trained and EMA weights, five cosines, and retrieval compared with three baselines."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from linnet.core.errors import UserError, invalid

if TYPE_CHECKING:
    from linnet.cli.evaluate_flags import Flags
    from linnet.config.schema import PairsConfig, RunConfig
    from linnet.evaluate.prior import PriorEvaluation
    from linnet.evaluate.retrieval import Row
    from linnet.models.prior.params import PriorParams

WEIGHTS = {"online": "the weights as trained", "ema": "their moving average"}


def evaluate_prior_run(flags: Flags) -> int:
    if flags.weights != "float32":
        raise invalid("--weights", flags.weights, "float32 for a prior", "leave it out")
    from linnet.cli.startup import init_jax
    from linnet.data.embeddings import open_pairs
    from linnet.evaluate import retrieval
    from linnet.evaluate.prior import evaluate_prior
    from linnet.runs.environment import peak_rss_bytes
    from linnet.runs.metrics import replace_text
    from linnet.runs.relocated import check_same_data, relocated
    from linnet.train.progress import track

    init_jax()
    cfg, weights, step = _opened(flags)
    timesteps = _timesteps(flags, cfg)
    own = cfg if flags.data_source is None else relocated(cfg, flags.data_source)
    data_cfg, split = _data(flags, own.pairs)
    pairs = open_pairs(data_cfg, cfg.seed, encodings=cfg.prior.text_encodings)
    if flags.data_source is not None:
        check_same_data(flags.run, pairs.fingerprint, flags.data_source)
    size = flags.batch_size or cfg.data.batch_size
    n_batch = math.ceil(min(pairs.n_rows(split), flags.limit or 10**12) / size)
    result = evaluate_prior(
        cfg,
        weights,
        pairs,
        split,
        timesteps=timesteps,
        batch_size=size,
        limit=flags.limit,
        choose=True,
        progress=lambda batches: track(batches, "evaluating", n_batch, quiet=flags.json),
    )
    shown = split if flags.source is None else "source"
    rows: list[Row] = []
    notes: list[str] = []
    matrix = None
    if result.predicted:
        _, predicted = next(iter(result.predicted.items()))
        simple, note = _baselines(flags, cfg, pairs)
        notes += [note] if note else []
        rows, matrix = retrieval.side_by_side(
            pairs, split, result.pairs, predicted.texts, predicted.embeds, predicted.images, predicted.chosen, simple
        )
    record = {
        **{name: _plain(value) for name, value in result.to_json().items()},
        "split": shown,
        "step": step,
        "run": str(flags.run),
        "peak_rss_bytes": peak_rss_bytes(),
        "retrieval": [retrieval.row_json(row) for row in rows],
        **({} if flags.source is None else {"source": flags.source}),
        **({"notes": notes} if notes else {}),
    }
    path = flags.run / f"eval_{shown}.json"
    # Printed before it is written: a full or read-only disk must not lose the result.
    if flags.json:
        print(json.dumps(record, allow_nan=False), flush=True)
    else:
        _tell(record, result, rows, notes)
    if rows and flags.source is None and flags.limit is None:  # the report shows only complete splits of the run's data
        n_steps = next(iter(result.predicted))
        retrieval.write(flags.run, rows, matrix, split, step, n_steps)
    replace_text(path, json.dumps(record, indent=2, allow_nan=False) + "\n")
    if not flags.json:
        print(f"All figures are in {path}; `linnet report` shows them.")
    return 0


def _opened(flags: Flags) -> tuple[RunConfig, dict[str, PriorParams], int]:
    """Return the config, the trained and (if any) EMA weights, and the step."""
    from linnet.runs.load import open_run, open_state
    from linnet.runs.state import both_weights
    from linnet.runs.weights import is_weights_only

    if is_weights_only(flags.run):
        run = open_run(flags.run, flags.checkpoint)
        return run.cfg, {"online": run.params}, run.step
    cfg, state, step = open_state(flags.run, flags.checkpoint, part=both_weights)
    return cfg, {"online": state.params} | ({} if state.ema is None else {"ema": state.ema}), step


def _timesteps(flags: Flags, cfg: RunConfig) -> tuple[int, ...]:
    chosen = cfg.train.eval_timesteps if flags.timesteps is None else flags.timesteps
    most = cfg.prior.timesteps
    if any(not 1 <= n <= most for n in chosen):
        raise invalid("--timesteps", chosen, f"between 1 and the diffusion's {most}", f"use {min(64, most)}")
    return chosen


def _data(flags: Flags, trained_on: PairsConfig) -> tuple[PairsConfig, str]:
    """Return the data config (the run's own pairs, or all of another source) and the split to evaluate."""
    if flags.source is None:
        return trained_on, flags.split
    whole = {"validation_fraction": 0.0, "test_fraction": 0.0, "split_key": None}
    named = {"source": flags.source, "base": None, "images": None, "texts": None, "metadata": None, "encodings": None}
    return dataclasses.replace(trained_on, **whole, **named), "train"


def _baselines(flags: Flags, cfg: RunConfig, pairs: Any) -> tuple[Any, str]:
    """Fit the baselines on the run's training pairs, whatever data is evaluated. If these are missing, return None and the reason."""
    from linnet.data.embeddings import open_pairs
    from linnet.evaluate import retrieval
    from linnet.evaluate.prior import check_fit

    if flags.source is None:
        return retrieval.baselines(pairs), ""
    try:
        own = open_pairs(cfg.pairs, cfg.seed, encodings=cfg.prior.text_encodings)
        check_fit(own, cfg.prior)
    except UserError as error:
        return None, f"No baselines: they are fitted on the run's own training pairs, and {error}"
    return retrieval.baselines(own), ""


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tell(record: dict[str, Any], result: PriorEvaluation, rows: list[Row], notes: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from linnet.evaluate.prior import FIGURES
    from linnet.report.prior import NAMES, verdict

    console = Console()
    losses = ", ".join(f"{value:.4f} with {WEIGHTS[who]}" for who, value in result.losses.items())
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
    for note in notes:
        console.print(note)


def _cell(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "–"
