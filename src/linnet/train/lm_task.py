"""The language-modeling task: token batches, loss in nats and bits per byte on held-out data, and samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding

from linnet.config.schema import RunConfig
from linnet.core.errors import invalid
from linnet.data import Batch, load_dataset
from linnet.evaluate.language_model import evaluate, make_nats
from linnet.generate.samples import sample_path, write_sample
from linnet.models import registry
from linnet.runs import vocabulary
from linnet.runs.state import TrainState, model_weights
from linnet.runs.vocabulary import Vocabulary
from linnet.tokenizers.base import Tokenizer
from linnet.train.task import EvalResult, TrackBatches, TrainMetrics, scalars


class LMTask:
    unit = "tok"
    n_test = 0

    def __init__(self, cfg: RunConfig, tokenizer: Tokenizer | None = None) -> None:
        self._cfg, self._family = cfg, registry.tokens(cfg.family)
        self._data = load_dataset(cfg.tokens, cfg.seed).with_bos(cfg.lm.bos_id)
        if tokenizer is not None and cfg.parent is not None:
            vocabulary.check_match(Path(cfg.parent.path), self._data, tokenizer)
        self._data.check_fit(cfg.lm.n_vocab, cfg.lm.end_id, cfg.d_condition)
        if self._data.train.n_tokens < cfg.tokens.update_len:
            needs = f"at least data.update_len ({cfg.tokens.update_len}) tokens to train on (it leaves {self._data.train.n_tokens})"
            raise invalid(
                "data.source", cfg.tokens.source, needs, "name a larger source, or set a smaller --data.update-len"
            )
        self._nats = make_nats(self._family, cfg)
        self._bytes_per_token = self._data.train.n_bytes / self._data.train.n_tokens
        self.bits_per_nat = 1.0 / (math.log(2.0) * self._bytes_per_token)
        self.n_validation = self._data.validation.n_windows
        self.n_per_update = cfg.data.batch_size * cfg.tokens.update_len

    @property
    def fingerprint(self) -> str:
        return self._data.fingerprint

    def save_vocabulary(self, folder: Path) -> None:
        vocabulary.save_vocabulary(folder, self._data)

    def describe(self) -> dict[str, Any]:
        return self._data.describe()

    def describe_amount(self) -> str:
        return f"{self._data.train.n_tokens:,} training tokens"

    def batch(self, step: int, host: int = 0, n_hosts: int = 1) -> Batch:
        return self._data.batch(step, host, n_hosts)

    def train_metrics(self, step: int, values: dict[str, Any], rates: dict[str, float]) -> TrainMetrics:
        del step
        nats = float(values["loss_lm_per_token_unscaled"]) / max(float(values["loss_mask_per_token"]), 1e-9)
        per_byte = self._data.train.n_tokens / self._data.train.n_bytes / math.log(2)
        committed = {"loss_commit": values["loss_commit_per_token"]} if "loss_commit_per_token" in values else {}
        metrics = {
            **scalars(values),
            "loss": nats,
            "loss_total": values["loss"],
            **committed,
            "bits_per_byte": nats * per_byte,
            **rates,
        }
        return TrainMetrics(metrics=metrics, loss=nats, per_second=rates["tokens_per_second"])

    def evaluate(self, state: TrainState, track: TrackBatches) -> EvalResult:
        params, buffers = model_weights(state)
        limit, data = self._cfg.train.eval_sequences, self._data
        n = data.validation.n_windows if limit is None else min(limit, data.validation.n_windows)
        n_batch = math.ceil(n / self._cfg.data.batch_size)
        placement = state.step.sharding
        assert isinstance(placement, NamedSharding)
        assert isinstance(placement.mesh, Mesh)
        result = evaluate(
            self._family,
            self._cfg,
            params,
            buffers,
            data,
            "validation",
            nats=self._nats,
            mesh=placement.mesh,
            limit=limit,
            progress=lambda batches: track(batches, "validation", n_batch),
        )
        return EvalResult(
            metrics={name: value for name, value in result.to_json().items() if name != "per_position"},
            loss=result.loss,
            summary=f"validation {result.bits_per_byte:.4f} bits per {result.unit} ({result.loss:.4f} nats per token)",
        )

    def write_sample(self, state: TrainState, step: int, folder: Path) -> None:
        params, buffers = model_weights(state)
        n_token = self._cfg.train.sample_tokens
        if n_token:
            writes = Vocabulary(tokenizer=self._data.tokenizer, shape=self._data.shape)
            embeds = self._data.embeds("validation")
            write_sample(self._family, self._cfg, params, buffers, writes, folder, step, n_token, embeds)

    def has_sample(self, step: int, folder: Path) -> bool:
        return not self._cfg.train.sample_tokens or sample_path(folder, step, self._data.shape).exists()

    def test(self, state: TrainState, step: int, folder: Path, track: TrackBatches) -> EvalResult:
        raise AssertionError("`linnet eval --split test` reads it when asked to")
