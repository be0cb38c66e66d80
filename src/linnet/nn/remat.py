"""Rematerialisation policies: recompute activations in the backward pass to save memory, with identical results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

Remat = Literal["none", "some", "full"]


def checkpointed(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Wrap a scanned layer in `jax.checkpoint`. "none" saves all activations, "some" the results of matmuls with weights, "full" only
    the layer's input."""
    import jax

    if remat == "none":
        return layer
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "some" else None
    return jax.checkpoint(layer, policy=keep, prevent_cse=False)
