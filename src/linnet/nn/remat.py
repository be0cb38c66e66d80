"""What the backward pass computes again: less memory for more work, never another result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

Remat = Literal["none", "some", "full"]


def checkpointed(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A layer, run by a scan, of which so much is kept: all; its products with weights; its input alone."""
    import jax

    if remat == "none":
        return layer
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "some" else None
    return jax.checkpoint(layer, policy=keep, prevent_cse=False)
