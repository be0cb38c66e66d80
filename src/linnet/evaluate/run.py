"""Evaluation of a run on a split of its own data, or on other data.

A language model is evaluated as `language_model` describes, a prior as `prior` and `retrieval` do. Both return the figures as one
record of plain values, which `linnet eval` prints and writes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from linnet.config.schema import DataConfig, PairsConfig, RunConfig
from linnet.core import quant
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import UserError, invalid
from linnet.core.pytree import n_bytes
from linnet.data import load_dataset
from linnet.data.embeddings import EmbeddingPairs, open_pairs
from linnet.data.load import has_splits
from linnet.evaluate import retrieval
from linnet.evaluate.language_model import Evaluation, evaluate
from linnet.evaluate.prior import PriorEvaluation, check_fit, evaluate_prior
from linnet.runs.environment import peak_rss_bytes
from linnet.runs.load import LoadedRun, open_state
from linnet.runs.relocated import check_same_data, relocated
from linnet.runs.state import evaluated_weights
from linnet.runs.vocabulary import check_match
from linnet.runs.weights import is_weights_only

Item = TypeVar("Item")
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""`(batches, description, count)`: the same batches, with a progress display."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """What to evaluate on. None: the run's own setting."""

    split: str = "validation"
    source: str | None = None
    """Other data: prepared data (its `split`), or all of a text file, folder or glob; for a prior, all pairs of another dataset."""
    data_source: str | None = None
    """New location of the run's own data, whose content must be that of training."""
    sequence_len: int | None = None
    update_len: int | None = None
    batch_size: int | None = None
    limit: int | None = None
    """Maximum number of sequences or pairs, spread evenly over the split."""
    timesteps: tuple[int, ...] | None = None
    """Priors: numbers of sampling steps."""

    def __post_init__(self) -> None:
        if self.source is not None and self.data_source is not None:
            raise invalid("source", self.source, "left out with data.source", "leave one of them out")
        for name in ("sequence_len", "update_len", "batch_size", "limit"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise invalid(name, value, "at least 1", "leave it out for the default")

    def check_fit(self, cfg: RunConfig) -> None:
        """Raise if a setting does not apply to this family of models."""
        why = dict.fromkeys(("sequence_len", "update_len"), "a prior has no sequences")
        if cfg.reads_tokens:
            why = {"timesteps": "only a prior predicts in steps"}
        for name, reason in why.items():
            if (value := getattr(self, name)) is not None:
                raise invalid(name, value, f"left out: {reason}", "leave it out")

    @property
    def name(self) -> str:
        """The name of the split in the record and its file."""
        return self.split if self.source is None else "source"


def evaluate_language_model_run(
    run: LoadedRun,
    settings: EvalSettings,
    track: Track,
    weights: WeightDtype = "float32",
    cast_to: WeightDtype | None = None,
) -> tuple[Evaluation, dict[str, Any]]:
    """Return the evaluation and its record. `weights`: dtype of the run's weights; `cast_to`: evaluate them in this dtype, and add
    the figures of the weights as they are."""
    cfg = _with_lengths(run.cfg, settings)
    own = cfg if settings.data_source is None else relocated(cfg, settings.data_source)
    data_cfg, split = _text_source(settings, own.tokens)
    data = load_dataset(data_cfg, cfg.seed).with_bos(cfg.lm.bos_id)
    if settings.data_source is not None:
        check_same_data(run.folder, data.fingerprint, settings.data_source)
    check_match(
        run.folder, data, run.vocabulary.tokenizer
    )  # first, because different tokenizers have different EOS ids
    data.check_fit(cfg.lm.n_vocab, cfg.lm.end_id, cfg.d_condition)
    size = settings.batch_size or cfg.data.batch_size
    n_batch = -(-min(data.split(split).n_windows, settings.limit or 10**12) // size)

    def evaluated(params: Any, description: str) -> Evaluation:
        return evaluate(
            run.lm,
            cfg,
            params,
            run.buffers,
            data,
            split,
            batch_size=size,
            limit=settings.limit,
            progress=lambda batches: track(batches, description, n_batch),
        )

    specs = run.family.param_specs(cfg.model)
    params = run.params if cast_to is None else quant.cast_params(run.params, specs, cast_to)
    result = evaluated(params, "evaluating")
    record = result.to_json() | {
        "split": split if settings.source is None else "source",
        "step": run.step,
        "sequence_len": cfg.tokens.sequence_len,
        "weights": cast_to or weights,
        "weight_bytes": n_bytes(params),
        "run": str(run.folder),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if cast_to is not None:
        total = evaluated(run.params, f"with {weights} weights")
        record[weights] = {
            "loss": total.loss,
            "bits_per_byte": total.bits_per_byte,
            "weight_bytes": n_bytes(run.params),
        }
    return result, record | ({} if settings.source is None else {"source": settings.source})


def _with_lengths(cfg: RunConfig, settings: EvalSettings) -> RunConfig:
    """Return the run's config with the requested lengths. The run's own update length is shortened to divide the sequence length."""
    sequence = settings.sequence_len or cfg.tokens.sequence_len
    update = settings.update_len or math.gcd(cfg.tokens.update_len, sequence)
    if cfg.lm.context is not None:  # its attention does not reach from one update to the next
        update = settings.update_len or sequence
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.tokens, sequence_len=sequence, update_len=update))


def _text_source(settings: EvalSettings, trained_on: DataConfig) -> tuple[DataConfig, str]:
    """Return the data config (the run's own data or another source, with the run's lengths) and the split to evaluate."""
    if settings.source is None:
        return trained_on, settings.split
    lengths = {name: getattr(trained_on, name) for name in ("sequence_len", "update_len", "batch_size")}
    other = DataConfig(source=settings.source, **lengths)
    if has_splits(settings.source):
        return other, settings.split
    # Plain text has no splits, so all of it is evaluated.
    return dataclasses.replace(other, validation_fraction=0.0, test_fraction=0.0), "train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriorRunEvaluation:
    result: PriorEvaluation
    rows: list[retrieval.Row]
    """Retrieval by the prior and by the baselines; empty if no embeddings were predicted."""
    matrix: retrieval.SimilarityMatrix | None
    notes: list[str]
    record: dict[str, Any]
    is_complete: bool
    """Whether a complete split of the run's own data was evaluated: the report shows only those."""


def evaluate_prior_run(run: LoadedRun, settings: EvalSettings, track: Track) -> PriorRunEvaluation:
    cfg, weights = _trained_weights(run)
    timesteps = _timesteps(settings, cfg)
    own = cfg if settings.data_source is None else relocated(cfg, settings.data_source)
    data_cfg, split = _pair_source(settings, own.pairs)
    pairs = open_pairs(data_cfg, cfg.seed, encodings=cfg.pair_model.text_encodings)
    if settings.data_source is not None:
        check_same_data(run.folder, pairs.fingerprint, settings.data_source)
    size = settings.batch_size or cfg.data.batch_size
    n_batch = math.ceil(min(pairs.n_rows(split), settings.limit or 10**12) / size)
    result = evaluate_prior(
        cfg,
        weights,
        pairs,
        split,
        timesteps=timesteps,
        batch_size=size,
        limit=settings.limit,
        choose=True,
        progress=lambda batches: track(batches, "evaluating", n_batch),
    )
    rows: list[retrieval.Row] = []
    notes: list[str] = []
    matrix = None
    if result.predicted:
        predicted = next(iter(result.predicted.values()))
        simple, note = _baselines(settings, cfg, pairs)
        notes += [note] if note else []
        rows, matrix = retrieval.side_by_side(
            pairs, split, result.pairs, predicted.texts, predicted.embeds, predicted.images, predicted.chosen, simple
        )
    record = {
        **{name: _finite(value) for name, value in result.to_json().items()},
        "split": split if settings.source is None else "source",
        "step": run.step,
        "run": str(run.folder),
        "peak_rss_bytes": peak_rss_bytes(),
        "retrieval": [retrieval.row_json(row) for row in rows],
        **({} if settings.source is None else {"source": settings.source}),
        **({"notes": notes} if notes else {}),
    }
    is_complete = settings.source is None and settings.limit is None
    return PriorRunEvaluation(
        result=result, rows=rows, matrix=matrix, notes=notes, record=record, is_complete=is_complete
    )


def _trained_weights(run: LoadedRun) -> tuple[RunConfig, dict[str, Any]]:
    """Return the config and the trained and (if any) EMA weights of the run's checkpoint."""
    if run.folder.is_file() or is_weights_only(run.folder):
        return run.cfg, {"online": run.params}
    cfg, state, _ = open_state(run.folder, str(run.step), part=evaluated_weights)
    return cfg, {"online": state.params} | ({} if state.ema is None else {"ema": state.ema})


def _timesteps(settings: EvalSettings, cfg: RunConfig) -> tuple[int, ...]:
    chosen = cfg.train.eval_timesteps if settings.timesteps is None else settings.timesteps
    n_time = cfg.pair_model.timesteps
    if any(not 1 <= n <= n_time for n in chosen):
        raise invalid("timesteps", chosen, f"between 1 and the diffusion's {n_time}", f"use {min(64, n_time)}")
    return chosen


def _pair_source(settings: EvalSettings, trained_on: PairsConfig) -> tuple[PairsConfig, str]:
    """Return the data config (the run's own pairs, or all of another source) and the split to evaluate."""
    if settings.source is None:
        return trained_on, settings.split
    undivided = {"validation_fraction": 0.0, "test_fraction": 0.0, "split_key": None}
    named = {
        "source": settings.source,
        "base": None,
        "images": None,
        "texts": None,
        "metadata": None,
        "encodings": None,
    }
    return dataclasses.replace(trained_on, **undivided, **named), "train"


def _baselines(settings: EvalSettings, cfg: RunConfig, pairs: EmbeddingPairs) -> tuple[retrieval.Baselines | None, str]:
    """Fit the baselines on the run's training pairs, whatever data is evaluated. If these are missing, return None and the reason."""
    if settings.source is None:
        return retrieval.baselines(pairs), ""
    try:
        own = open_pairs(cfg.pairs, cfg.seed, encodings=cfg.pair_model.text_encodings)
        check_fit(own, cfg.pair_model)
    except UserError as error:
        return None, f"No baselines: they are fitted on the run's own training pairs, and {error}"
    return retrieval.baselines(own), ""


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
