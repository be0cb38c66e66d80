"""Grok-1's transformer: pre- and post-norms, grouped-query attention, and a mixture of experts in every layer.

Letters: B rows, T tokens, L layers, D model width, Q query heads, H key heads, K key width, E experts, A vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from linnet.core import quant
from linnet.core.pytree import pytree
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import RULES, LayerParams, MoEParams
from linnet.nn import losses
from linnet.nn import moe as ex
from linnet.nn.gqa import SoftCap, attend
from linnet.nn.linear import linear
from linnet.nn.moe import ExpertWeights, Routing
from linnet.nn.norm import rms_norm_gain
from linnet.nn.positions import apply_rope
from linnet.nn.remat import checkpointed


@pytree
class LayerAux:
    """Auxiliary outputs of a layer, stacked over layers."""

    routing: Routing
    inner: Any
    """Outputs of attention, of the experts and of the layer, if requested."""


def forward(
    params: MoEParams,
    tokens: Int[Array, "B T"],
    cfg: MoEConfig,
    *,
    plain: bool = False,
    keep_inner: bool = False,
) -> tuple[Float[Array, "B T D"], LayerAux]:
    """Return the final hidden vectors of complete sequences. `plain`: use `moe_dense`, the oracle."""
    batch, n_token = tokens.shape
    position = jnp.broadcast_to(jnp.arange(n_token), tokens.shape)
    real = tokens != cfg.pad_id

    def layer(h: Array, p: LayerParams) -> tuple[Array, LayerAux]:
        q, k, v = project(h, p, position, cfg)
        mixed = attend(q, k, v, real, scores(cfg)).reshape(batch, n_token, -1)
        attention = rms_norm_gain(linear(mixed, p.w_o), p.attention_out_gain)
        h = h + attention
        y, routing = ex.moe_block(h, mixture(p), cfg.n_choice, ("batch", None, None), RULES, plain=plain)
        h = h + rms_norm_gain(y, p.experts_out_gain)
        inner = (linear(mixed, p.w_o), y, h) if keep_inner else None
        return h, LayerAux(routing=routing, inner=inner)

    layer = checkpointed(layer, cfg.remat)
    return jax.lax.scan(layer, embed(params, tokens, cfg), params.layers)


def mixture(p: LayerParams) -> ex.Mixture:
    return ex.Mixture(in_gain=p.experts_in_gain, router=p.router, experts=p.experts, out_gain=p.experts_out_gain)


def embed(params: MoEParams, tokens: Int[Array, "*B"], cfg: MoEConfig) -> Float[Array, "*B D"]:
    dtype = jnp.dtype(cfg.dtype)
    rows = quant.to_array(jax.tree.map(lambda table: table[tokens], params.embed), dtype)
    return rows * jnp.asarray(cfg.embed_scale, dtype)


def project(
    h: Float[Array, "*B T D"], p: LayerParams, position: Int[Array, "*B T"], cfg: MoEConfig
) -> tuple[Float[Array, "*B T Q K"], Float[Array, "*B T H K"], Float[Array, "*B T H K"]]:
    """Return queries and keys with rotary embeddings applied, and values."""
    x = rms_norm_gain(h, p.attention_in_gain)
    q, k, v = (linear(x, w).reshape(*x.shape[:-1], -1, cfg.d_k) for w in (p.w_q, p.w_k, p.w_v))
    return apply_rope(q, position, cfg.rope_base), apply_rope(k, position, cfg.rope_base), v


def scores(cfg: MoEConfig) -> SoftCap:
    return SoftCap(scale=cfg.score_scale, cap=cfg.score_cap)


def logits(params: MoEParams, x: Float[Array, "*B D"], cfg: MoEConfig) -> Float[Array, "*B A"]:
    x = rms_norm_gain(x, params.out_gain)
    scores = jnp.einsum("...d,ad->...a", x, quant.to_array(params.embed, x.dtype))
    return scores.astype(jnp.float32) * cfg.logit_scale


def nats(
    params: MoEParams, x: Float[Array, "B T D"], targets: Int[Array, "B T"], cfg: MoEConfig
) -> Float[Array, "B T"]:
    """Return -log p(target) in float32."""
    return losses.token_nll(logits(params, x, cfg), targets)


def n_flops_per_token(cfg: MoEConfig, n_token: int | None = None) -> int:
    """Return twice the multiply-adds of the forward pass (chosen experts only) per token, averaged over `n_token` positions."""
    qk, hk = cfg.n_q_head * cfg.d_k, cfg.n_kv_head * cfg.d_k
    attention = cfg.d_model * (2 * qk + 2 * hk) + 2 * qk * (n_token or cfg.context) // 2
    experts = cfg.d_model * cfg.n_expert + 3 * cfg.n_choice * cfg.d_model * cfg.d_ffn
    return 2 * (cfg.n_layer * (attention + experts) + cfg.d_model * cfg.n_vocab)


def expert_stack(params: MoEParams) -> ExpertWeights:
    """Concatenate the experts of all layers: those of layer l start at l E."""
    experts = params.layers.experts
    flat = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), (experts.gate, experts.value, experts.out))
    return ExpertWeights(gate=flat[0], value=flat[1], out=flat[2])
