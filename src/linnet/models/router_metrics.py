"""Router metrics, losses and collapse warnings shared by all families with experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from linnet.nn.moe import RouterStats


def router_metrics(stats: RouterStats) -> dict[str, Array]:
    """Return the metrics of router statistics stacked over layers."""
    return {
        "loss_balance": jnp.mean(stats.balance),
        "loss_router_z": jnp.mean(stats.z),
        "expert_load": stats.load,
        "router_confidence": stats.confidence,
    }


def router_cost(stats: RouterStats, balance_weight: float, z_weight: float) -> Float[Array, ""]:
    """Return the weighted router losses, summed over layers."""
    return balance_weight * jnp.sum(stats.balance) + z_weight * jnp.sum(stats.z)


def expert_diagnostics(metrics: dict[str, Array]) -> dict[str, Any]:
    """Return per-layer stats: each expert's load (fraction of routed pairs), the balance (1: uniform), the highest and lowest load,
    and the total probability of the chosen experts."""
    load, confidence = jax.device_get((metrics["expert_load"], metrics["router_confidence"]))
    load = np.asarray(load, np.float64)
    entropy = -np.sum(load * np.log(np.where(load > 0, load, 1.0)), axis=-1)
    return {
        "experts": {
            "load": load.tolist(),
            "balance": (np.exp(entropy) / load.shape[-1]).tolist(),
            "busiest": load.max(axis=-1).tolist(),
            "idlest": load.min(axis=-1).tolist(),
            "confidence": np.asarray(confidence).tolist(),
        }
    }


def expert_warnings(stats: dict[str, Any], min_fraction: float, n_expert: int) -> dict[int, str]:
    return {
        layer: f"The experts of layer {layer} collapse: the idlest gets {value:.2%} of all choices, an even share is "
        f"{1 / n_expert:.2%}. Try a larger --model.balance-weight or a lower learning rate."
        for layer, value in enumerate(stats["experts"]["idlest"])
        if value < min_fraction / n_expert
    }
