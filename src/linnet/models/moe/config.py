"""Configuration of a `moe` model, validated on construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from linnet.core.errors import invalid
from linnet.core.special_tokens import EOS, PAD
from linnet.models.bos import BeginId
from linnet.models.model_config import TokenModelConfig, ffn_size
from linnet.nn.remat import Remat
from linnet.parallel.mesh import check_divides


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(TokenModelConfig):
    EXPORT_FORMATS: ClassVar[tuple[str, ...]] = ("grok-hf",)
    REPORT_SECTIONS: ClassVar[tuple[str, ...]] = ("experts",)
    READS_IN_ONE_UPDATE: ClassVar[bool] = True
    FREE_WHEN_TUNED: ClassVar[frozenset[str]] = frozenset(("context", "balance_weight", "z_weight", "dtype", "remat"))
    """Settings that fine-tuning may change: they affect training, speed or the context length, not the weights."""
    n_vocab: int = 259
    """Vocabulary size. Bytes: 256 + pad, EOS and unknown."""
    end_id: int = EOS
    """EOS id of the tokenizer, which ends a document."""
    begin_id: BeginId = dataclasses.field(default="end", repr=False)  # see `linnet.models.bos`
    """BOS id, prepended to every sequence: `end` (the EOS id), an id, or None for no BOS (as in the Grok-1 release)."""
    pad_id: int = PAD
    """Padding id; masked in attention within a sequence."""
    d_model: int = 256
    """Model width."""
    d_k: int = 64
    """Key and value width per head."""
    n_q_head: int = 4
    """Number of query heads."""
    n_kv_head: int = 2
    """Key and value heads; each serves n_q_head / n_kv_head query heads."""
    n_layer: int = 4
    """Number of layers."""
    n_expert: int = 8
    """Number of experts per layer."""
    n_choice: int = 2
    """Experts per token (top-k routing)."""
    widening: float = 8.0
    """Hidden size of an expert: 2/3 of this times d_model, rounded up to a multiple of 8."""
    context: int = 1024  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen, and never unlimited
    """Context length: maximum tokens of prompt and completion together."""
    embed_scale: float = 1.0
    """Multiplier of the input embeddings."""
    logit_scale: float = 1.0
    """Multiplier of the logits."""
    score_scale: float = 0.125
    """Multiplier of q . k, usually d_k ** -0.5."""
    score_cap: float = 30.0
    """Soft cap of attention scores: cap * tanh(score / cap)."""
    rope_base: float = 10_000.0
    """Base of the rotary position embeddings (RoPE theta)."""
    balance_weight: float = 0.01
    """Weight of the load-balancing loss, which penalises uneven use of experts."""
    z_weight: float = 0.001
    """Weight of the router z-loss, which keeps the router's logits small."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations. The router, norms and softmax are always float32."""
    remat: Remat = "none"
    """Activations recomputed in the backward pass to save memory. some: everything in a layer except its matmuls with weights; full:
    the complete layer, for a third more compute."""

    def __post_init__(self) -> None:
        sizes = ("n_vocab", "d_model", "d_k", "n_q_head", "n_kv_head", "n_layer", "n_expert", "n_choice", "context")
        self.check_sizes(*sizes)
        self.check_ids("end_id", "pad_id")
        if self.d_k % 2:
            raise invalid("model.d_k", self.d_k, "even (positions turn pairs of values)", f"use {self.d_k + 1}")
        if self.n_q_head % self.n_kv_head:
            needs = f"a multiple of model.n_kv_head ({self.n_kv_head})"
            raise invalid("model.n_q_head", self.n_q_head, needs, f"use {self.n_kv_head * 2}")
        if self.n_choice > self.n_expert:
            raise invalid("model.n_choice", self.n_choice, f"at most model.n_expert ({self.n_expert})", "choose fewer")
        for name in ("widening", "score_cap", "embed_scale", "logit_scale", "score_scale"):
            if not getattr(self, name) > 0:
                raise invalid(f"model.{name}", getattr(self, name), "above 0", "use the default")
        if not self.rope_base > 1.0:
            raise invalid("model.rope_base", self.rope_base, "above 1", "use 10000")
        for name in ("balance_weight", "z_weight"):
            if getattr(self, name) < 0:
                raise invalid(f"model.{name}", getattr(self, name), "0 or more", "use 0 for none")

    @property
    def routing(self) -> tuple[int, int] | None:
        return self.n_expert, self.n_choice

    @property
    def d_ffn(self) -> int:
        return ffn_size(self.d_model, self.widening)

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Raise an error if the mesh does not divide the model evenly."""
        check_divides("model.d_model", self.d_model, "fsdp", sizes)
        check_divides("model.n_kv_head", self.n_kv_head, "model", sizes)
        check_divides("model.n_q_head", self.n_q_head, "model", sizes)
        check_divides("the experts' hidden width", self.d_ffn, "model", sizes)
        check_divides("model.n_expert", self.n_expert, "expert", sizes)

    def check_lengths(self, sequence_len: int, update_len: int) -> None:
        """Raise an error unless a sequence is processed in one update and fits the context."""
        if sequence_len > self.context:
            needs = f"at most model.context ({self.context})"
            raise invalid("data.sequence_len", sequence_len, needs, f"use {self.context}, or a longer context")
        if update_len != sequence_len:
            needs = f"data.sequence_len ({sequence_len}): a moe model reads a sequence in one update"
            raise invalid("data.update_len", update_len, needs, f"use {sequence_len}")
