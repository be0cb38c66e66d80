"""The toy family: minimal GRU layers, whose gates depend on the input only. Training, prefill and decoding share one step.

Letters: B rows or slots, T tokens, C tokens of a chunk, L layers, D width, A vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from linnet.core.params import Spec
from linnet.core.pytree import pytree
from linnet.models.base import Aux, TokenFamily
from linnet.models.decoder import Decoder
from linnet.models.decoding import decode_program
from linnet.nn.batch_invariant import COMPILER_OPTIONS, matmul, split_k
from linnet.nn.losses import token_nll, top_logprobs
from linnet.nn.norm import rms_norm
from linnet.nn.remat import checkpointed
from linnet.parallel.sharding import ROWS
from toy.config import ToyConfig

CHUNK = 32


@pytree
class ToyParams:
    embed: Any  # A D
    w_gate: Any  # L D D
    w_value: Any  # L D D
    out: Any  # D A


@pytree
class State:
    h: Any  # L D
    position: Any


@pytree
class Slots:
    h: Any  # B L D
    position: Any  # B


def param_specs(cfg: ToyConfig) -> ToyParams:
    square = Spec((cfg.n_layer, cfg.d_model, cfg.d_model), ("layers", "model", None), "fan_in", min_dtype="int8")
    return ToyParams(
        embed=Spec((cfg.n_vocab, cfg.d_model), (None, "model"), "fan_out", min_dtype="bfloat16"),
        w_gate=square,
        w_value=square,
        out=Spec((cfg.d_model, cfg.n_vocab), ("model", None), "fan_in", min_dtype="int8"),
    )


def step(
    params: ToyParams, h: Float[Array, "B L D"], tokens: Int[Array, " B"], cfg: ToyConfig
) -> tuple[Float[Array, "B L D"], Float[Array, "B A"]]:
    """Read one token per row, and return the logits of the next."""
    x = params.embed[tokens].astype(cfg.dtype)
    states = []
    for layer in range(cfg.n_layer):
        w_gate, w_value = (
            split_k(jax.tree.map(lambda a, layer=layer: a[layer], w)) for w in (params.w_gate, params.w_value)
        )
        read = rms_norm(x)
        gate = jax.nn.sigmoid(matmul(read, w_gate)[:, : cfg.d_model].astype(jnp.float32))
        value = jnp.tanh(matmul(read, w_value)[:, : cfg.d_model].astype(jnp.float32))
        states.append(h[:, layer] + gate * (value - h[:, layer]))
        x = x + states[-1].astype(cfg.dtype)
    logits = matmul(rms_norm(x), split_k(params.out))[:, : cfg.n_vocab]
    return jnp.stack(states, axis=1), logits.astype(jnp.float32)


def empty_carry(cfg: ToyConfig, batch_size: int) -> Float[Array, "B L D"]:
    return jnp.zeros((batch_size, cfg.n_layer, cfg.d_model), jnp.float32)


def carry_axes(carry: Any) -> tuple[str | None, ...]:
    del carry
    return "batch", None, None


def nats(params: ToyParams, buffers: None, carry: Any, batch: Any, cfg: ToyConfig) -> tuple[Float[Array, "B T"], Any]:
    del buffers

    def read(h: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
        h, logits = step(params, h, given[0], cfg)
        return h, token_nll(logits, given[1])

    given = (jnp.asarray(batch.inputs).T, jnp.asarray(batch.targets).T)
    carry, values = jax.lax.scan(checkpointed(read, cfg.remat), carry, given)
    return values.T, carry


def loss(
    params: ToyParams, buffers: None, carry: Any, batch: Any, keys: Any, first_row: Any, cfg: ToyConfig
) -> tuple[Float[Array, ""], Aux]:
    del keys, first_row
    mask = batch.loss_mask.astype(jnp.float32)
    values, carry = nats(params, buffers, carry, batch, cfg)
    value = jnp.mean(mask * values)
    metrics = {"loss_lm_per_token_unscaled": value, "loss_mask_per_token": jnp.mean(mask)}
    return value, Aux(metrics=metrics, statistics=None, carry=carry)


def flops_per_token(cfg: ToyConfig) -> int:
    return 2 * (2 * cfg.n_layer * cfg.d_model**2 + cfg.d_model * cfg.n_vocab)


# Decoding


def init_slots(cfg: ToyConfig, n: int) -> Slots:
    return Slots(h=empty_carry(cfg, n), position=jnp.zeros((n,), jnp.int32))


def empty_state(cfg: ToyConfig) -> State:
    return State(h=empty_carry(cfg, 1)[0], position=jnp.int32(0))


def abstract_state(cfg: ToyConfig, n_read: int) -> State:
    del n_read
    return empty_state(cfg)


def prefill_chunk(params: ToyParams, buffers: None, state: State, tokens: Sequence[int], cfg: ToyConfig) -> State:
    del buffers
    padded = np.zeros((CHUNK,), np.int32)
    padded[: len(tokens)] = tokens
    return _read(params, state, padded, np.int32(len(tokens)), cfg=cfg)[0]


@partial(jax.jit, static_argnames="cfg", compiler_options=COMPILER_OPTIONS)
def _read(
    params: ToyParams, state: State, tokens: Int[Array, " C"], length: Int[Array, ""], *, cfg: ToyConfig
) -> tuple[State, Float[Array, "C A"]]:
    def one(h: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
        token, is_read = given
        new, logits = step(params, h, token[None], cfg)
        return jnp.where(is_read, new, h), logits[0]

    h, logits = jax.lax.scan(one, state.h[None], (tokens, jnp.arange(CHUNK) < length))
    return State(h=h[0], position=state.position + length), logits


def chunk_logprobs(
    params: ToyParams, buffers: None, state: State, tokens: Any, targets: Any, *, cfg: ToyConfig, n_top: int = 0
) -> tuple[Any, Any]:
    del buffers
    _, logits = _read(params, state, tokens[0], np.int32(CHUNK), cfg=cfg)
    return -token_nll(logits, jnp.asarray(targets[0])), top_logprobs(logits, n_top) if n_top else None


@partial(jax.jit, donate_argnums=0)
def insert(slots: Slots, state: State, i: int | Int[Array, ""]) -> Slots:
    return Slots(h=slots.h.at[i].set(state.h), position=slots.position.at[i].set(state.position))


@partial(jax.jit, static_argnames="cfg")
def single_slot(state: State, cfg: ToyConfig) -> Slots:
    return insert(init_slots(cfg, 1), state, 0)


@jax.jit
def _taken(slots: Slots, i: int | Int[Array, ""]) -> State:
    return State(h=slots.h[i], position=slots.position[i])


def extract(prepared: Any, slots: Slots, i: int, cfg: ToyConfig, n_read: int, known: State | None = None) -> State:
    del prepared, cfg, n_read, known
    return _taken(slots, i)


def tick(params: ToyParams, slots: Slots, tokens: Any, active: Any, cfg: ToyConfig, of: Any) -> tuple[Slots, Any]:
    del active, of
    h, logits = step(params, slots.h, tokens, cfg)
    return Slots(h=h, position=slots.position + 1), logits


FAMILY = TokenFamily(
    name="toy",
    config=ToyConfig,
    rules={**ROWS, "model": "fsdp"},
    param_specs=param_specs,
    loss=loss,
    flops_per_token=flops_per_token,
    empty_carry=empty_carry,
    carry_axes=carry_axes,
    lora_targets=("w_gate", "w_value"),
    nats=nats,
    decoder=Decoder(
        init_slots=init_slots,
        empty_state=empty_state,
        abstract_state=abstract_state,
        chunk_len=lambda cfg: CHUNK,
        prefill_chunk=prefill_chunk,
        chunk_logprobs=chunk_logprobs,
        insert=insert,
        single_slot=single_slot,
        extract=extract,
        decode=decode_program(tick),
    ),
)
