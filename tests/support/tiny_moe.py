"""A `moe` model so small that it compiles in seconds. Every weight counts, and everything is made with numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.core import quant
from linnet.core.dtypes import WeightDtype
from linnet.core.params import Spec, map_specs
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import MoEParams, param_specs

SIZES = {
    "n_vocab": 30,
    "d_model": 16,
    "d_k": 4,
    "n_q_head": 4,
    "n_kv_head": 2,
    "n_layer": 2,
    "n_expert": 4,
    "n_choice": 2,
    "widening": 2.0,
    "context": 256,
    "score_scale": 0.5,
    "embed_scale": 4.0,
}


def make(weights: WeightDtype = "float32", **changes: Any) -> tuple[MoEConfig, MoEParams]:
    cfg = MoEConfig(**{**SIZES, **changes})
    random = np.random.default_rng(1)

    def draw(spec: Spec) -> jax.Array:
        spread = spec.layer_shape[-2] ** -0.5 if len(spec.layer_shape) > 1 else 0.1
        return jnp.asarray((spec.init == "ones") + random.normal(0, spread, spec.shape), jnp.float32)

    specs = param_specs(cfg)
    return cfg, quant.bfloat16_as_bits(quant.cast_params(map_specs(draw, specs), specs, weights))


def tokens_of(n_row: int, length: int, n_vocab: int = 30, seed: int = 7) -> np.ndarray:
    """Without padding."""
    return np.random.default_rng(seed).integers(1, n_vocab, (n_row, length), np.int32)
