"""Configuration of a `vq` model, validated on construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from linnet.core.errors import invalid
from linnet.core.special_tokens import EOS
from linnet.models.bos import BeginId
from linnet.models.model_config import TokenModelConfig, ffn_size
from linnet.nn.remat import Remat
from linnet.parallel.mesh import check_divides, check_no_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class VQConfig(TokenModelConfig):
    EXPORT_FORMATS: ClassVar[tuple[str, ...]] = ("transformer-vq", "transformer-vq-npz")
    REPORT_SECTIONS: ClassVar[tuple[str, ...]] = ("codebooks",)
    FREE_WHEN_TUNED: ClassVar[frozenset[str]] = frozenset(
        (
            "block_len",
            "grad_thru_cache",
            "p_dropemb",
            "p_dropsin",
            "p_dropres",
            "p_droplyr",
            "balance_weight",
            "z_weight",
            "c_beta",
            "c_gamma",
            "dtype",
            "reset_at_documents",
            "restart_dead_codes",
            "dead_code_below",
            "p_drop_condition",
            "condition_noise",
            "remat",
        )
    )
    """Settings that fine-tuning may change: they affect training or speed, not the weights or their meaning."""
    n_vocab: int = 259
    """Vocabulary size. Bytes: 256 + pad, EOS and unknown."""
    end_id: int = EOS
    """EOS id of the tokenizer, which ends a document."""
    begin_id: BeginId = dataclasses.field(default="end", repr=False)  # see `linnet.models.bos`
    """BOS id, prepended to every sequence: `end` (the EOS id), an id, or None for no BOS."""
    d_model: int = 256
    """Model width."""
    d_k: int = 64
    """Key width per head."""
    d_v: int = 512
    """Value width per head."""
    n_head: int = 1
    """Number of attention heads."""
    n_code: int = 256
    """Codebook size per head."""
    n_layer: int = 4
    """Number of layers; a layer is two gated attention units."""
    block_len: int = 128
    """Tokens per attention block. Affects speed, not the result."""
    mem_len: int = 128
    """Attention window: range of relative positions, in tokens. Older tokens are attended to through their code only."""
    agg_cache: bool = True
    """Attend to tokens older than the window through the compressed cache; False: forget them."""
    grad_thru_cache: bool = True
    """Backpropagate through the cache; False: no gradient into earlier blocks."""
    pe_abs: bool = False
    """Add scaled absolute positions to the embeddings."""
    pe_lam: float = 100_000.0
    """Longest wavelength of the sinusoids."""
    p_dropemb: float = 0.0
    """Dropout on the token embeddings."""
    p_dropsin: float = 0.0
    """Dropout on the sinusoids, constant within a sequence."""
    p_dropres: float = 0.0
    """Dropout on the output of each residual branch."""
    p_droplyr: float = 0.0
    """LayerDrop probability: one draw per unit and example, constant within a sequence."""
    e_tie: bool = False
    """Tie the output weights to the embeddings."""
    e_preln: bool = False
    """Apply a norm before the output projection."""
    e_scale: float = 1.0
    """Multiplier of the logits."""
    n_expert: int = 0
    """Experts of an MoE block after each unit; 0: none, as in the paper."""
    n_choice: int = 2
    """Experts per token (top-k routing)."""
    widening: float = 2.0
    """Hidden size of an expert: 2/3 of this times d_model, rounded up to a multiple of 8."""
    balance_weight: float = 0.01
    """Weight of the load-balancing loss, which penalises uneven use of experts."""
    z_weight: float = 0.001
    """Weight of the router z-loss, which keeps the router's logits small."""
    c_beta: float = 1e-4
    """Weight of the commitment loss."""
    c_gamma: float = 0.99
    """Decay of the codebook's moving averages."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations. Parameters, codebooks, norms and logits are always float32."""
    reset_at_documents: bool = False
    """Reset the state at the start of each document."""
    restart_dead_codes: bool = False
    """Move unused codes onto keys of the current batch."""
    dead_code_below: float = 0.01
    """A code is dead if its moving-average count is below this."""
    d_condition: int = 0
    """Width of the embedding that conditions an image; 0: unconditional model."""
    n_place: int = 0
    """With `d_condition`: number of values of an image. The condition has a learned gain for each of these positions."""
    p_drop_condition: float = 0.1
    """Probability of training a sequence without its embedding, for unconditional generation and classifier-free guidance."""
    condition_noise: float = 0.0
    """Norm of the noise added to an embedding (of norm 1) in training, because predicted embeddings are inexact."""
    remat: Remat = "none"
    """Activations recomputed in the backward pass to save memory. some: everything in a unit except attention; full: the complete
    unit, for a third more compute."""

    def __post_init__(self) -> None:
        self.check_sizes("n_vocab", "d_model", "d_k", "d_v", "n_head", "n_code", "n_layer", "block_len", "mem_len")
        self.check_ids("end_id")
        if self.d_model % 2:
            raise invalid("model.d_model", self.d_model, "even (half sines, half cosines)", f"use {self.d_model + 1}")
        for name in ("p_dropemb", "p_dropsin", "p_dropres", "p_droplyr"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise invalid(f"model.{name}", getattr(self, name), "at least 0 and below 1", "use 0 for none")
        if not 0.0 < self.c_gamma < 1.0:
            raise invalid("model.c_gamma", self.c_gamma, "between 0 and 1", "use 0.99")
        if not self.pe_lam > 1.0:
            raise invalid("model.pe_lam", self.pe_lam, "above 1", "use 100000")
        if self.d_condition < 0:
            raise invalid("model.d_condition", self.d_condition, "0 or more", "use 0 for none")
        if (self.n_place > 0) != (self.d_condition > 0):
            needs = "the values of an image where model.d_condition is set, else 0"
            raise invalid("model.n_place", self.n_place, needs, "use data.sequence_len, or 0 without model.d_condition")
        if not 0.0 <= self.p_drop_condition <= 1.0:
            raise invalid("model.p_drop_condition", self.p_drop_condition, "between 0 and 1", "use 0.1, or 0 for never")
        if not self.condition_noise >= 0.0:
            raise invalid("model.condition_noise", self.condition_noise, "0 or more", "use 0 for none")
        if self.n_expert < 0 or (self.n_expert and not 1 <= self.n_choice <= self.n_expert):
            needs = "0 experts, or at least as many as model.n_choice (1 or more)"
            raise invalid("model.n_expert / model.n_choice", (self.n_expert, self.n_choice), needs, "use 8 and 2")
        if not self.widening > 0:
            raise invalid("model.widening", self.widening, "above 0", "use 2")
        if self.balance_weight < 0 or self.z_weight < 0:
            got = (self.balance_weight, self.z_weight)
            raise invalid("model.balance_weight / model.z_weight", got, "0 or more", "use 0 for none")
        if self.c_beta < 0.0:
            raise invalid("model.c_beta", self.c_beta, "0 or more", "use 0.0001")

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Raise an error if the mesh does not divide the model evenly."""
        check_divides("model.d_model", self.d_model, "fsdp", sizes)
        if self.n_head > 1:
            check_divides("model.n_head", self.n_head, "model", sizes)
        else:
            check_divides("model.d_v", self.d_v, "model", sizes)
        if self.n_expert:
            check_divides("model.n_expert", self.n_expert, "expert", sizes)
            check_divides("the experts' hidden width", ffn_size(self.d_model, self.widening), "model", sizes)
        else:
            check_no_experts(sizes)

    def check_lengths(self, sequence_len: int, update_len: int) -> None:
        """Raise an error unless blocks divide an update and, in a conditional model, a sequence is exactly one image."""
        if self.d_condition and sequence_len != self.n_place:
            needs = f"data.sequence_len ({sequence_len}), one image"
            raise invalid("model.n_place", self.n_place, needs, f"use --model.n-place {sequence_len}")
        if update_len % self.block_len:
            raise invalid(
                "data.update_len",
                update_len,
                f"a multiple of model.block_len ({self.block_len})",
                f"use {-(-update_len // self.block_len) * self.block_len}, or a block_len that divides it",
            )

    @property
    def routing(self) -> tuple[int, int] | None:
        return (self.n_expert, self.n_choice) if self.n_expert else None

    @property
    def condition_width(self) -> int:
        return self.d_condition

    @property
    def can_guide(self) -> bool:
        return self.p_drop_condition > 0

    @property
    def update_multiple(self) -> int:
        return self.block_len

    def for_single_tokens(self) -> VQConfig:
        return dataclasses.replace(self, block_len=1)

    @property
    def n_unit(self) -> int:
        """Number of gated attention units: two per layer."""
        return 2 * self.n_layer
