"""The network: a causal transformer over text, time, the noised image and a query, whose output there is the prediction.

Letters: B rows, L text tokens, N tokens read now, D width, X width of text, Y layers, S places before (the null key, then tokens
read earlier), K width of a head.

The text comes first and attention is causal, so what its tokens leave behind, keys and values in every layer, does not depend on
the step. `read_text` computes it once; `denoise` reads the few tokens that change. `network` reads all in one go.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from linnet import rng
from linnet.families.prior import layers as parts
from linnet.families.prior.config import PriorConfig
from linnet.families.prior.params import LayerParams, PriorParams
from linnet.families.prior.tokens import new_tokens, text_tokens
from linnet.families.remat import checkpointed
from linnet.pytree import pytree

Layer = tuple[Float[Array, "B N D"], Float[Array, "B N K"], Float[Array, "B N K"]]


@pytree
class TextMemory:
    """What the text's tokens left behind."""

    keys: Float[Array, "Y B S K"]
    values: Float[Array, "Y B S K"]
    seen: Bool[Array, "B S"] | None  # none: all are


def network(
    params: PriorParams,
    image_embed: Float[Array, "B D"],
    times: Shaped[Array, " B"],
    text_embed: Float[Array, "B X"],
    encodings: Float[Array, "B L X"] | None,
    keep_text: Bool[Array, " B"] | None,
    keep_image: Bool[Array, " B"] | None,
    self_cond: Float[Array, "B D"] | None,
    cfg: PriorConfig,
    *,
    mask: Bool[Array, "B L"] | None = None,
    dropout: PRNGKeyArray | None = None,
) -> Float[Array, "B D"]:
    """The prediction, in float32. Conditions that are not kept are dropped (none: all are kept). `dropout`: a key for every row."""
    text, seen = text_tokens(params, text_embed, encodings, keep_text, cfg, mask=mask)
    new = new_tokens(params, image_embed, times, keep_image, self_cond, cfg)
    tokens = jnp.concatenate([text, new], axis=1)
    nothing = no_text(params, len(tokens), cfg)
    return predict(params, tokens, _more(seen, new), nothing, cfg, dropout=dropout)


def read_text(
    params: PriorParams,
    text_embed: Float[Array, "B X"],
    encodings: Float[Array, "B L X"] | None,
    keep_text: Bool[Array, " B"] | None,
    cfg: PriorConfig,
    *,
    mask: Bool[Array, "B L"] | None = None,
) -> TextMemory:
    """What the text leaves behind for every step of the diffusion."""
    tokens, seen = text_tokens(params, text_embed, encodings, keep_text, cfg, mask=mask)
    past = no_text(params, len(tokens), cfg)
    x, keys, values = _run(params, _in(params, tokens), past, seen, cfg)
    last = _layer(params, -1)
    k, v = parts.keys_values(parts.layer_norm(x, last.attention_gain), last, past.keys.shape[2] - 1, cfg)
    keys, values = (jnp.concatenate([a, b[None]]) for a, b in ((keys, k), (values, v)))
    return TextMemory(
        keys=jnp.concatenate([past.keys, keys], axis=2),
        values=jnp.concatenate([past.values, values], axis=2),
        seen=seen,
    )


def denoise(
    params: PriorParams,
    memory: TextMemory,
    image_embed: Float[Array, "B D"],
    times: Shaped[Array, " B"],
    keep_image: Bool[Array, " B"] | None,
    self_cond: Float[Array, "B D"] | None,
    cfg: PriorConfig,
) -> Float[Array, "B D"]:
    """The prediction after a text that was read."""
    tokens = new_tokens(params, image_embed, times, keep_image, self_cond, cfg)
    return predict(params, tokens, _more(memory.seen, tokens), memory, cfg)


def predict(
    params: PriorParams,
    tokens: Float[Array, "B N D"],
    seen: Bool[Array, "B SN"] | None,
    past: TextMemory,
    cfg: PriorConfig,
    *,
    dropout: PRNGKeyArray | None = None,
) -> Float[Array, "B D"]:
    """Through all layers. Of the last one only the query's output is wanted, so only the query looks and thinks there."""
    x, _, _ = _run(params, _in(params, tokens), past, seen, cfg, dropout)
    at = cfg.depth - 1
    x, _, _ = layer(
        x, _layer(params, at), at, past.keys[at], past.values[at], params.bias, seen, cfg, dropout, n_query=1
    )
    return head(params, x[:, 0], cfg).astype(jnp.float32)


