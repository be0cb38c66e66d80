"""Slow trials: what must hold over long stretches. `make trials` runs them."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from linnet.core import params as weights
from linnet.core import rng
from linnet.core.pytree import n_bytes
from linnet.models.vq import family, slots
from linnet.models.vq.config import VQConfig
from linnet.nn.sampling import sampling_settings


@pytest.mark.trial
def test_decode_is_flat_from_1k_to_64k() -> None:
    """The same bytes and, within 20%, the same time a token. CPU-seconds: the machine may be shared."""
    cfg = VQConfig(d_model=64, d_k=32, d_v=128, n_code=64, n_layer=2, block_len=64, mem_len=64)
    params = weights.init(family.param_specs(cfg), rng.root(0))
    buffers = weights.init(family.buffer_specs(cfg), rng.root(0))
    prepared = slots.prepare(params, buffers, cfg)
    state, tokens = slots.init_slots(cfg, 1), jnp.ones((1,), jnp.int32)
    seen = jnp.zeros((1, cfg.n_vocab), jnp.int32)
    settings, keys = sampling_settings(1), jnp.stack([rng.root(0)])
    seconds, sizes, read = {}, {}, 0
    while read < 65_536:
        start = time.process_time()
        state, seen, drawn, _, _ = slots.decode(prepared, state, tokens, settings, keys, seen, cfg=cfg, n_ticks=512)
        tokens = drawn[-1]
        jax.block_until_ready(tokens)
        read += 512
        seconds.setdefault("early" if read <= 8192 else "late" if read > 57_344 else "between", []).append(
            time.process_time() - start
        )
        sizes[read] = n_bytes(state)
    early, late = (sorted(seconds[part])[len(seconds[part]) // 2] for part in ("early", "late"))
    assert sizes[1024] == sizes[65_536]
    assert late < 1.2 * early
