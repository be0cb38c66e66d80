"""The `prior` family for the trainer: the diffusion loss of a batch of embedding pairs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from linnet.core import rng
from linnet.models.base import Aux, Keys
from linnet.models.prior import diffusion
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.diffusion import SELF_CONDITIONED
from linnet.models.prior.flops import flops_of
from linnet.models.prior.layers import unit
from linnet.models.prior.params import RULES, PriorParams, param_specs

name = "prior"


def buffer_specs(cfg: PriorConfig) -> None:
    """Return None: the model has no buffers."""
    del cfg


def empty_carry(cfg: PriorConfig, batch_size: int) -> None:
    """Return None: pairs are independent, so there is no carry."""
    del cfg, batch_size


def carry_axes(carry: None) -> None:
    del carry


def loss(
    params: PriorParams,
    buffers: None,
    carry: None,
    batch: Any,
    keys: Keys | None,
    first_row: int | Int[Array, ""],
    cfg: PriorConfig,
) -> tuple[Float[Array, ""], Aux]:
    """Mean over the rows of a `PairBatch`, all of which count in training."""
    del buffers, carry
    assert keys is not None, "a diffusion loss is random: evaluation draws by keys of its own"
    draws = diffusion.draw(rng.fold_in_name(keys.update, "diffusion"), first_row, len(batch.image_embed), cfg)
    encodings, text = batch.encodings if cfg.text_encodings else None, batch.text_embed
    if cfg.text_noise:
        text = _blurred(rng.fold_in_name(keys.update, "text"), text, first_row, cfg.text_noise)
    value = diffusion.loss(params, batch.image_embed, text, encodings, draws, cfg)
    return value, Aux(metrics={"loss_diffusion": value}, statistics=None, carry=None)


def _blurred(
    key: PRNGKeyArray, text: Float[Array, "B X"], first_row: int | Int[Array, ""], amount: float
) -> Float[Array, "B X"]:
    """Add noise to text embeddings and restore their norm. The noise depends on a row's index in the global batch."""
    width = text.shape[1]
    noise = jax.vmap(lambda i: jax.random.normal(rng.fold_in(key, i), (width,)))(first_row + jnp.arange(len(text)))
    length = jnp.linalg.norm(text, axis=1, keepdims=True)
    return unit(text + amount * length * width**-0.5 * noise) * length


def merge_statistics(a: None, b: None) -> None:
    del a, b


def update_buffers(buffers: None, statistics: None, cfg: PriorConfig) -> None:
    del buffers, statistics, cfg


def diagnostics(buffers: None, metrics: dict[str, Array], cfg: PriorConfig) -> dict[str, Any]:
    del buffers, metrics, cfg
    return {}


def alarms(figures: dict[str, Any], least: float, cfg: PriorConfig) -> dict[int, str]:
    """Return no warnings: the model has no parts that can collapse."""
    del figures, least, cfg
    return {}


def flops_per_token(cfg: PriorConfig) -> int:
    """Return the FLOPs per pair, over all tokens of its sequence."""
    n_text = (cfg.max_text_len if cfg.text_encodings or not cfg.masks_text else 0) + cfg.n_text_token
    passes = 1 + SELF_CONDITIONED / 3 if cfg.self_cond else 1  # the first prediction has no backward pass
    return int(passes * flops_of(cfg, n_text + cfg.n_new_token, n_past=0, n_last=1))


__all__ = [
    "RULES",
    "alarms",
    "buffer_specs",
    "carry_axes",
    "diagnostics",
    "empty_carry",
    "flops_per_token",
    "loss",
    "merge_statistics",
    "name",
    "param_specs",
    "update_buffers",
]
