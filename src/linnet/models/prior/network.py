"""The network: a causal transformer over text, time, the noised image and a query token, whose output is the prediction.

Letters: B rows, L text tokens, N new tokens, D width, X width of text, Y layers, S preceding positions (the null key, then tokens
read earlier), K width of a head.

The text comes first and attention is causal, so the text's KV cache does not depend on the step. `read_text` computes it once;
`denoise` processes the few tokens that change. `network` processes everything in one pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from linnet.core import rng
from linnet.core.pytree import pytree
from linnet.models.prior import layers
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.params import LayerParams, PriorParams
from linnet.models.prior.tokens import new_tokens, text_tokens
from linnet.nn.linear import linear
from linnet.nn.norm import layer_norm
from linnet.nn.remat import checkpointed

Layer = tuple[Float[Array, "B Q D"], Float[Array, "B N K"], Float[Array, "B N K"]]


@pytree
class TextMemory:
    """KV cache of the text's tokens."""

    keys: Float[Array, "Y B S K"]
    values: Float[Array, "Y B S K"]
    seen: Bool[Array, "B S"] | None  # None: all are visible
    positions: Int[Array, "B S"] | None = None
    """Positions of the keys plus one, if rows differ. None: storage order."""


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
    padding: Bool[Array, "B L"] | None = None,
    dropout: Key[Array, " B"] | None = None,
) -> Float[Array, "B D"]:
    """Return the prediction in float32. Conditions that are not kept are dropped (None: all are kept). `mask`, `padding`: see
    `text_tokens`. `dropout`: one key per row."""
    text, seen = text_tokens(params, text_embed, encodings, keep_text, cfg, mask=mask, padding=padding)
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
    padding: Bool[Array, "B L"] | None = None,
    n_encodings: Int[Array, " B"] | None = None,
) -> TextMemory:
    """Return the text's KV cache, for every step of the diffusion. `n_encodings`: in a `mask` model, how many of a row's encodings
    are part of the sequence (None: all); the others must be `padding`."""
    tokens, seen = text_tokens(params, text_embed, encodings, keep_text, cfg, mask=mask, padding=padding)
    past = no_text(params, len(tokens), cfg)
    positions = None if n_encodings is None else _positions(n_encodings, tokens, cfg)
    x, keys, values = _run(params, _in(params, tokens, cfg), past, seen, cfg, positions=positions)
    last = _layer(params, -1)
    normed = layer_norm(x, last.attention_gain, cfg.norms)
    first = past.keys.shape[2] - 1 if positions is None else _row_positions(positions, x.shape[1])
    k, v = layers.keys_values(normed, last, first, cfg)
    keys, values = (jnp.concatenate([a, b[None]]) for a, b in ((keys, k), (values, v)))
    return TextMemory(
        keys=jnp.concatenate([past.keys, keys], axis=2),
        values=jnp.concatenate([past.values, values], axis=2),
        seen=seen,
        positions=positions,
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
    """Return the prediction, given the text's KV cache."""
    tokens = new_tokens(params, image_embed, times, keep_image, self_cond, cfg)
    positions = memory.positions
    if positions is not None:
        positions = jnp.concatenate([positions, positions[:, -1:] + 1 + jnp.arange(tokens.shape[1])], axis=1)
    return predict(params, tokens, _more(memory.seen, tokens), memory, cfg, positions=positions)


def predict(
    params: PriorParams,
    tokens: Float[Array, "B N D"],
    seen: Bool[Array, "B SN"] | None,
    past: TextMemory,
    cfg: PriorConfig,
    *,
    dropout: Key[Array, " B"] | None = None,
    positions: Int[Array, "B SN"] | None = None,
) -> Float[Array, "B D"]:
    """Run all layers. In the last one only the last token is computed, because only its output is used."""
    x, _, _ = _run(params, _in(params, tokens, cfg), past, seen, cfg, dropout, positions)
    at = cfg.depth - 1
    keys, values = past.keys[at], past.values[at]
    x, _, _ = layer(
        x, _layer(params, at), at, keys, values, params.bias, seen, cfg, dropout, n_query=1, positions=positions
    )
    return head(params, x[:, 0], cfg).astype(jnp.float32)


def layer(
    x: Float[Array, "B N D"],
    p: LayerParams,
    number: int | Int[Array, ""],
    past_keys: Float[Array, "B S K"],
    past_values: Float[Array, "B S K"],
    bias: Float[Array, "32 H"],
    seen: Bool[Array, "B SN"] | None,
    cfg: PriorConfig,
    dropout: Key[Array, " B"] | None = None,
    n_query: int | None = None,
    positions: Int[Array, "B SN"] | None = None,
) -> Layer:
    """Return a layer's outputs (of the last `n_query` tokens, if given) and the keys and values of its tokens."""
    first, n_token = past_keys.shape[1] - 1, x.shape[1]
    n_query = n_query or n_token
    at = first + n_token - n_query
    normed = layer_norm(x, p.attention_gain, cfg.norms)
    k, v = layers.keys_values(normed, p, first if positions is None else _row_positions(positions, n_token), cfg)
    keys, values = jnp.concatenate([past_keys, k], axis=1), jnp.concatenate([past_values, v], axis=1)
    looks = jnp.asarray(layers.visible(at, n_query))
    looks = looks if seen is None else looks & seen[:, None]
    drop_attention, drop_ff = _dropout(dropout, number)
    bias = bias if cfg.bias_scale == 1.0 else bias * cfg.bias_scale
    where = at if positions is None else _row_positions(positions, n_query)
    table = layers.position_bias(bias, at, n_query) if isinstance(where, int) else layers.row_bias(bias, where)
    x = x[:, -n_query:]
    x = x + layers.attend(normed[:, -n_query:], p, keys, values, table, looks, where, cfg, drop_attention)
    return x + layers.feed_forward(x, p, cfg, drop_ff), k, v


def head(params: PriorParams, x: Float[Array, "*B D"], cfg: PriorConfig) -> Float[Array, "*B D"]:
    if params.out_gain is not None:
        x = layer_norm(x, params.out_gain, cfg.last_norm)
    return x if params.w_proj is None else linear(x, params.w_proj, transpose_inputs=True)[..., : cfg.dim]


def no_text(params: PriorParams, n_row: int, cfg: PriorConfig) -> TextMemory:
    """Return a cache with only the null key and value, which precede all tokens."""
    stack = params.layers
    null = stack.null_kv if isinstance(stack, LayerParams) else jnp.stack([p.null_kv for p in stack])
    null = jnp.broadcast_to(null[:, None, :, None].astype(cfg.dtype), (cfg.depth, n_row, 2, 1, cfg.d_head))
    return TextMemory(keys=layers.scaled_key(null[:, :, 0], cfg), values=null[:, :, 1], seen=None)


def _in(params: PriorParams, tokens: Float[Array, "B N D"], cfg: PriorConfig) -> Float[Array, "B N D"]:
    return tokens if params.in_gain is None else layer_norm(tokens, params.in_gain, cfg.norms)


def _run(
    params: PriorParams,
    x: Float[Array, "B N D"],
    past: TextMemory,
    seen: Bool[Array, "B SN"] | None,
    cfg: PriorConfig,
    dropout: Key[Array, " B"] | None = None,
    positions: Int[Array, "B SN"] | None = None,
) -> tuple[Float[Array, "B N D"], Float[Array, "Y1 B N K"], Float[Array, "Y1 B N K"]]:
    """Run all layers except the last. Also returns their keys and values."""
    n = cfg.depth - 1

    def one(x: Array, inputs: tuple[LayerParams, int | Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        p, number, keys, values = inputs
        x, k, v = layer(x, p, number, keys, values, params.bias, seen, cfg, dropout, positions=positions)
        return x, (k, v)

    if isinstance(params.layers, LayerParams):
        body = checkpointed(one, cfg.remat)
        some = jax.tree.map(lambda w: w[:n], params.layers)
        x, (keys, values) = jax.lax.scan(body, x, (some, jnp.arange(n), past.keys[:n], past.values[:n]))
        return x, keys, values
    new = []
    for i in range(n):
        x, kv = one(x, (params.layers[i], i, past.keys[i], past.values[i]))
        new.append(kv)
    if not new:
        empty = jnp.zeros((0, *x.shape[:2], cfg.d_head), x.dtype)
        return x, empty, empty
    return x, jnp.stack([k for k, _ in new]), jnp.stack([v for _, v in new])


def _layer(params: PriorParams, i: int) -> LayerParams:
    return jax.tree.map(lambda w: w[i], params.layers) if isinstance(params.layers, LayerParams) else params.layers[i]


def _positions(n_encodings: Int[Array, " B"], tokens: Float[Array, "B N D"], cfg: PriorConfig) -> Int[Array, "B S"]:
    """Return the positions of the null key, the encodings, and the text embedding, which follows the row's last encoding."""
    n_room = tokens.shape[1] - cfg.n_text_token
    before = jnp.broadcast_to(jnp.arange(n_room + 1), (len(tokens), n_room + 1))
    return jnp.concatenate([before, n_encodings[:, None] + 1 + jnp.arange(cfg.n_text_token)], axis=1)


def _row_positions(positions: Int[Array, "B SN"], n_query: int) -> layers.RowPositions:
    return layers.RowPositions(of_query=positions[:, -n_query:] - 1, of_key=positions, n=positions.shape[1])


def _more(seen: Bool[Array, "B S"] | None, new: Float[Array, "B N D"]) -> Bool[Array, "B SN"] | None:
    return None if seen is None else jnp.pad(seen, [(0, 0), (0, new.shape[1])], constant_values=True)


def _dropout(
    keys: Key[Array, " B"] | None, number: int | Int[Array, ""]
) -> tuple[Key[Array, " B"] | None, Key[Array, " B"] | None]:
    if keys is None:
        return None, None
    here = jax.vmap(lambda key: rng.fold_in(key, number))(keys)
    attention, ff = (jax.vmap(lambda key, name=name: rng.fold_in_name(key, name))(here) for name in ("attention", "ff"))
    return attention, ff


def flops_of(cfg: PriorConfig, n_token: int, *, n_past: int, n_last: int) -> float:
    """Return the FLOPs of one row's forward pass over `n_token` tokens after `n_past` others; products that are skipped are not
    counted. In the last layer all tokens have keys and values, but only `n_last` are computed further."""
    wide, hidden = cfg.n_head * cfg.d_head, cfg.ff_mult * cfg.dim
    of_keys, of_rest = 2 * cfg.dim * 2 * cfg.d_head, 2 * cfg.dim * (2 * wide + 3 * hidden)
    looking = 2 * 2 * wide * (1 + n_past + n_token)
    full_layers = (cfg.depth - 1) * n_token * (of_keys + of_rest + looking)
    return full_layers + n_token * of_keys + n_last * (of_rest + looking + 2 * cfg.dim**2 * cfg.final_proj)