def layer(
    x: Float[Array, "B N D"],
    p: LayerParams,
    number: Any,
    past_keys: Float[Array, "B S K"],
    past_values: Float[Array, "B S K"],
    bias: Float[Array, "32 H"],
    seen: Bool[Array, "B SN"] | None,
    cfg: PriorConfig,
    dropout: PRNGKeyArray | None = None,
    n_query: int | None = None,
) -> Layer:
    """One layer's outputs (of the last `n_query` tokens, where given) and the keys and values of its tokens."""
    first, n_token = past_keys.shape[1] - 1, x.shape[1]
    n_query = n_query or n_token
    at = first + n_token - n_query
    normed = parts.layer_norm(x, p.attention_gain)
    k, v = parts.keys_values(normed, p, first, cfg)
    keys, values = jnp.concatenate([past_keys, k], axis=1), jnp.concatenate([past_values, v], axis=1)
    looks = jnp.asarray(parts.visible(at, n_query))
    looks = looks if seen is None else looks & seen[:, None]
    drop_attention, drop_ff = _dropout(dropout, number)
    table = parts.position_bias(bias, at, n_query)
    x = x[:, -n_query:]
    x = x + parts.attend(normed[:, -n_query:], p, keys, values, table, looks, at, cfg, drop_attention)
    return x + parts.feed_forward(x, p, cfg, drop_ff), k, v


def head(params: PriorParams, x: Float[Array, "*B D"], cfg: PriorConfig) -> Float[Array, "*B D"]:
    if params.out_gain is not None:
        x = parts.layer_norm(x, params.out_gain, stable=cfg.cosine_attention)
    return x if params.w_proj is None else parts.times(x, params.w_proj)[..., : cfg.dim]


def no_text(params: PriorParams, n_row: int, cfg: PriorConfig) -> TextMemory:
    """The null key and value, which stand before everything."""
    stack = params.layers
    null = stack.null_kv if isinstance(stack, LayerParams) else jnp.stack([p.null_kv for p in stack])
    null = jnp.broadcast_to(null[:, None, :, None].astype(cfg.dtype), (cfg.depth, n_row, 2, 1, cfg.d_head))
    return TextMemory(keys=parts.scaled_key(null[:, :, 0], cfg), values=null[:, :, 1], seen=None)


def _in(params: PriorParams, tokens: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
    return tokens if params.in_gain is None else parts.layer_norm(tokens, params.in_gain)


def _run(
    params: PriorParams,
    x: Float[Array, "B N D"],
    past: TextMemory,
    seen: Bool[Array, "B SN"] | None,
    cfg: PriorConfig,
    dropout: PRNGKeyArray | None = None,
) -> tuple[Float[Array, "B N D"], Float[Array, "Y1 B N K"], Float[Array, "Y1 B N K"]]:
    """All layers but the last, and what they remember."""
    n = cfg.depth - 1

    def one(x: Array, inputs: tuple[LayerParams, Any, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        p, number, keys, values = inputs
        x, k, v = layer(x, p, number, keys, values, params.bias, seen, cfg, dropout)
        return x, (k, v)

    if isinstance(params.layers, LayerParams):
        body = checkpointed(one, cfg.remat)
        some = jax.tree.map(lambda w: w[:n], params.layers)
        x, (keys, values) = jax.lax.scan(body, x, (some, jnp.arange(n), past.keys[:n], past.values[:n]))
        return x, keys, values
    made = []
    for i in range(n):
        x, kv = one(x, (params.layers[i], i, past.keys[i], past.values[i]))
        made.append(kv)
    if not made:
        empty = jnp.zeros((0, *x.shape[:2], cfg.d_head), x.dtype)
        return x, empty, empty
    return x, jnp.stack([k for k, _ in made]), jnp.stack([v for _, v in made])


def _layer(params: PriorParams, i: int) -> LayerParams:
    return jax.tree.map(lambda w: w[i], params.layers) if isinstance(params.layers, LayerParams) else params.layers[i]


def _more(seen: Bool[Array, "B S"] | None, new: Float[Array, "B N D"]) -> Bool[Array, "B SN"] | None:
    return None if seen is None else jnp.pad(seen, [(0, 0), (0, new.shape[1])], constant_values=True)


def _dropout(keys: PRNGKeyArray | None, number: Any) -> tuple[PRNGKeyArray | None, PRNGKeyArray | None]:
    if keys is None:
        return None, None
    here = jax.vmap(lambda key: rng.at(key, number))(keys)
    attention, ff = (jax.vmap(lambda key, name=name: rng.stream(key, name))(here) for name in ("attention", "ff"))
    return attention, ff
