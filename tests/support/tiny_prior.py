"""A prior of toy size with weights away from their initial values, and inputs for it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.core.params import Spec, map_specs
from linnet.models.prior import sampling
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.params import PriorParams, param_specs


def config(**changes: Any) -> PriorConfig:
    settings: dict[str, Any] = {
        "dim": 16,
        "depth": 2,
        "n_head": 2,
        "d_head": 8,
        "ff_mult": 2,
        "max_text_len": 5,
        "text_encodings": True,
        "timesteps": 40,
    }
    return PriorConfig(**{**settings, **changes})


def model(cfg: PriorConfig, seed: int = 0) -> PriorParams:
    """Gains and biases too differ from what they start as, so that every term counts. Drawn by numpy: nothing to compile."""
    rng = np.random.default_rng(seed)

    def one(spec: Spec) -> Any:
        spread = spec.layer_shape[0] ** -0.5 if spec.init == "uniform" and spec.n_in is None else 0.1
        return jnp.asarray((spec.init == "ones") + spread * rng.standard_normal(spec.shape), jnp.float32)

    return map_specs(one, param_specs(cfg))


def prepared(cfg: PriorConfig) -> PriorParams:
    """As sampled with."""
    return sampling.prepared(model(cfg), cfg)


def inputs(cfg: PriorConfig, n_row: int, seed: int = 1) -> dict[str, Any]:
    """Rows are the same whatever their number; the third text is short, so that there is padding."""
    rows = [np.random.default_rng((seed, i)) for i in range(n_row)]
    encodings = np.stack([r.standard_normal((cfg.max_text_len, cfg.d_text)) for r in rows]).astype(np.float32)
    encodings[2::3, 2:] = 0.0
    return {
        "image": jnp.asarray(np.stack([r.standard_normal(cfg.dim) for r in rows]), jnp.float32),
        "text": jnp.asarray(np.stack([r.standard_normal(cfg.d_text) for r in rows]), jnp.float32),
        "encodings": jnp.asarray(encodings),
        "times": jnp.asarray([int(r.integers(cfg.timesteps)) for r in rows]),
    }
