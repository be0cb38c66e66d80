"""Codebook diagnostics under the reference's names, computed only on steps that log them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import VQBuffers
from linnet.nn.codebook import MIN_COUNT, code_vectors

MIN_USAGE, MAX_USAGE = 1.0, 1e6  # counts outside of this range are counted in c_thresh_oob


def codebook_stats(buffers: VQBuffers, metrics: dict[str, Array], cfg: VQConfig) -> dict[str, Any]:
    """Return scalars averaged over units, and under "codebook" one list per statistic with one value per unit."""
    scalars, rows = _compute(buffers, cfg.dead_code_below)
    rows = rows | {"usage": metrics["unit_usage"], "relative_err": metrics["unit_relative_err"]}
    return {
        **{name: float(value) for name, value in scalars.items()},
        "codebook": {name: [float(v) for v in values] for name, values in rows.items()},
    }


@functools.partial(jax.jit, static_argnums=1)
def _compute(buffers: VQBuffers, dead_below: float) -> tuple[dict[str, Array], dict[str, Float[Array, " G"]]]:
    codes = code_vectors(buffers.code_count, buffers.code_total)  # G H S K
    usage = jnp.maximum(buffers.code_count, MIN_COUNT)
    norm = jnp.linalg.norm(codes, axis=-1)
    unit = codes / jnp.maximum(norm, 1e-9)[..., None]
    n_code = codes.shape[2]
    others = ~jnp.eye(n_code, dtype=bool)
    similarity = jnp.einsum("ghsk,ghtk->ghst", unit, unit)
    square = norm**2
    distance = jnp.einsum("ghsk,ghtk->ghst", codes, codes)
    distance = jnp.sqrt(jnp.maximum(square[..., :, None] + square[..., None, :] - 2 * distance, 0.0))
    fraction = usage / jnp.sum(usage, axis=-1, keepdims=True)
    entropy = -jnp.sum(fraction * jnp.log(fraction), axis=-1)  # G H
    out_of_range = jnp.sum((buffers.code_count < MIN_USAGE) | (buffers.code_count > MAX_USAGE), axis=-1)
    scalars = {
        **_spread("c_sim", similarity, others),
        **_spread("c_dist", distance, others),
        **_spread("c_norm", norm, None),
        **_spread("c_usage", usage, None),
        "c_thresh_oob": jnp.mean(out_of_range.astype(jnp.float32)),
        "c_entropy": jnp.mean(entropy),
    }
    rows = {
        "entropy": jnp.mean(entropy, axis=1),
        "perplexity": jnp.mean(jnp.exp(entropy), axis=1),
        "dead": jnp.sum(buffers.code_count < dead_below, axis=(1, 2)),
    }
    return scalars, rows


def _spread(name: str, x: Float[Array, "G H *S"], where: Array | None) -> dict[str, Array]:
    """Return the minimum, mean and maximum of each codebook, averaged over codebooks."""
    axes = tuple(range(2, x.ndim))
    return {
        f"{name}_min": jnp.mean(jnp.min(x, axis=axes, where=where, initial=jnp.inf)),
        f"{name}_mean": jnp.mean(jnp.mean(x, axis=axes, where=where)),
        f"{name}_max": jnp.mean(jnp.max(x, axis=axes, where=where, initial=-jnp.inf)),
    }
