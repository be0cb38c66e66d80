"""The prior's task: losses of online and EMA weights, five cosines, and retrieval compared with simple baselines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from linnet.config.schema import RunConfig
from linnet.data.embeddings import EmbeddingPairs, PairBatch, open_pairs
from linnet.evaluate import retrieval
from linnet.evaluate.prior import PriorEvaluation, check_fit, evaluate_prior
from linnet.optim import ema
from linnet.runs.state import TrainState
from linnet.train.task import EvalResult, TrackBatches, TrainMetrics, scalars


class PriorTask:
    unit = "pairs"
    bits_per_nat = None

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg
        self._pairs = open_pairs(cfg.pairs, cfg.seed, encodings=cfg.pair_model.text_encodings)
        check_fit(self._pairs, cfg.pair_model)
        self.fingerprint = self._pairs.fingerprint
        self.n_validation, self.n_test = self._pairs.n_rows("validation"), self._pairs.n_rows("test")
        self.n_per_update = cfg.data.batch_size

    def save_vocabulary(self, folder: Path) -> None:
        """Save nothing: the config already names the pairs."""
        del folder

    def describe(self) -> dict[str, Any]:
        return self._pairs.describe()

    def describe_amount(self) -> str:
        return f"{self._pairs.n_rows('train'):,} training pairs"

    def batch(self, step: int, host: int = 0, n_hosts: int = 1) -> PairBatch:
        return self._pairs.batch(step, host, n_hosts)

    def train_metrics(self, step: int, values: dict[str, Any], rates: dict[str, float]) -> TrainMetrics:
        seen = step * self._cfg.data.batch_size
        average = ema.settings(self._cfg.train)
        speed = rates["tokens_per_second"]
        metrics = {
            **{name: value for name, value in scalars(values).items() if name != "loss_diffusion"},
            "loss": values["loss"],
            "mfu": rates["mfu"],
            "wait_share": rates["wait_share"],
            f"tracking/training-{self._cfg.pair_model.loss_name}": values["loss"],
            "tracking/samples-sec": speed,
            "tracking/samples-seen": seen,
            "tracking/epoch": seen // self._pairs.n_rows("train"),
            **({} if average is None else {"tracking/ema-decay": float(ema.decay(average, step))}),
        }
        return TrainMetrics(metrics=metrics, loss=float(values["loss"]), per_second=speed)

    def evaluate(self, state: TrainState, track: TrackBatches) -> EvalResult:
        result = self._evaluated(state, "validation", track, self._cfg.train.eval_sequences)
        return EvalResult(metrics=_metrics(result), loss=result.loss, summary=result.summary())

    def write_sample(self, state: TrainState, step: int, folder: Path) -> None:
        """No preview: embeddings are shown by `linnet sample` and in the report."""
        del state, step, folder

    def has_sample(self, step: int, folder: Path) -> bool:
        """Always true: a prior writes no samples."""
        return True

    def test(self, state: TrainState, step: int, folder: Path, track: TrackBatches) -> EvalResult:
        result = self._evaluated(state, "test", track, None, choose=True)
        if result.predicted:
            write_retrieval(folder, self._pairs, result, step)
        return EvalResult(metrics=_metrics(result), loss=result.loss, summary=result.summary())

    def _evaluated(
        self, state: TrainState, split: str, track: TrackBatches, limit: int | None, choose: bool = False
    ) -> PriorEvaluation:
        weights = {"online": state.params} | ({} if state.ema is None else {"ema": state.ema})
        n = self._pairs.n_rows(split) if limit is None else min(limit, self._pairs.n_rows(split))
        n_batch = math.ceil(n / self._cfg.data.batch_size)
        return evaluate_prior(
            self._cfg,
            weights,
            self._pairs,
            split,
            limit=limit,
            choose=choose,
            progress=lambda batches: track(batches, split, n_batch),
        )


def _metrics(result: PriorEvaluation) -> dict[str, Any]:
    """Metrics of an evaluation, with the recall of the true image among all evaluated images."""
    found = {}
    for n_step, predicted in result.predicted.items():
        (row,) = retrieval.compare({retrieval.PRIOR: predicted.embeds}, predicted.images)
        found |= {f"recall@1 [steps={n_step}]": row.recall_1, f"recall@10 [steps={n_step}]": row.recall_10}
    return {**result.to_json(), **found}


def write_retrieval(folder: Path, pairs: EmbeddingPairs, result: PriorEvaluation, step: int) -> Path:
    """Write the comparison of the prior with its baselines and the caption-image matrix for the report.

    Uses the predictions of the first evaluated number of denoising steps.
    """
    n_steps, predicted = next(iter(result.predicted.items()))
    given = (predicted.texts, predicted.embeds, predicted.images, predicted.chosen)
    rows, matrix = retrieval.side_by_side(pairs, result.split, result.pairs, *given, retrieval.baselines(pairs))
    return retrieval.write(folder, rows, matrix, result.split, step, n_steps)
