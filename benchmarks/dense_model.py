"""The `vq` model with the dense baseline as its attention: the same weights, loss, codebooks and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from benchmarks.dense_attention import chunk_len, dense_attention
from linnet.bench import jobs
from linnet.bench.measure import Benchmark
from linnet.config.schema import RunConfig
from linnet.core import quant
from linnet.core.errors import invalid
from linnet.models.base import Aux, Keys, TokenFamily
from linnet.models.vq import family as vq
from linnet.models.vq import model
from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import UnitParams, VQBuffers, VQParams
from linnet.nn import codebook
from linnet.nn.positions import sinusoid


def check(cfg: VQConfig) -> None:
    """Raise for settings that the baseline does not support. Dropout is not checked: both models are compared without it."""
    for name, wanted in (("agg_cache", True), ("grad_thru_cache", True), ("reset_at_documents", False)):
        if getattr(cfg, name) != wanted:
            raise invalid(
                f"model.{name}", getattr(cfg, name), f"{wanted} to compare with dense attention", f"use {wanted}"
            )


def dense_family() -> TokenFamily:
    """Return the `vq` family with the loss and evaluation of the dense model."""
    return dataclasses.replace(vq.FAMILY, name="vq-dense", loss=_loss, nats=_nats)


def train_dense(cfg: RunConfig) -> Benchmark:
    return jobs.train_benchmark(cfg, dense_family(), flops_per_token(cfg.vq, cfg.tokens.sequence_len))


def eval_dense(cfg: RunConfig) -> Benchmark:
    return jobs.eval_benchmark(cfg, dense_family(), flops_per_token(cfg.vq, cfg.tokens.sequence_len))


DENSE_JOBS = {"train-dense": train_dense, "eval-dense": eval_dense}


def flops_per_token(cfg: VQConfig, n_token: int) -> float:
    """Return the FLOPs per token of a forward pass without skipped chunks: a query attends to M + (T + C) / 2 keys on average."""
    hk, hv = cfg.n_head * cfg.d_k, cfg.n_head * cfg.d_v
    keys = cfg.mem_len + (n_token + chunk_len(n_token, cfg.block_len)) / 2
    project = cfg.d_model * (2 * hk + 2 * hv) + hv * cfg.d_model
    unit = project + hk * cfg.n_code + keys * (hk + hv) + (cfg.mem_len + 1) * hk
    return 2 * (cfg.n_unit * unit + cfg.d_model * cfg.n_vocab)


def _loss(
    params: VQParams,
    buffers: VQBuffers,
    carry: Any,
    batch: Any,
    keys: Keys | None,
    first_row: int | Int[Array, ""],
    cfg: VQConfig,
) -> tuple[Float[Array, ""], Aux]:
    mask = batch.loss_mask.astype(jnp.float32)
    x, seen, commitment = _forward(params, buffers, batch.inputs, mask, cfg)
    nll = jnp.mean(mask * model.nats(params, x, batch.targets, cfg))
    statistics = vq.Statistics(seen=seen, candidates=None)
    return nll + cfg.c_beta * commitment, Aux(metrics={}, statistics=statistics, carry=carry)


def _nats(
    params: VQParams, buffers: VQBuffers, carry: Any, batch: Any, cfg: VQConfig
) -> tuple[Float[Array, "B T"], Any]:
    x, _, _ = _forward(params, buffers, batch.inputs, jnp.ones(batch.inputs.shape), cfg)
    return model.nats(params, x, batch.targets, cfg), carry


def _forward(
    params: VQParams, buffers: VQBuffers, tokens: Int[Array, "B T"], mask: Float[Array, "B T"], cfg: VQConfig
) -> tuple[Float[Array, "B T D"], codebook.CodeStatistics, Float[Array, ""]]:
    """Return the last hidden states, the code statistics of all units, and the sum of their commitment losses."""
    dtype = jnp.dtype(cfg.dtype)
    x = params.embed[tokens].astype(dtype)
    if params.position_scale is not None:
        waves = sinusoid(jnp.arange(tokens.shape[1]), cfg.d_model, cfg.pe_lam)
        x = x + (params.position_scale * waves).astype(dtype)

    def unit(x: Array, inputs: tuple[UnitParams, Array]) -> tuple[Array, tuple[codebook.CodeStatistics, Array]]:
        p, codes = inputs
        q, k, v, gate = model.unit_projections(x, p, cfg)
        chosen = codebook.nearest(jax.lax.stop_gradient(k), codes)
        quantised = codebook.lookup(codes, chosen)
        keys = codebook.straight_through(k, quantised.astype(k.dtype))
        r = model.distance_vectors(p, cfg)
        mixed = dense_attention(model.query_pair(q, p, cfg), keys, v, r, block_len=cfg.block_len)
        mixed = mixed.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        square_error = jnp.sum((k.astype(jnp.float32) - quantised) ** 2, axis=(1, 3))
        seen = codebook.statistics(jax.lax.stop_gradient(k), chosen, mask, cfg.n_code)
        return x + (mixed * gate) @ quant.to_array(p.w_res, x.dtype), (seen, jnp.mean(mask * square_error))

    if cfg.remat != "none":
        unit = jax.checkpoint(unit)
    codes = codebook.code_vectors(buffers.code_count, buffers.code_total)
    x, (seen, commitment) = jax.lax.scan(unit, x, (params.units, codes))
    return x, seen, jnp.sum(commitment)
