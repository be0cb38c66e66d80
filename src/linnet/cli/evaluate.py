"""`linnet eval`."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.cli.evaluate_flags import Flags
from linnet.cli.parse import parse
from linnet.core.errors import invalid

if TYPE_CHECKING:
    from linnet.config.schema import DataConfig, RunConfig
    from linnet.evaluate.language_model import Evaluation


def eval_command(argv: list[str]) -> int:
    flags = parse(
        Flags,
        argv,
        "eval",
        "Evaluates a run: every token (or pair) of the split counts once, the state carried through each sequence.",
    )
    from linnet.config import codec as configs

    if flags.source is not None and flags.data_source is not None:
        raise invalid("--source", flags.source, "left out with --data.source", "leave one of them out")
    if configs.load(flags.run / "config.json").family == "prior":
        from linnet.cli.evaluate_prior import evaluate_prior_run

        for name in ("sequence_len", "update_len"):
            if getattr(flags, name) is not None:
                needs = "left out: a prior has no sequences"
                raise invalid(f"--{name.replace('_', '-')}", getattr(flags, name), needs, "leave it out")
        return evaluate_prior_run(flags)
    if flags.timesteps is not None:
        raise invalid("--timesteps", flags.timesteps, "left out: only a prior predicts in steps", "leave it out")
    from linnet.cli.startup import init_jax
    from linnet.core import quant
    from linnet.core.pytree import n_bytes
    from linnet.data import load_dataset
    from linnet.evaluate.language_model import evaluate
    from linnet.runs.environment import peak_rss_bytes
    from linnet.runs.load import open_run
    from linnet.runs.relocated import check_same_data, relocated
    from linnet.runs.vocabulary import check_match
    from linnet.train.progress import track

    init_jax()
    run = open_run(flags.run, flags.checkpoint)
    cfg = _with_lengths(run.cfg, flags)
    own = cfg if flags.data_source is None else relocated(cfg, flags.data_source)
    data_cfg, split = _data(flags, own.tokens)
    data = load_dataset(data_cfg, cfg.seed).begun_by(cfg.writer.bos_id)
    if flags.data_source is not None:
        check_same_data(flags.run, data.fingerprint, flags.data_source)
    check_match(flags.run, data, run.vocabulary.tokenizer)  # first, because different tokenizers have different EOS ids
    data.check_fit(cfg.writer.n_vocab, cfg.writer.end_id, cfg.d_condition)
    size = flags.batch_size or cfg.data.batch_size
    n_batch = -(-min(data.split(split).n_windows, flags.limit or 10**12) // size)

    def evaluated(params: Any, words: str) -> Evaluation:
        return evaluate(
            run.writer,
            cfg,
            params,
            run.buffers,
            data,
            split,
            batch_size=size,
            limit=flags.limit,
            progress=lambda batches: track(batches, words, n_batch, quiet=flags.json),
        )

    params = quant.cast_params(run.params, run.family.param_specs(cfg.model), flags.weights)
    result = evaluated(params, "evaluating")
    record = result.to_json() | {
        "split": split if flags.source is None else "source",
        "step": run.step,
        "sequence_len": cfg.tokens.sequence_len,
        "weights": flags.weights,
        "weight_bytes": n_bytes(params),
        "run": str(flags.run),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if flags.weights != "float32":
        whole = evaluated(run.params, "with float32 weights")
        record["float32"] = {
            "loss": whole.loss,
            "bits_per_byte": whole.bits_per_byte,
            "weight_bytes": n_bytes(run.params),
        }
    if flags.source is not None:
        record["source"] = flags.source
    # Printed before it is written: a full or read-only disk must not lose the result.
    if flags.json:
        print(json.dumps(record), flush=True)
    else:
        _tell(record, result)
    figure = _write(flags, record, result)
    if not flags.json:
        print(f"The plot is in {figure}.")
    return 0


def _with_lengths(cfg: RunConfig, flags: Flags) -> RunConfig:
    """Return the run's config with the requested lengths. The run's own update length is shortened to divide the sequence length."""
    for name in ("sequence_len", "update_len"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise invalid(f"--{name.replace('_', '-')}", value, "at least 1", "leave it out for the run's own")
    sequence = flags.sequence_len or cfg.tokens.sequence_len
    update = flags.update_len or math.gcd(cfg.tokens.update_len, sequence)
    if cfg.family == "moe":
        update = flags.update_len or sequence
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.tokens, sequence_len=sequence, update_len=update))


def _data(flags: Flags, trained_on: DataConfig) -> tuple[DataConfig, str]:
    """Return the data config (the run's own data or another source, with the run's lengths) and the split to evaluate."""
    from linnet.config.schema import DataConfig
    from linnet.data.load import is_divided

    if flags.source is None:
        return trained_on, flags.split
    lengths = {name: getattr(trained_on, name) for name in ("sequence_len", "update_len", "batch_size")}
    other = DataConfig(source=flags.source, **lengths)
    if is_divided(flags.source):
        return other, flags.split
    # Plain text has no splits, so all of it is evaluated.
    return dataclasses.replace(other, validation_fraction=0.0, test_fraction=0.0), "train"


def _write(flags: Flags, record: dict[str, Any], result: Evaluation) -> Path:
    """Write the metrics and the plot by position into the run's folder, and return the path of the plot."""
    from linnet.report.plots import position_svg
    from linnet.runs.metrics import replace_text

    name = record["split"] if flags.weights == "float32" else f"{record['split']}_{flags.weights}"
    replace_text(flags.run / f"eval_{name}.json", json.dumps(record, indent=2) + "\n")
    figure = flags.run / f"eval_{name}.svg"
    replace_text(figure, position_svg(result.by_position.edges, result.by_position.nats))
    return figure


def _tell(record: dict[str, Any], result: Evaluation) -> None:
    from rich.console import Console

    from linnet.report.plots import position_table, position_words

    console = Console()
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
        console.print(position_words(by_position))
