"""The benchmark's baseline is the same model: value and every gradient equal the oracle's and the linear model's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import dense_attention as dense
from benchmarks import dense_model
from benchmarks.dense_attention import MAX_CHUNK, chunk_len, dense_attention
from linnet.core import params as weights
from linnet.core import rng
from linnet.core.errors import UserError
from linnet.core.pytree import named_leaves, replace
from linnet.data import Batch
from linnet.models.vq import family as vq
from linnet.models.vq.config import VQConfig
from linnet.nn.vq_attention import Queries
from linnet.nn.vq_attention_reference import attention_dense

OPTIONS = {"agg_cache": True, "grad_thru_cache": True, "reset": False}


def close(got: object, expected: object, limit: float = 1e-5) -> None:
    for (name, a), (_, b) in zip(named_leaves(got), named_leaves(expected), strict=True):
        error = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-6)
        assert error < limit, f"{name or 'value'} differs by {error:.2e}"


@pytest.mark.parametrize(
    ("n_token", "block_len", "window", "n_head"),
    [
        (64, 16, 16, 2),
        *(pytest.param(*case, marks=pytest.mark.trial) for case in ((64, 4, 5, 1), (24, 8, 40, 2), (24, 3, 1, 1))),
    ],
)
def test_equals_the_oracle_in_value_and_gradient(
    n_token: int, block_len: int, window: int, n_head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "MAX_CHUNK", 16)  # several chunks of several blocks in few tokens
    keys = jax.random.split(jax.random.key(n_token), 6)
    shape = (2, n_head, n_token)
    content, position, k = (jax.random.normal(key, (*shape, 4)) for key in keys[:3])
    v, d_out = (jax.random.normal(key, (*shape, 6)) for key in keys[3:5])
    r = jax.random.normal(keys[5], (n_head, window + 1, 4))
    documents = jnp.zeros((2, n_token), jnp.int32)

    def ours(content, position, k, v, r):
        return dense_attention(Queries(content=content, position=position), k, v, r, block_len=block_len)

    def oracle(content, position, k, v, r):
        queries = Queries(content=content, position=position)
        return attention_dense(queries, k, v, r, documents, block_len=block_len, **OPTIONS)

    def value_and_gradients(f):
        def both(*inputs):
            out, back = jax.vjp(f, *inputs)
            return dict(zip(("out", "content", "position", "k", "v", "r"), (out, *back(d_out)), strict=True))

        return jax.jit(both)(content, position, k, v, r)

    close(value_and_gradients(ours), value_and_gradients(oracle))


def test_chunk_is_whole_blocks_and_divides_the_sequence() -> None:
    assert chunk_len(8192, 128) == MAX_CHUNK
    assert chunk_len(3 * 128, 128) == 3 * 128
    assert chunk_len(5 * 128, 128) == 128
    assert chunk_len(4096, 1024) == 1024  # a block is never cut


def test_dense_model_is_the_linear_model() -> None:
    cfg = VQConfig(
        n_vocab=30,
        d_model=8,
        d_k=4,
        d_v=6,
        n_head=2,
        n_code=5,
        n_layer=1,
        block_len=4,
        mem_len=4,
        pe_abs=True,
        c_beta=0.1,
    )
    params = weights.init(vq.param_specs(cfg), rng.root(0))
    params = replace(params, position_scale=jnp.asarray(0.5))
    buffers = weights.init(vq.buffer_specs(cfg), rng.root(1))
    tokens = jax.random.randint(rng.root(2), (2, 33), 0, 30)
    mask = jnp.ones((2, 32)).at[1, 20:].set(0.0)
    batch = Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], doc_ids=jnp.zeros((2, 32), jnp.int32), loss_mask=mask)
    carry = vq.FAMILY.empty_carry(cfg, 2)

    def everything(family):
        (loss, aux), gradient = jax.value_and_grad(family.loss, has_aux=True)(
            params, buffers, carry, batch, None, 0, cfg
        )
        return {"loss": loss, "gradient": gradient, "seen": aux.statistics.seen}, family.nats(
            params, buffers, carry, batch, cfg
        )[0]

    linear, quadratic = (jax.jit(lambda f=f: everything(f))() for f in (vq, dense_model.dense_family()))
    close(quadratic, linear)


def test_settings_that_the_baseline_lacks_are_rejected() -> None:
    with pytest.raises(UserError, match="agg_cache is False.*Fix: use True"):
        dense_model.check(VQConfig(agg_cache=False))
    dense_model.check(VQConfig())


def test_flops_count_only_what_is_not_skipped() -> None:
    cfg = VQConfig()
    per_pair = 2 * cfg.n_unit * (cfg.d_k + cfg.d_v)
    growth = dense_model.flops_per_token(cfg, 8192) - dense_model.flops_per_token(cfg, 4096)
    assert growth == per_pair * 2048
