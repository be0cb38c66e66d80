"""The `vq` family for the trainer: loss, codebook updates, evaluation, diagnostics."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from linnet.core import rng
from linnet.core.pytree import pytree
from linnet.models.base import Aux, Keys, TokenFamily
from linnet.models.router_metrics import expert_diagnostics, expert_warnings, router_cost, router_metrics
from linnet.models.vq import model
from linnet.models.vq.config import VQConfig
from linnet.models.vq.diagnostics import codebook_stats
from linnet.models.vq.guided import CFGDecoder
from linnet.models.vq.params import RULES, VQBuffers, VQParams, buffer_specs, param_specs
from linnet.models.vq.slots import DECODER
from linnet.nn import codebook


@pytree
class Statistics:
    seen: codebook.CodeStatistics  # G H S (K)
    candidates: Any  # G H S K, or None without dead-code restarts


def loss(
    params: VQParams,
    buffers: VQBuffers,
    carry: model.VQCarry,
    batch: Any,
    keys: Keys | None,
    first_row: int | Int[Array, ""],
    cfg: VQConfig,
) -> tuple[Float[Array, ""], Aux]:
    """Mean over B x T of `mask * nll`, plus the commitment loss. The mask is renormalised only in the metrics."""
    mask = batch.loss_mask.astype(jnp.float32)
    dropout = None if keys is None else _dropout(keys, first_row, batch.inputs.shape[0])
    if cfg.d_condition:
        embeds = batch.condition if dropout is None else augment_condition(batch.condition, dropout, cfg)
        carry = model.conditioned(params, carry, embeds, cfg)
    x, carry, aux = model.forward(
        params,
        buffers,
        batch.inputs,
        carry,
        cfg,
        documents=batch.doc_ids,
        mask=mask,
        dropout=dropout,
    )
    nll = jnp.mean(mask * model.nats(params, x, batch.targets, cfg))
    commitment = jnp.sum(aux.commitment)
    metrics = {
        "loss_lm_per_token_unscaled": nll,
        "loss_mask_per_token": jnp.mean(mask),
        "loss_commit_per_token": commitment,
        "vec_norm_mean": jnp.mean(aux.key_norm),
        "vec_hat_norm_mean": jnp.mean(aux.quantised_norm),
        "relative_err_min": jnp.mean(aux.error[:, 0]),
        "relative_err_mean": jnp.mean(aux.error[:, 1]),
        "relative_err_max": jnp.mean(aux.error[:, 2]),
        "unit_relative_err": aux.error[:, 1],
        "unit_usage": jnp.mean(aux.seen.count > 0, axis=(1, 2)),
    }
    total = nll + cfg.c_beta * commitment
    if aux.router is not None:
        metrics |= router_metrics(aux.router)
        total = total + router_cost(aux.router, cfg.balance_weight, cfg.z_weight)
    statistics = Statistics(seen=aux.seen, candidates=aux.candidates)
    return total, Aux(metrics=metrics, statistics=statistics, carry=carry)


def merge_statistics(a: Statistics, b: Statistics) -> Statistics:
    """Add the counts. Candidates are taken from one micro-batch, since any will do."""
    return Statistics(seen=jax.tree.map(jnp.add, a.seen, b.seen), candidates=a.candidates)


def update_buffers(buffers: VQBuffers, statistics: Statistics, cfg: VQConfig) -> VQBuffers:
    count, total = codebook.moving_average(buffers.code_count, buffers.code_total, statistics.seen, cfg.c_gamma)
    if statistics.candidates is not None:
        count, total = codebook.restart_dead(count, total, statistics.candidates, cfg.dead_code_below)
    return VQBuffers(code_count=count, code_total=total)


def nats(
    params: VQParams, buffers: VQBuffers, carry: model.VQCarry, batch: Any, cfg: VQConfig
) -> tuple[Float[Array, "B T"], model.VQCarry]:
    batch_size, n_token = batch.inputs.shape
    if cfg.d_condition:
        carry = model.conditioned(params, carry, batch.condition, cfg)
    segment_len = _segment_len(cfg, batch_size, n_token)

    def split(x: Array) -> Array:
        return x.reshape(batch_size, -1, segment_len).swapaxes(0, 1)

    def read(carry: model.VQCarry, segment: tuple[Array, Array, Array]) -> tuple[model.VQCarry, Array]:
        inputs, targets, documents = segment
        block_len = reading_block_len(cfg)
        x, carry, _ = model.forward(params, buffers, inputs, carry, cfg, documents=documents, block_len=block_len)
        return carry, model.nats(params, x, targets, cfg)

    segments = (split(batch.inputs), split(batch.targets), split(batch.doc_ids))
    carry, values = jax.lax.scan(read, carry, segments)
    return values.swapaxes(0, 1).reshape(batch_size, n_token), carry


def _segment_len(cfg: VQConfig, batch_size: int, n_token: int) -> int:
    """Return how many tokens of a row to evaluate at once. On a CPU all units process about 1,024 tokens before the next ones, so that
    the wide arrays between two products stay in the cache. The length must divide the row and be a multiple of the block length."""
    if jax.default_backend() != "cpu":
        return n_token
    block_len = reading_block_len(cfg)
    max_len = max(1024 // batch_size, cfg.mem_len, block_len)
    fitting = [n for n in range(block_len, min(max_len, n_token) + 1, block_len) if n_token % n == 0]
    return max(fitting, default=n_token)


def reading_block_len(cfg: VQConfig) -> int:
    """Return the block length for evaluation without a gradient; the result does not depend on it. Shorter blocks are faster on a CPU,
    because less of each block is masked future."""
    return min(cfg.block_len, 64) if jax.default_backend() == "cpu" else cfg.block_len


def reading_config(cfg: VQConfig) -> VQConfig:
    return dataclasses.replace(cfg, block_len=reading_block_len(cfg))


def diagnostics(buffers: VQBuffers, metrics: dict[str, Array], cfg: VQConfig) -> dict[str, Any]:
    stats = codebook_stats(buffers, metrics, cfg)
    return stats | expert_diagnostics(metrics) if cfg.n_expert else stats


def collapse_warnings(stats: dict[str, Any], min_fraction: float, cfg: VQConfig) -> dict[int, str]:
    collapsed = {
        unit: f"The codebook of unit {unit} collapses: it uses as much as {value:.1f} of {cfg.n_code} codes. Try "
        "--model.restart-dead-codes, a lower learning rate, or a larger --model.c-beta."
        for unit, value in enumerate(stats.get("codebook", {}).get("perplexity", []))
        if value < min_fraction * cfg.n_code
    }
    # Expert warnings are keyed after the units, so that a unit can have both kinds.
    more = expert_warnings(stats, min_fraction, cfg.n_expert) if cfg.n_expert else {}
    return collapsed | {cfg.n_unit + unit: message for unit, message in more.items()}


def augment_condition(embeds: Float[Array, "B E"], dropout: model.Dropout, cfg: VQConfig) -> Float[Array, "B E"]:
    """Conditioning augmentation: add noise, and drop the condition with probability `p_drop_condition`; constant within a sequence."""

    def row(embed: Float[Array, " E"], key: PRNGKeyArray) -> Float[Array, " E"]:
        if cfg.condition_noise:
            noise = jax.random.normal(rng.fold_in_name(key, "condition noise"), embed.shape)
            off = embed + cfg.condition_noise / math.sqrt(cfg.d_condition) * noise
            embed = off * jax.lax.rsqrt(jnp.sum(off**2)) * jnp.any(embed != 0)  # an absent condition stays absent
        keep = jax.random.bernoulli(rng.fold_in_name(key, "condition"), 1.0 - cfg.p_drop_condition)
        return jnp.where(keep, embed, 0.0)

    return jax.vmap(row)(embeds, dropout.sequence)


def _dropout(keys: Keys, first_row: int | Int[Array, ""], batch_size: int) -> model.Dropout:
    rows = first_row + jnp.arange(batch_size)
    per_row = jax.vmap(lambda key, row: rng.fold_in(rng.fold_in_name(key, "row"), row), in_axes=(None, 0))
    return model.Dropout(
        update=per_row(keys.update, rows),
        sequence=per_row(keys.sequence, rows),
        shared=rng.fold_in_name(keys.sequence, "shared"),
    )


FAMILY = TokenFamily(
    name="vq",
    config=VQConfig,
    rules=RULES,
    param_specs=param_specs,
    buffer_specs=buffer_specs,
    empty_carry=model.empty_carry,
    carry_axes=model.carry_axes,
    loss=loss,
    merge_statistics=merge_statistics,
    update_buffers=update_buffers,
    diagnostics=diagnostics,
    collapse_warnings=collapse_warnings,
    flops_per_token=model.n_flops_per_token,
    lora_targets=("units/w_q", "units/w_kvg", "units/w_r", "units/w_res"),
    decoder=dataclasses.replace(DECODER, guided=CFGDecoder),
    nats=nats,
    reading_config=reading_config,
)
