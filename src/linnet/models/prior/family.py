"""The `prior` family for the trainer: the diffusion loss of a batch of embedding pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from linnet.core import rng
from linnet.core.pytree import replace
from linnet.models.base import Aux, EmbeddingSampler, Keys, ModelFamily
from linnet.models.prior import diffusion, sampling
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.diffusion import SELF_CONDITIONED
from linnet.models.prior.network import flops_of
from linnet.models.prior.params import RULES, PriorParams, param_specs
from linnet.models.prior.solver import make_solver
from linnet.nn.norm import l2_normalize

N_DRAWS = 4
"""Number of (timestep, noise) draws per evaluated pair, averaged to reduce the variance of its loss."""


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
    return l2_normalize(text + amount * length * width**-0.5 * noise) * length


def flops_per_token(cfg: PriorConfig) -> int:
    """Return the FLOPs per pair, over all tokens of its sequence."""
    n_text = (cfg.max_text_len if cfg.text_encodings or not cfg.masks_text else 0) + cfg.n_text_token
    passes = 1 + SELF_CONDITIONED / 3 if cfg.self_cond else 1  # the first prediction has no backward pass
    return int(passes * flops_of(cfg, n_text + cfg.n_new_token, n_past=0, n_last=1))


@partial(jax.jit, static_argnums=4)
def row_losses(
    params: PriorParams, batch: Any, key: PRNGKeyArray, first_row: int | Int[Array, ""], cfg: PriorConfig
) -> Float[Array, " B"]:
    """Return each row's loss, averaged over its draws, with no condition dropped."""
    n_row = len(batch.image_embed)
    every = jnp.ones((n_row,), bool)

    def one(total: Array, i: Array) -> tuple[Array, None]:
        draws = diffusion.draw(rng.fold_in(rng.fold_in_name(key, "draws"), i), first_row, n_row, cfg)
        draws = replace(draws, keep_text=every, keep_image=every, dropout=None)
        images, texts = jnp.asarray(batch.image_embed), jnp.asarray(batch.text_embed)
        encodings = None if batch.encodings is None else jnp.asarray(batch.encodings)
        return total + diffusion.row_losses(params, images, texts, encodings, draws, cfg), None

    total, _ = jax.lax.scan(one, jnp.zeros((n_row,), jnp.float32), jnp.arange(N_DRAWS))
    return total / N_DRAWS


FAMILY = ModelFamily(
    name="prior",
    config=PriorConfig,
    rules=RULES,
    param_specs=param_specs,
    loss=loss,
    flops_per_token=flops_per_token,
    sampler=EmbeddingSampler(
        prepare=sampling.prepared, solver=make_solver, sample=sampling.sample, row_losses=row_losses
    ),
)
