"""Router metrics, losses and collapse warnings shared by all families with experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from linnet.nn.moe import RouterStats


def router_metrics(figures: RouterStats) -> dict[str, Array]:
    """Return the metrics of router statistics stacked over layers."""
    return {
        "loss_balance": jnp.mean(figures.balance),
        "loss_router_z": jnp.mean(figures.z),
        "expert_load": figures.load,
        "router_confidence": figures.confidence,
    }


def router_cost(figures: RouterStats, balance_weight: float, z_weight: float) -> Float[Array, ""]:
    """Return the weighted router losses, summed over layers."""
    return balance_weight * jnp.sum(figures.balance) + z_weight * jnp.sum(figures.z)


def expert_diagnostics(metrics: dict[str, Array]) -> dict[str, Any]:
    """Return per-layer figures: each expert's load (fraction of routed pairs), the balance (1: uniform), the highest and lowest load,
    and the total probability of the chosen experts."""
    share, confidence = jax.device_get((metrics["expert_load"], metrics["router_confidence"]))
    share = np.asarray(share, np.float64)
    entropy = -np.sum(share * np.log(np.where(share > 0, share, 1.0)), axis=-1)
    return {
        "experts": {
            "load": share.tolist(),
            "balance": (np.exp(entropy) / share.shape[-1]).tolist(),
            "busiest": share.max(axis=-1).tolist(),
            "idlest": share.min(axis=-1).tolist(),
            "confidence": np.asarray(confidence).tolist(),
        }
    }


def expert_warnings(figures: dict[str, Any], min_fraction: float, n_expert: int) -> dict[int, str]:
    return {
        layer: f"The experts of layer {layer} collapse: the idlest gets {value:.2%} of all choices, an even share is "
        f"{1 / n_expert:.2%}. Try a larger --model.balance-weight or a lower learning rate."
        for layer, value in enumerate(figures["experts"]["idlest"])
        if value < min_fraction / n_expert
    }
