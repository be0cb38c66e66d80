"""The `moe` family for the trainer: loss, expert balancing, evaluation, diagnostics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from linnet.models.base import Aux, Keys
from linnet.models.moe import model
from linnet.models.moe import slots as decoder
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import RULES, MoEParams, param_specs
from linnet.models.router_metrics import expert_diagnostics, expert_warnings, router_cost, router_metrics
from linnet.nn import moe as ex

name = "moe"


def buffer_specs(cfg: MoEConfig) -> None:
    """Return None: the model has no buffers."""
    del cfg


def empty_carry(cfg: MoEConfig, batch_size: int) -> None:
    """Return None: a sequence is one update, so there is no carry."""
    del cfg, batch_size


def carry_axes(carry: None) -> None:
    del carry


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
    figures = jax.vmap(lambda routing: ex.router_stats(routing, flat))(aux.routing)
    metrics = {
        "loss_lm_per_token_unscaled": nll,
        "loss_mask_per_token": jnp.mean(mask),
        **router_metrics(figures),
    }
    total = nll + router_cost(figures, cfg.balance_weight, cfg.z_weight)
    return total, Aux(metrics=metrics, statistics=None, carry=None)


def merge_statistics(a: None, b: None) -> None:
    del a, b


def update_buffers(buffers: None, statistics: None, cfg: MoEConfig) -> None:
    del buffers, statistics, cfg


def nats(params: MoEParams, buffers: None, carry: None, batch: Any, cfg: MoEConfig) -> tuple[Float[Array, "B T"], None]:
    del buffers, carry
    x, _ = model.forward(params, batch.inputs, cfg)
    return model.nats(params, x, batch.targets, cfg), None


def diagnostics(buffers: None, metrics: dict[str, Array], cfg: MoEConfig) -> dict[str, Any]:
    del buffers, cfg
    return expert_diagnostics(metrics)


def alarms(figures: dict[str, Any], least: float, cfg: MoEConfig) -> dict[int, str]:
    return expert_warnings(figures, least, cfg.n_expert)


def flops_per_token(cfg: MoEConfig) -> int:
    return model.n_flops_per_token(cfg)


__all__ = [
    "RULES",
    "alarms",
    "buffer_specs",
    "carry_axes",
    "decoder",
    "diagnostics",
    "empty_carry",
    "flops_per_token",
    "loss",
    "merge_statistics",
    "name",
    "nats",
    "param_specs",
    "update_buffers",
]
