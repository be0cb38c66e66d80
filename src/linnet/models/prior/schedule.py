"""Noise schedules: the tables of a diffusion, computed once in float64 and stored in float32, and functions that apply them.

Letters: T steps of the diffusion, B rows, D width. `t` holds one step per row.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from linnet.models.prior.config import Schedule

COSINE_OFFSET = 0.008
LARGEST_BETA = 0.999
SMALLEST_VARIANCE = 1e-20
FIRST_BETA, LAST_BETA = 1e-4, 0.02  # for 1000 steps


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    betas: Float[np.ndarray, " T"]
    alphas_cumprod: Float[np.ndarray, " T"]
    alphas_cumprod_prev: Float[np.ndarray, " T"]
    sqrt_alphas_cumprod: Float[np.ndarray, " T"]
    sqrt_one_minus_alphas_cumprod: Float[np.ndarray, " T"]
    log_one_minus_alphas_cumprod: Float[np.ndarray, " T"]
    sqrt_recip_alphas_cumprod: Float[np.ndarray, " T"]
    sqrt_recipm1_alphas_cumprod: Float[np.ndarray, " T"]
    posterior_variance: Float[np.ndarray, " T"]
    posterior_log_variance_clipped: Float[np.ndarray, " T"]
    posterior_mean_coef1: Float[np.ndarray, " T"]
    """Coefficient of the start."""
    posterior_mean_coef2: Float[np.ndarray, " T"]
    """Coefficient of the noised value."""


def betas(name: Schedule, n: int) -> Float[np.ndarray, " T"]:
    """Return the noise variance added by each of `n` steps, in float64 (jsd in float32, as in the reference)."""
    first, last = FIRST_BETA * 1000 / n, LAST_BETA * 1000 / n
    if name == "cosine":
        fraction = (np.linspace(0, n, n + 1) / n + COSINE_OFFSET) / (1 + COSINE_OFFSET)
        kept = np.cos(fraction * np.pi * 0.5) ** 2
        return np.clip(1 - kept[1:] / kept[:-1], 0, LARGEST_BETA)
    if name == "linear":
        return np.linspace(first, last, n)
    if name == "quadratic":
        return np.linspace(first**0.5, last**0.5, n) ** 2
    if name == "sigmoid":
        return (last - first) / (1 + np.exp(-np.linspace(-6, 6, n))) + first
    return np.float32(1) / np.linspace(n, 1, n).astype(np.float32)  # jsd


@lru_cache(maxsize=32)
def tables(name: Schedule, n: int) -> Tables:
    beta = betas(name, n)
    alpha = 1 - beta
    kept = np.cumprod(alpha, dtype=np.float64).astype(beta.dtype)
    before = np.concatenate([np.ones(1, beta.dtype), kept[:-1]])
    with np.errstate(divide="ignore"):  # the last step of jsd keeps nothing
        variance = beta * (1 - before) / (1 - kept)
        found = {
            "betas": beta,
            "alphas_cumprod": kept,
            "alphas_cumprod_prev": before,
            "sqrt_alphas_cumprod": np.sqrt(kept),
            "sqrt_one_minus_alphas_cumprod": np.sqrt(1 - kept),
            "log_one_minus_alphas_cumprod": np.log(1 - kept),
            "sqrt_recip_alphas_cumprod": np.sqrt(1 / kept),
            "sqrt_recipm1_alphas_cumprod": np.sqrt(1 / kept - 1),
            "posterior_variance": variance,
            "posterior_log_variance_clipped": np.log(np.maximum(variance, SMALLEST_VARIANCE)),
            "posterior_mean_coef1": beta * np.sqrt(before) / (1 - kept),
            "posterior_mean_coef2": (1 - before) * np.sqrt(alpha) / (1 - kept),
        }
    return Tables(**{key: value.astype(np.float32) for key, value in found.items()})


def p2_weights(table: Tables, gamma: float, k: float = 1.0) -> Float[np.ndarray, " T"]:
    """Return the reference's P2 loss weights; with gamma 0 all are 1."""
    kept = table.alphas_cumprod.astype(np.float64)
    return ((k + kept / (1 - kept)) ** -gamma).astype(np.float32)


def min_snr_weights(table: Tables, gamma: float, objective: str) -> Float[np.ndarray, " T"]:
    """Return Min-SNR loss weights: a step's error, expressed as an error of the start, has a weight of at most `gamma`."""
    kept = table.alphas_cumprod.astype(np.float64)
    ratio = kept / np.maximum(1 - kept, 1e-12)
    capped = np.minimum(ratio, gamma)
    of = {"x_start": np.ones_like(ratio), "noise": np.maximum(ratio, 1e-12), "v": ratio + 1}[objective]
    return (capped / of).astype(np.float32)


def at(table: Float[np.ndarray, " T"], t: Int[Array, " B"]) -> Float[Array, "B 1"]:
    return jnp.asarray(table)[t][:, None]


def q_sample(table: Tables, x0: Float[Array, "B D"], t: Int[Array, " B"], noise: Float[Array, "B D"]) -> Array:
    """Add the noise of step `t` to the start."""
    return at(table.sqrt_alphas_cumprod, t) * x0 + at(table.sqrt_one_minus_alphas_cumprod, t) * noise


def q_sample_from_to(
    table: Tables, x: Float[Array, "B D"], t: Int[Array, " B"], to: Int[Array, " B"], noise: Float[Array, "B D"]
) -> Array:
    """Move from the noise level of step `t` to that of step `to`, as in the reference."""
    alpha, sigma = at(table.sqrt_alphas_cumprod, t), at(table.sqrt_one_minus_alphas_cumprod, t)
    alpha_to, sigma_to = at(table.sqrt_alphas_cumprod, to), at(table.sqrt_one_minus_alphas_cumprod, to)
    return x * (alpha_to / alpha) + noise * (sigma_to * alpha - sigma * alpha_to) / alpha


def velocity(table: Tables, x0: Float[Array, "B D"], t: Int[Array, " B"], noise: Float[Array, "B D"]) -> Array:
    return at(table.sqrt_alphas_cumprod, t) * noise - at(table.sqrt_one_minus_alphas_cumprod, t) * x0


def start_from_velocity(table: Tables, x: Float[Array, "B D"], t: Int[Array, " B"], v: Float[Array, "B D"]) -> Array:
    return at(table.sqrt_alphas_cumprod, t) * x - at(table.sqrt_one_minus_alphas_cumprod, t) * v


def start_from_noise(table: Tables, x: Float[Array, "B D"], t: Int[Array, " B"], noise: Float[Array, "B D"]) -> Array:
    return at(table.sqrt_recip_alphas_cumprod, t) * x - at(table.sqrt_recipm1_alphas_cumprod, t) * noise


def noise_from_start(table: Tables, x: Float[Array, "B D"], t: Int[Array, " B"], x0: Float[Array, "B D"]) -> Array:
    return (at(table.sqrt_recip_alphas_cumprod, t) * x - x0) / at(table.sqrt_recipm1_alphas_cumprod, t)


def posterior_mean(table: Tables, x0: Float[Array, "B D"], x: Float[Array, "B D"], t: Int[Array, " B"]) -> Array:
    return at(table.posterior_mean_coef1, t) * x0 + at(table.posterior_mean_coef2, t) * x
