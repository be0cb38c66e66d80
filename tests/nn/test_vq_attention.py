"""Linear attention equals the dense one: value and gradients, whatever the block, the split, the padding or the documents."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Float

from linnet.core.params import Spec, map_specs
from linnet.models.vq import model
from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import buffer_specs, param_specs
from linnet.nn.vq_attention import Queries, attention, empty_state, into_blocks, out_of_blocks
from linnet.nn.vq_attention_scan import EMPTY

N_VOCAB = 30
TOLERANCE = 1e-5  # of the largest value of a tensor


def make(**changes: Any) -> tuple[VQConfig, Any, Any]:
    """A tiny model whose every weight counts. Made with numpy: nothing to compile."""
    sizes = {"d_model": 16, "d_k": 8, "d_v": 12, "n_code": 6, "n_layer": 1, "block_len": 8, "mem_len": 8}
    cfg = VQConfig(n_vocab=N_VOCAB, **{**sizes, **changes})
    random = np.random.default_rng(3)

    def draw(spec: Spec) -> jax.Array:
        fan_in = max(1, int(np.prod(spec.layer_shape[:-1])))
        return jnp.asarray((spec.init == "ones") + random.normal(0, fan_in**-0.5, spec.shape), jnp.float32)

    return cfg, map_specs(draw, param_specs(cfg)), map_specs(draw, buffer_specs(cfg))


def tokens_of(batch: int, n_token: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, N_VOCAB, (batch, n_token), np.int32)


def documents_of(tokens: np.ndarray) -> np.ndarray:
    """A new document after every sixth token or so, at different places in each row."""
    return np.cumsum(tokens < N_VOCAB // 6, axis=1).astype(np.int32)


@partial(jax.jit, static_argnames=("cfg", "dense", "block_len"))
def run(
    params: Any,
    buffers: Any,
    tokens: Any,
    carry: Any,
    cfg: VQConfig,
    documents: Any = None,
    length: Any = None,
    dense: bool = False,
    block_len: int | None = None,
) -> tuple[Array, Any, Any]:
    x, carry, aux = model.forward(
        params, buffers, tokens, carry, cfg, documents=documents, length=length, dense=dense, block_len=block_len
    )
    return x, carry, aux.codes


@partial(jax.jit, static_argnames=("cfg", "dense"))
def loss_and_gradient(
    params: Any, buffers: Any, tokens: Any, documents: Any, cfg: VQConfig, dense: bool
) -> tuple[Any, Any]:
    def loss(params: Any) -> tuple[Array, Any]:
        carry = model.empty_carry(cfg, tokens.shape[0])
        x, _, aux = model.forward(params, buffers, tokens, carry, cfg, documents=documents, dense=dense)
        value = jnp.mean(model.nats(params, x, tokens, cfg)) + 0.1 * jnp.sum(aux.commitment)
        return value, (x, aux.codes, aux.seen)

    return jax.value_and_grad(loss, has_aux=True)(params)


def assert_close(got: Any, want: Any, tolerance: float = TOLERANCE) -> None:
    """Every tensor within `tolerance` of its own largest value; whole numbers exactly."""

    def check(path: Any, a: Any, b: Any) -> None:
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, path
        if not np.issubdtype(b.dtype, np.floating):
            np.testing.assert_array_equal(a, b, err_msg=str(path))
        elif b.size:
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-9), err_msg=str(path))

    jax.tree_util.tree_map_with_path(check, got, want)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    n_head=st.integers(1, 2),
    window=st.sampled_from([3, 8, 13]),
    block_len=st.sampled_from([1, 4, 8]),
    n_token=st.integers(9, 37),
    batch=st.integers(1, 2),
    agg_cache=st.booleans(),
    grad_thru_cache=st.booleans(),
    reset=st.booleans(),
    seed=st.integers(0, 9),
)
def test_linear_equals_dense(
    n_head: int,
    window: int,
    block_len: int,
    n_token: int,
    batch: int,
    agg_cache: bool,
    grad_thru_cache: bool,
    reset: bool,
    seed: int,
) -> None:
    cfg, params, buffers = make(
        n_head=n_head,
        mem_len=window,
        block_len=block_len,
        agg_cache=agg_cache,
        grad_thru_cache=grad_thru_cache,
        reset_at_documents=reset,
    )
    tokens = tokens_of(batch, n_token, seed)
    got, want = (
        loss_and_gradient(params, buffers, tokens, documents_of(tokens), cfg, dense) for dense in (False, True)
    )
    assert_close(got, want)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(want[1]) if g.ndim > 1)  # else nothing was compared


def test_block_length_does_not_matter() -> None:
    cfg, params, buffers = make(n_head=2, mem_len=13, reset_at_documents=True)
    tokens = tokens_of(2, 45)
    start = model.empty_carry(cfg, 2)
    each = [
        run(params, buffers, tokens, start, cfg, documents_of(tokens), block_len=block_len)
        for block_len in (1, 8, 32, 45)
    ]
    for one in each[1:]:
        assert_close(one, each[0])


@pytest.mark.parametrize(("split", "changes"), [(1, {}), (23, {"mem_len": 5, "n_head": 2, "agg_cache": False})])
def test_two_halves_equal_one_pass(split: int, changes: dict[str, Any]) -> None:
    cfg, params, buffers = make(**changes)
    tokens = tokens_of(2, 37)
    x, carry, codes = run(params, buffers, tokens, model.empty_carry(cfg, 2), cfg)
    x_1, between, codes_1 = run(params, buffers, tokens[:, :split], model.empty_carry(cfg, 2), cfg)
    x_2, after, codes_2 = run(params, buffers, tokens[:, split:], between, cfg)
    joined = (jnp.concatenate([x_1, x_2], axis=1), after, jnp.concatenate([codes_1, codes_2], axis=-1))
    assert_close(joined, (x, carry, codes))


@pytest.mark.slow
def test_only_the_given_number_of_tokens_is_valid() -> None:
    """Rows of different lengths, none among them, after something read before: each as if it had been alone and exact."""
    cfg, params, buffers = make(mem_len=11, n_head=2)
    before, tokens = tokens_of(4, 19, seed=1), tokens_of(4, 24)
    lengths = [0, 1, 13, 24]
    _, start, _ = run(params, buffers, before, model.empty_carry(cfg, 4), cfg)
    x, after, _ = run(params, buffers, tokens, start, cfg, length=jnp.array(lengths))
    for i, length in enumerate(lengths):
        mine = _row(start, i)
        if length:
            want, mine, _ = run(params, buffers, tokens[i : i + 1, :length], mine, cfg)
            assert_close(x[i : i + 1, :length], want)
        assert_close(_row(after, i), mine)


def _row(carry: model.VQCarry, i: int) -> model.VQCarry:
    return model.VQCarry(
        attention=jax.tree.map(lambda x: x[:, i : i + 1], carry.attention), position=carry.position[i : i + 1]
    )


def test_document_does_not_see_the_one_before() -> None:
    cfg, params, buffers = make(reset_at_documents=True, mem_len=6)
    lengths = np.array([3, 17, 1, 9])
    starts = np.cumsum(lengths) - lengths
    tokens = tokens_of(1, int(lengths.sum()))
    x, carry, _ = run(
        params, buffers, tokens, model.empty_carry(cfg, 1), cfg, np.repeat(np.arange(4, dtype=np.int32), lengths)[None]
    )
    alone = np.zeros((4, lengths.max()), np.int32)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        alone[i, :length] = tokens[0, start : start + length]
    each, last, _ = run(params, buffers, alone, model.empty_carry(cfg, 4), cfg, length=jnp.asarray(lengths))
    assert_close(x[0], jnp.concatenate([each[i, :length] for i, length in enumerate(lengths)]))
    assert_close(carry.attention.total, last.attention.total[:, 3:])


@pytest.mark.slow
def test_bfloat16_is_close_to_float32() -> None:
    tokens = tokens_of(2, 40)
    (loss, _), gradient = _by_type("float32", tokens)
    (rough_loss, _), rough = _by_type("bfloat16", tokens)
    assert abs(rough_loss - loss) < 0.03 * loss
    for a, b in zip(jax.tree.leaves(rough), jax.tree.leaves(gradient), strict=True):
        assert a.dtype == jnp.float32  # of the parameters
        assert np.vdot(a, b) > 0.9 * np.linalg.norm(a) * np.linalg.norm(b)


def _by_type(dtype: str, tokens: np.ndarray) -> tuple[Any, Any]:
    cfg, params, buffers = make(dtype=dtype, n_head=2)
    return loss_and_gradient(params, buffers, tokens, np.zeros_like(tokens), cfg, False)


@pytest.mark.parametrize("grad_thru_cache", [True, False])
def test_gradient_through_the_table(grad_thru_cache: bool) -> None:
    """Values older than the window are learned through the table, or not at all. The last query alone is asked, so that what
    each value gets is its weight."""
    random = np.random.default_rng(5)
    n_token, window, block_len, n_code = 29, 4, 4, 3
    content, position, keys, values = (
        jnp.asarray(random.normal(size=(1, 1, n_token, width)), jnp.float32) for width in (5, 5, 5, 6)
    )
    codebook, distances = (jnp.asarray(random.normal(size=(1, n, 5)), jnp.float32) for n in (n_code, window + 1))
    chosen = jnp.asarray(random.integers(0, n_code, (1, 1, n_token)))
    keys = codebook[0, chosen[0, 0]][None, None]

    def blocks(x: Array) -> Array:
        return into_blocks(x[:, 0], block_len)[:, :, None]

    def last_output(values: Float[Array, "B H T V"]) -> Array:
        out, _ = attention(
            Queries(content=blocks(content), position=blocks(position)),
            blocks(keys),
            blocks(chosen[..., None])[..., 0],
            blocks(values),
            codebook,
            distances,
            empty_state(1, 1, window, n_code, 5, 6, jnp.float32),
            into_blocks(jnp.zeros((1, n_token), jnp.int32), block_len, EMPTY),
            n_token=n_token,
            agg_cache=True,
            grad_thru_cache=grad_thru_cache,
            reset=False,
        )
        return jnp.sum(out_of_blocks(out, n_token)[0, 0, -1])

    got = jax.jit(jax.grad(last_output))(values)[0, 0]
    score = keys[0, 0] @ content[0, 0, -1]
    score = score.at[-window - 1 :].add(distances[0, ::-1] @ position[0, 0, -1])
    weight = jax.nn.softmax(score)
    learned = np.arange(n_token) >= (0 if grad_thru_cache else n_token // block_len * block_len)
    assert_close(got, np.where(learned[:, None], np.asarray(weight)[:, None], 0.0) * np.ones((1, 6)))


def test_blocks_run_once_forward_and_once_back() -> None:
    """Keeping too little for the backward pass would silently run the forward scan again."""
    cfg, params, buffers = make()
    tokens = tokens_of(1, 16)
    traced = loss_and_gradient.trace(params, buffers, tokens, np.zeros_like(tokens), cfg, False)
    assert _count_scans(traced.jaxpr) == 5  # units and blocks, forward; units, tables and blocks, back


def _count_scans(jaxpr: Any) -> int:
    """Of floats: JAX may take out a scan of the mere indices."""
    inner = [x for e in jaxpr.eqns for x in jax.tree.leaves(list(e.params.values())) if hasattr(x, "eqns")]
    scans = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    return sum(any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in e.outvars) for e in scans) + sum(
        map(_count_scans, inner)
    )
