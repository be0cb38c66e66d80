"""The `moe` family for the trainer: loss, expert balancing, evaluation, diagnostics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from linnet.models.base import Aux, Keys, TokenFamily
from linnet.models.moe import model
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import RULES, MoEParams, param_specs
from linnet.models.moe.slots import DECODER
from linnet.models.router_metrics import expert_diagnostics, expert_warnings, router_cost, router_metrics
from linnet.nn import moe as ex


def loss(
    params: MoEParams,
    buffers: None,
    carry: None,
    batch: Any,
    keys: Keys | None,
    first_row: int | Int[Array, ""],
    cfg: MoEConfig,
) -> tuple[Float[Array, ""], Aux]:
    """Mean over B x T of `mask * nll`, plus the router losses (means over unmasked tokens, summed over layers)."""
    del buffers, carry, keys, first_row
    mask = batch.loss_mask.astype(jnp.float32)
    x, aux = model.forward(params, batch.inputs, cfg)
    nll = jnp.mean(mask * model.nats(params, x, batch.targets, cfg))
    flat = mask.reshape(-1)
    stats = jax.vmap(lambda routing: ex.router_stats(routing, flat))(aux.routing)
    metrics = {
        "loss_lm_per_token_unscaled": nll,
        "loss_mask_per_token": jnp.mean(mask),
        **router_metrics(stats),
    }
    total = nll + router_cost(stats, cfg.balance_weight, cfg.z_weight)
    return total, Aux(metrics=metrics, statistics=None, carry=None)


def nats(params: MoEParams, buffers: None, carry: None, batch: Any, cfg: MoEConfig) -> tuple[Float[Array, "B T"], None]:
    del buffers, carry
    x, _ = model.forward(params, batch.inputs, cfg)
    return model.nats(params, x, batch.targets, cfg), None


def diagnostics(buffers: None, metrics: dict[str, Array], cfg: MoEConfig) -> dict[str, Any]:
    del buffers, cfg
    return expert_diagnostics(metrics)


def collapse_warnings(stats: dict[str, Any], min_fraction: float, cfg: MoEConfig) -> dict[int, str]:
    return expert_warnings(stats, min_fraction, cfg.n_expert)


FAMILY = TokenFamily(
    name="moe",
    config=MoEConfig,
    rules=RULES,
    param_specs=param_specs,
    loss=loss,
    flops_per_token=model.n_flops_per_token,
    diagnostics=diagnostics,
    collapse_warnings=collapse_warnings,
    lora_targets=("layers/w_q", "layers/w_k", "layers/w_v", "layers/w_o"),
    decoder=DECODER,
    nats=nats,
)
