"""Configuration of a `prior` model (network, diffusion and sampling), validated on construction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from linnet.core.errors import invalid
from linnet.models.model_config import PairModelConfig
from linnet.nn.remat import Remat
from linnet.parallel.mesh import check_divides, check_no_experts

Schedule = Literal["cosine", "linear", "quadratic", "sigmoid", "jsd"]
Objective = Literal["x_start", "noise", "v"]
Loss = Literal["l1", "l2", "huber"]
Norm = Literal["plain", "maximum"]
TextConditioning = Literal["null_vectors", "learned_padding", "mask"]
TextMask = Literal["given", "given_or_nonzero", "nonzero", "all"]
SelfCondLayout = Literal["before_query", "last", "last_zeros"]
ROTATED = 32  # maximum values per head that rotary embeddings rotate
SIZES = ("dim", "depth", "n_head", "d_head", "ff_mult", "timesteps", "n_time_token", "n_image_token", "n_text_token")
OLD_RELEASES: dict[str, dict[str, Any]] = {
    "1.15": {},
    "1.6": {"text_conditioning": "learned_padding"},
    "0.15": {"text_conditioning": "mask", "text_mask": "given", "scores": "product", "last_norm": "plain"},
}
"""The settings that replace each value of the former `model.release`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriorConfig(PairModelConfig):
    EXPORT_FORMATS: ClassVar[tuple[str, ...]] = ("dalle2-prior", "dalle2-trainer")
    KEEPS_FREED_MEMORY: ClassVar[bool] = True  # a third faster for 25% more memory; a vq update would take 40% more
    FREE_WHEN_TUNED: ClassVar[frozenset[str]] = frozenset(
        (
            "p_drop_attention",
            "p_drop_ff",
            "p_drop_text",
            "p_drop_image",
            "text_noise",
            "loss",
            "min_snr_gamma",
            "dtype",
            "remat",
            "normalize_training",
            "normalize_start",
            "normalize_steps",
            "normalize_final",
            "clip_start",
        )
    )
    """Settings that fine-tuning may change: they affect training, speed or sampling, not the weights or their meaning."""
    dim: int = 256
    """Width of the image embedding and of the network."""
    text_dim: int | None = None
    """Width of the text embedding and token encodings. None: `dim`, as in the reference."""
    depth: int = 6
    """Number of layers."""
    n_head: int = 8
    """Number of query heads."""
    d_head: int = 32
    """Width of a head. There are n_head query heads, and one key and value head (multi-query attention)."""
    ff_mult: int = 4
    """Hidden width of the feed-forward layer, as a multiple of dim."""
    text_encodings: bool = False
    """Condition on the text's token encodings as well as on its embedding."""
    max_text_len: int = 0
    """Token encodings are padded or truncated to this length; 0: the network has no positions for them."""
    timesteps: int = 1000
    """Number of diffusion steps."""
    continuous_time: bool = False
    """Embed the time with a sinusoid and an MLP instead of a table."""
    n_time_token: int = 1
    """Number of tokens for the diffusion time."""
    n_image_token: int = 1
    """Number of tokens for the noised image embedding."""
    n_text_token: int = 1
    """Number of tokens for the text embedding."""
    norm_in: bool = False
    """Apply a norm to the input sequence."""
    norm_out: bool = True
    """Apply a norm after the last layer."""
    final_proj: bool = True
    """Apply a linear projection after the last norm."""
    normformer: bool = False
    """Add a norm inside the feed-forward layer."""
    rotary: bool = True
    """Use rotary position embeddings."""
    self_cond: bool = False
    """Self-conditioning: feed the previous prediction to the network (in training for half of the rows)."""
    p_drop_attention: float = 0.0
    """Dropout on the attention weights."""
    p_drop_ff: float = 0.0
    """Dropout in the feed-forward layers."""
    p_drop_text: float = 0.1
    """Probability of training a row without its text, for classifier-free guidance."""
    p_drop_image: float = 0.1
    """Probability of training a row without its noised image, for classifier-free guidance."""
    text_noise: float = 0.0
    """Noise added to text embeddings in training, relative to their norm, which is preserved. It counters overfitting on small
    datasets."""
    schedule: Schedule = "cosine"
    """Noise schedule of the diffusion."""
    objective: Objective = "x_start"
    """Prediction target of the network."""
    loss: Loss = "l2"
    """Loss between the prediction and its target."""
    min_snr_gamma: float | None = None
    """Min-SNR loss weighting: weight by the signal-to-noise ratio, capped at this. None: uniform weights."""
    image_embed_scale: float | None = None
    """Scale of embeddings before diffusion. None: sqrt(dim)."""
    normalize_training: bool = False
    """Scale the predicted start to the embedding's norm in training (x_start only)."""
    normalize_start: bool = False
    """Scale the initial noise to the embedding's norm."""
    normalize_steps: bool = False
    """Scale every predicted start to the embedding's norm while sampling (x_start only)."""
    normalize_final: bool = False
    """Normalize the result to norm 1 (x_start only)."""
    clip_start: bool = False
    """Clip predicted starts to [-1, 1] while sampling (noise and v only). The reference does this, although it clips every embedding
    scaled by sqrt(dim)."""
    scores: Literal["cosine", "product"] = "cosine"
    """Attention scores: 16 times the cosine of query and key, or their dot product divided by sqrt(d_head)."""
    bias_scale: float = 1.0
    """Multiplier of the relative position bias."""
    norms: Norm = "plain"
    """Type of all norms except the last. `maximum`: each row is first divided by its largest value."""
    last_norm: Norm = "maximum"
    """Type of the norm after the last layer (`norm_out`)."""
    text_conditioning: TextConditioning = "null_vectors"
    """Handling of missing text. `null_vectors`: learned vectors replace padding and everything dropped for guidance;
    `learned_padding`: they replace padding only, so dropping changes nothing and there is no guidance; `mask`: missing text is masked
    in attention."""
    drop_text_embedding: bool = True
    """`null_vectors`: dropping text also replaces its embedding, not only its token encodings."""
    text_mask: TextMask = "given"
    """`mask`: the token encodings that are attended to. `given`: those of a given mask, all without one; `given_or_nonzero`: without
    a mask those that are not all zeros; `nonzero`: always those; `all`."""
    self_cond_layout: SelfCondLayout = "before_query"
    """With `self_cond`: the last tokens of the sequence. `before_query`: image, previous prediction, query; `last`: image, image
    again, previous prediction, and no query; `last_zeros`: like `last`, with zeros for the prediction."""
    truncated_time: bool = False
    """`continuous_time`: truncate the sines and cosines of integer times to integers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations. Norms, softmax and the loss are always float32."""
    remat: Remat = "none"
    """Activations recomputed in the backward pass to save memory. some: everything in a layer except its matmuls with weights; full:
    the complete layer, for a third more compute."""

    def __post_init__(self) -> None:
        self.check_sizes(*SIZES)
        if self.text_dim is not None and self.text_dim < 1:
            raise invalid("model.text_dim", self.text_dim, "at least 1, or none for model.dim", "use None")
        if self.max_text_len < 0:
            raise invalid("model.max_text_len", self.max_text_len, "0 or more", "use 77 for CLIP's tokens")
        if self.text_encodings and not self.max_text_len and not self.masks_text:
            raise invalid("model.max_text_len", 0, "above 0 with model.text_encodings", "use 77 for CLIP's tokens")
        if not self.bias_scale > 0:
            raise invalid("model.bias_scale", self.bias_scale, "above 0", "use 1")
        if self.d_head % 2 and self.rotary:
            raise invalid(
                "model.d_head", self.d_head, "even (positions turn pairs of values)", f"use {self.d_head + 1}"
            )
        if self.dim % 2 and self.continuous_time:
            raise invalid("model.dim", self.dim, "even (half sines, half cosines)", f"use {self.dim + 1}")
        for name in ("p_drop_attention", "p_drop_ff"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise invalid(f"model.{name}", getattr(self, name), "at least 0 and below 1", "use 0 for none")
        for name in ("p_drop_text", "p_drop_image"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise invalid(f"model.{name}", getattr(self, name), "between 0 and 1", "use 0.1, or 0 for none")
        if not self.text_noise >= 0:
            raise invalid("model.text_noise", self.text_noise, "0 or more", "use 0 for none")
        if self.min_snr_gamma is not None and not self.min_snr_gamma > 0:
            raise invalid("model.min_snr_gamma", self.min_snr_gamma, "above 0, or none", "use 5")
        if self.image_embed_scale is not None and not self.image_embed_scale > 0:
            raise invalid(
                "model.image_embed_scale", self.image_embed_scale, "above 0, or none for sqrt(dim)", "use None"
            )

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Raise an error if the mesh does not divide the model evenly."""
        check_divides("model.dim", self.dim, "fsdp", sizes)
        check_divides("model.n_head", self.n_head, "model", sizes)
        check_divides("the hidden width, model.dim * model.ff_mult,", self.dim * self.ff_mult, "model", sizes)
        check_no_experts(sizes)

    def check_run(self, data: Any, train: Any) -> None:
        """Raise an error if evaluation takes more sampling steps than the diffusion has."""
        del data
        if any(n > self.timesteps for n in train.eval_timesteps):
            needs = f"at most the diffusion's model.timesteps ({self.timesteps})"
            raise invalid("train.eval_timesteps", train.eval_timesteps, needs, f"use {min(64, self.timesteps)}")

    @classmethod
    def from_older(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Replace the former `model.release` by what the network computes."""
        if "release" not in values:
            return values
        release = values["release"]
        if release not in OLD_RELEASES:
            needs = f"one of {', '.join(OLD_RELEASES)}: later configs say what the network computes instead"
            raise invalid("model.release", release, needs, "leave it out")
        return {name: value for name, value in values.items() if name != "release"} | OLD_RELEASES[release]

    @property
    def loss_name(self) -> str:
        return self.loss

    @property
    def n_block(self) -> int:
        return self.depth

    @property
    def scale(self) -> float:
        return math.sqrt(self.dim) if self.image_embed_scale is None else self.image_embed_scale

    @property
    def n_rotated(self) -> int:
        return min(ROTATED, self.d_head) if self.rotary else 0

    @property
    def masks_text(self) -> bool:
        """Whether missing text is masked in attention, rather than replaced by learned vectors."""
        return self.text_conditioning == "mask"

    @property
    def can_drop_text(self) -> bool:
        """Whether dropping the text changes the prediction, which guidance requires."""
        return self.text_conditioning != "learned_padding"

    @property
    def can_guide(self) -> bool:
        """Whether the model was trained with its conditions dropped at times, for guidance. Only `null_vectors` can drop the image."""
        return self.can_drop_text and self.p_drop_text > 0 and (self.masks_text or self.p_drop_image > 0)

    @property
    def n_new_token(self) -> int:
        """Number of tokens that change from step to step: time, image, (self-conditioning,) query."""
        images = 2 * self.n_image_token if self.ends_with_self_cond else self.n_image_token
        return self.n_time_token + images + 1 + (self.self_cond and not self.ends_with_self_cond)

    @property
    def ends_with_self_cond(self) -> bool:
        """Whether there is no query, and the output is read at the self-conditioning token."""
        return self.self_cond and self.self_cond_layout != "before_query"
