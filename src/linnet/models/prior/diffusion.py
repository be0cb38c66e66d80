"""Diffusion loss: an embedding is noised, and the network predicts the start, the noise or the velocity.

Letters: B rows, L text tokens, D width, X width of text. Random numbers depend on a row's index in the global batch, so splitting it
into micro-batches or over hosts changes nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from linnet.core import rng
from linnet.core.pytree import pytree
from linnet.models.prior import schedule as noise_of
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.network import network
from linnet.models.prior.params import PriorParams
from linnet.models.prior.tokens import padding_of
from linnet.nn.norm import l2_normalize

SELF_CONDITIONED = 0.5  # fraction of the rows that are conditioned on a first prediction


@pytree
class Draws:
    """Random inputs of each row's loss."""

    times: Int[Array, " B"]
    noise: Float[Array, "B D"]
    keep_text: Bool[Array, " B"]
    keep_image: Bool[Array, " B"]
    self_conditioned: Bool[Array, " B"]
    dropout: Key[Array, " B"] | None


def draw(key: PRNGKeyArray, first_row: int | Int[Array, ""], n_row: int, cfg: PriorConfig) -> Draws:
    """Draw the random inputs of `n_row` rows from `first_row` on, in the batch of `key`."""

    def row(i: Array) -> Draws:
        mine = rng.fold_in(key, i)

        def chance(name: str, p: float) -> Array:
            return jax.random.uniform(rng.fold_in_name(mine, name)) < p

        return Draws(
            times=jax.random.randint(rng.fold_in_name(mine, "times"), (), 0, cfg.timesteps),
            noise=jax.random.normal(rng.fold_in_name(mine, "noise"), (cfg.dim,)),
            keep_text=~chance("text", cfg.p_drop_text),
            keep_image=~chance("image", cfg.p_drop_image),
            self_conditioned=chance("self", SELF_CONDITIONED),
            dropout=rng.fold_in_name(mine, "dropout") if cfg.p_drop_attention or cfg.p_drop_ff else None,
        )

    return jax.vmap(row)(first_row + jnp.arange(n_row))


def row_losses(
    params: PriorParams,
    image_embed: Float[Array, "B D"],
    text_embed: Float[Array, "B X"],
    encodings: Float[Array, "B L X"] | None,
    draws: Draws,
    cfg: PriorConfig,
) -> Float[Array, " B"]:
    """Return each row's loss, the mean over its width, in float32. The batch loss is their mean."""
    table = noise_of.tables(cfg.schedule, cfg.timesteps)
    x0 = image_embed.astype(jnp.float32) * cfg.scale
    t, noise = draws.times, draws.noise
    noised = noise_of.q_sample(table, x0, t, noise)
    known, padding = None, padding_of(encodings, cfg)
    if cfg.self_cond:
        # As in the reference: the raw network output for any objective, computed without dropping conditions.
        first = network(params, noised, t, text_embed, encodings, None, None, None, cfg, padding=padding)
        known = jax.lax.stop_gradient(jnp.where(draws.self_conditioned[:, None], first, 0.0))
    keep = (draws.keep_text, draws.keep_image)
    predicted = network(
        params, noised, t, text_embed, encodings, *keep, known, cfg, padding=padding, dropout=draws.dropout
    )
    return row_errors(predicted, x0, draws, cfg)


def row_errors(
    predicted: Float[Array, "B D"], x0: Float[Array, "B D"], draws: Draws, cfg: PriorConfig
) -> Float[Array, " B"]:
    """Return the loss of the network's outputs for the scaled start `x0`."""
    table = noise_of.tables(cfg.schedule, cfg.timesteps)
    if cfg.objective == "x_start" and cfg.normalize_training:
        predicted = l2_normalize(predicted) * cfg.scale
    target = {"x_start": x0, "noise": draws.noise}.get(cfg.objective)
    target = noise_of.velocity(table, x0, draws.times, draws.noise) if target is None else target
    losses = jnp.mean(_distance(predicted - target, cfg), axis=-1)
    if cfg.min_snr_gamma is None:
        return losses
    return losses * jnp.asarray(noise_of.min_snr_weights(table, cfg.min_snr_gamma, cfg.objective))[draws.times]


def _distance(error: Float[Array, "B D"], cfg: PriorConfig) -> Float[Array, "B D"]:
    if cfg.loss == "l1":
        return jnp.abs(error)
    if cfg.loss == "l2":
        return error * error
    size = jnp.abs(error)
    return jnp.where(size < 1, 0.5 * error * error, size - 0.5)


def loss(
    params: PriorParams,
    image_embed: Float[Array, "B D"],
    text_embed: Float[Array, "B X"],
    encodings: Float[Array, "B L X"] | None,
    draws: Draws,
    cfg: PriorConfig,
) -> Float[Array, ""]:
    return jnp.mean(row_losses(params, image_embed, text_embed, encodings, draws, cfg))
