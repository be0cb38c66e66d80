"""Input tokens of the network: text encodings and embedding, time, noised image, (previous prediction,) and query.

Letters: B rows, L text tokens, N tokens of a kind, D width, X width of text.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from linnet.models.prior.config import PriorConfig
from linnet.models.prior.params import Affine, PriorParams, TimeNetwork
from linnet.nn.linear import linear
from linnet.nn.positions import sin_cos

LONGEST_WAVE = 10_000.0
# In torch's float32 (2.13 on a CPU) a cosine rounds to 1 where the sine is below this: measured between 2.673813e-4 and 2.673825e-4.
# With exact rounding the bound would be 2.4414e-4.
NEAR_ONE = 2.67382e-4


def text_tokens(
    params: PriorParams,
    text_embed: Float[Array, "B X"],
    encodings: Float[Array, "B L X"] | None,
    keep: Bool[Array, " B"] | None,
    cfg: PriorConfig,
    *,
    mask: Bool[Array, "B L"] | None = None,
    padding: Bool[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B N D"], Bool[Array, "B SN"] | None]:
    """Return the encodings followed by the embedding, and which of them (and the null key before them) are visible, None for all.
    `mask` is the argument of that name in releases that mask text, which may ignore it (`cfg.text_mask`). `padding`: positions
    without an encoding, which are always masked (the release would turn a row of zeros into NaN, by the `maximum` norms)."""
    n_row = text_embed.shape[0]
    embed = _expand(text_embed.astype(cfg.dtype), params.text_tokens, cfg.n_text_token, cfg)
    if encodings is None:
        encodings, mask, padding = jnp.zeros((n_row, 0, cfg.d_text), cfg.dtype), None, None
    keep = jnp.ones((n_row,), bool) if keep is None or not cfg.can_drop_text else keep
    if cfg.masks_text:
        real, given = _visible(encodings, mask, cfg), _project(encodings, params, cfg)
        if padding is not None:  # masked, so any values are valid that no norm turns into NaN
            filler = jnp.zeros((cfg.dim,), given.dtype).at[0].set(1)
            real, given = real & ~padding, jnp.where(padding[..., None], filler, given)
        seen = jnp.concatenate([real & keep[:, None], jnp.repeat(keep[:, None], cfg.n_text_token, axis=1)], axis=1)
        return jnp.concatenate([given, embed], axis=1), jnp.pad(seen, [(0, 0), (1, 0)], constant_values=True)
    short = max(0, cfg.max_text_len - encodings.shape[1])
    encodings = jnp.pad(encodings[:, : cfg.max_text_len], [(0, 0), (0, short), (0, 0)])
    assert params.null_encodings is not None
    real = is_encoding(encodings) & keep[:, None]
    encodings = jnp.where(real[..., None], _project(encodings, params, cfg), params.null_encodings.astype(cfg.dtype))
    if params.null_text is not None and cfg.drop_text_embedding:
        embed = jnp.where(keep[:, None, None], embed, params.null_text.astype(cfg.dtype))
    return jnp.concatenate([encodings, embed], axis=1), None


def is_encoding(encodings: Float[Array, "B L X"]) -> Bool[Array, "B L"]:
    """Return which encodings are not padding; padding is all zeros."""
    return jnp.any(encodings != 0, axis=-1)


def padding_of(encodings: Float[Array, "B L X"] | None, cfg: PriorConfig) -> Bool[Array, "B L"] | None:
    """Return the `padding` argument of `text_tokens`, for callers that mark padding by zeros."""
    return ~is_encoding(encodings) if cfg.masks_text and encodings is not None else None


def _visible(encodings: Float[Array, "B L X"], mask: Bool[Array, "B L"] | None, cfg: PriorConfig) -> Bool[Array, "B L"]:
    if mask is not None and cfg.text_mask in ("given", "given_or_nonzero"):
        return mask
    if cfg.text_mask in ("nonzero", "given_or_nonzero"):
        return is_encoding(encodings)
    return jnp.ones(encodings.shape[:2], bool)


def new_tokens(
    params: PriorParams,
    image_embed: Float[Array, "B D"],
    times: Shaped[Array, " B"],
    keep_image: Bool[Array, " B"] | None,
    self_cond: Float[Array, "B D"] | None,
    cfg: PriorConfig,
) -> Float[Array, "B N D"]:
    """Return the tokens that change from step to step. Without a previous prediction, its token is zero."""
    n_row = image_embed.shape[0]
    image = _expand(image_embed.astype(cfg.dtype), params.image_tokens, cfg.n_image_token, cfg)
    if keep_image is not None and params.null_image is not None:
        image = jnp.where(keep_image[:, None, None], image, params.null_image.astype(cfg.dtype))
    tokens = [time_tokens(params, times, cfg), image]
    if cfg.self_cond:
        known = jnp.zeros_like(image_embed)
        if self_cond is not None and cfg.self_cond_layout != "last_zeros":
            known = self_cond
        tokens += [image] if cfg.ends_with_self_cond else []
        tokens.append(known[:, None].astype(cfg.dtype))
    if not cfg.ends_with_self_cond:
        tokens.append(jnp.broadcast_to(params.query.astype(cfg.dtype), (n_row, 1, cfg.dim)))
    return jnp.concatenate(tokens, axis=1)


def time_tokens(params: PriorParams, times: Shaped[Array, " B"], cfg: PriorConfig) -> Float[Array, "B N D"]:
    if not isinstance(params.time, TimeNetwork):
        return params.time[times].astype(cfg.dtype).reshape(-1, cfg.n_time_token, cfg.dim)
    x = sinusoid(times, cfg.dim)
    if cfg.truncated_time and jnp.issubdtype(times.dtype, jnp.integer):
        x = truncated(x)  # the reference casts it to the dtype of the times
    hidden = 2 * cfg.dim * cfg.n_time_token
    x = jax.nn.silu(_affine(x, params.time.first, hidden))
    x = jax.nn.silu(_affine(x, params.time.second, hidden))
    x = _affine(x, params.time.out, cfg.dim * cfg.n_time_token)
    return x.astype(cfg.dtype).reshape(-1, cfg.n_time_token, cfg.dim)


def sinusoid(times: Shaped[Array, " B"], width: int) -> Float[Array, "B D"]:
    half = width // 2
    step = math.log(LONGEST_WAVE) / max(half - 1, 1)
    # Rounded like the reference: at time 999 an error in the last bit of a frequency changes a sine by 1e-5.
    power = np.arange(half, dtype=np.float32) * np.float32(-step)
    frequency = np.exp(power.astype(np.float64)).astype(np.float32)
    return sin_cos(times, frequency)


def truncated(waves: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Truncate sines and cosines to integers: 0, except where float32 rounds them to 1 or -1. The last bit of a value near 1 differs
    between libraries, so the other of the two decides, which is small there and accurate."""
    sine, cosine = jnp.split(waves, 2, axis=-1)
    is_one = jnp.concatenate([jnp.abs(cosine), jnp.abs(sine)], axis=-1) < NEAR_ONE
    return jnp.where(is_one, jnp.sign(waves), 0.0)


def _expand(x: Float[Array, "B X"], affine: Affine | None, n: int, cfg: PriorConfig) -> Float[Array, "B N D"]:
    if affine is not None:
        x = _affine(x, affine, n * cfg.dim)
    return x.reshape(-1, n, cfg.dim)


def _affine(x: Float[Array, "B D"], affine: Affine, n_out: int) -> Float[Array, "B E"]:
    """Apply an affine map. `SplitK` weights are padded, so extra columns are removed."""
    return (linear(x, affine.w, transpose_inputs=True)[..., :n_out] + affine.b).astype(x.dtype)


def _project(encodings: Float[Array, "B L X"], params: PriorParams, cfg: PriorConfig) -> Float[Array, "B L D"]:
    x = encodings.astype(cfg.dtype)
    return x if params.encoding is None else linear(x, params.encoding, transpose_inputs=True)[..., : cfg.dim]
