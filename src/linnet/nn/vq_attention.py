"""Softmax attention in linear time: recent keys are scored individually, older keys through their codes (vector quantisation).

Letters: B batch, H heads, T tokens, N blocks, L block length, M window, P = ceil(M / L) earlier blocks whose keys are still
scored individually, W = P L + L columns, S codes, K key width, V value width, R = M + 1 distances.

A block of L queries attends to the table (per code, the number of older keys assigned to it and the sum of their values), to the P
blocks before it, and to itself. A key moves into the table when it is P blocks old. The result does not depend on L;
`attention_dense` is the straightforward O(T^2) implementation.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from linnet.core.pytree import pytree
from linnet.nn.vq_attention_scan import EMPTY, Columns, Given, Learned, Options, Table, attend_blocks, fold


@pytree
class AttentionState:
    """Attention state of a sequence, of constant size.

    The window holds the last M tokens, oldest first; the table holds everything older.
    """

    codes: Int[Array, "*G B H M"]
    keys: Float[Array, "*G B H M K"]  # as quantised when first processed: the codebook may have changed since
    values: Float[Array, "*G B H M V"]
    documents: Int[Array, "*G B M"]
    count: Float[Array, "*G B H S"]
    total: Float[Array, "*G B H S V"]
    table_document: Int[Array, "*G B"]


@pytree
class Queries:
    """Queries with their biases: q + u is scored against codes, q + w against distances."""

    content: Float[Array, "*N B H T K"]
    position: Float[Array, "*N B H T K"]


def empty_state(
    batch: int,
    n_head: int,
    window: int,
    n_code: int,
    key_width: int,
    width: int,
    dtype: jnp.dtype | type,
    leading: tuple[int, ...] = (),
) -> AttentionState:
    return AttentionState(
        codes=jnp.zeros((*leading, batch, n_head, window), jnp.int32),
        keys=jnp.zeros((*leading, batch, n_head, window, key_width), dtype),
        values=jnp.zeros((*leading, batch, n_head, window, width), dtype),
        documents=jnp.full((*leading, batch, window), EMPTY, jnp.int32),
        count=jnp.zeros((*leading, batch, n_head, n_code), jnp.float32),
        total=jnp.zeros((*leading, batch, n_head, n_code, width), jnp.float32),
        table_document=jnp.full((*leading, batch), EMPTY, jnp.int32),
    )


def into_blocks(x: Shaped[Array, "B T *F"], block_len: int, fill: int = 0) -> Shaped[Array, "N B L *F"]:
    """Split tokens into blocks and pad the last one. The block axis comes first because it is scanned over: a model that keeps this
    layout never transposes its wide arrays."""
    batch, n_token = x.shape[:2]
    n_block = -(-n_token // block_len)
    x = _pad(x, 1, 0, n_block * block_len - n_token, fill)
    return x.reshape(batch, n_block, block_len, *x.shape[2:]).swapaxes(0, 1)


def out_of_blocks(x: Shaped[Array, "N *B L F"], n_token: int) -> Shaped[Array, "*B T F"]:
    """Join blocks along the second-to-last axis."""
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])[..., :n_token, :]


def attention(
    queries: Queries,
    keys: Float[Array, "N B H L K"],
    chosen: Int[Array, "N B H L"],
    values: Float[Array, "N B H L V"],
    codebook: Float[Array, "H S K"],
    distances: Float[Array, "H R K"],
    state: AttentionState,
    documents: Int[Array, "N B L"],
    *,
    n_token: int,
    agg_cache: bool,
    grad_thru_cache: bool,
    reset: bool,
    length: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "N B H L V"], AttentionState]:
    """Attend `n_token` tokens, split into blocks, after `state`. `keys` are the quantised keys (straight-through). With `reset`,
    tokens attend only to their own document. Tokens whose document is EMPTY are padding; with `length`, these are all but the first
    `length` of each row. Outputs of padding are meaningless and the state ignores them.
    """
    n_block, batch, n_head, block_len, _ = values.shape
    window = state.codes.shape[-1]
    if not reset:  # one document: from here on `documents` only distinguishes real tokens from EMPTY ones
        documents = jnp.where(documents == EMPTY, EMPTY, 0)
    n_earlier = -(-window // block_len)
    margin = n_earlier * block_len - window
    last_document = _last_document(out_of_blocks(documents[..., None], n_token)[..., 0], length)
    row_documents = jnp.repeat(documents, n_head, axis=1)

    def rows(x: Array) -> Array:
        return x.reshape(n_block, batch * n_head, *x.shape[3:])

    def state_blocks(x: Array, fill: int = 0) -> Array:
        """Convert the state's window to the P blocks before the first one, with empty padding in front."""
        x = _pad(x.reshape(batch * n_head, window, *x.shape[3:]), 1, margin, 0, fill)
        return into_blocks(x, block_len)

    codebook = codebook.astype(values.dtype)
    earlier = Columns(
        keys=state_blocks(state.keys),
        values=state_blocks(state.values),
        codes=state_blocks(state.codes),
        documents=state_blocks(jnp.repeat(state.documents[:, None], n_head, axis=1), EMPTY),
    )
    table = Table(
        count=state.count.reshape(batch * n_head, -1),
        total=state.total.reshape(batch * n_head, *state.total.shape[2:]),
        document=jnp.repeat(state.table_document, n_head),
    )
    attended = attend_blocks(
        Options(window=window, agg_cache=agg_cache, grad_thru_cache=grad_thru_cache, reset=reset),
        Learned(content=rows(queries.content), position=rows(queries.position), keys=rows(keys), values=rows(values)),
        jnp.tile(distances[:, ::-1], (batch, 1, 1)),
        jnp.tile(codebook, (batch, 1, 1)),
        Given(
            codes=rows(chosen),
            documents=row_documents,
            table_document=jnp.concatenate([row_documents[1:, :, 0], jnp.repeat(last_document, n_head)[None]]),
        ),
        jax.lax.stop_gradient(earlier),
        jax.lax.stop_gradient(table),
    )
    out, table = cast(tuple[Array, Table], attended)  # custom_vjp hides the types
    out = out.reshape(values.shape)
    if length is None and n_token == n_block * block_len and not margin and n_block >= n_earlier:
        after = AttentionState(
            codes=out_of_blocks(chosen[-n_earlier:, ..., None], window)[..., 0],
            keys=out_of_blocks(keys[-n_earlier:], window),
            values=out_of_blocks(values[-n_earlier:], window),
            documents=out_of_blocks(documents[-n_earlier:, ..., None], window)[..., 0],
            count=table.count.reshape(state.count.shape),
            total=table.total.reshape(state.total.shape),
            table_document=last_document,
        )
    else:
        after = _advance(
            state,
            out_of_blocks(chosen[..., None], n_token)[..., 0],
            out_of_blocks(keys, n_token),
            out_of_blocks(values, n_token),
            out_of_blocks(documents[..., None], n_token)[..., 0],
            length,
            last_document,
        )
    return out, jax.lax.stop_gradient(after)


def _advance(
    state: AttentionState,
    chosen: Int[Array, "B H T"],
    keys: Float[Array, "B H T K"],
    values: Float[Array, "B H T V"],
    documents: Int[Array, "B T"],
    length: Int[Array, " B"] | None,
    last_document: Int[Array, " B"],
) -> AttentionState:
    """Return the state after the real tokens, for any length: the window keeps the last M tokens, older ones move into the table."""
    batch, _, n_token, _ = values.shape
    window = state.codes.shape[-1]
    codes = jnp.concatenate([state.codes, chosen], axis=2)
    keys = jnp.concatenate([state.keys, keys], axis=2)
    values = jnp.concatenate([state.values, values], axis=2)
    documents = jnp.concatenate([state.documents, documents], axis=1)
    gone = jnp.full((batch,), n_token, jnp.int32) if length is None else length.astype(jnp.int32)
    # A row without a real token keeps its state unchanged.
    last_document = jnp.where(gone > 0, last_document, state.table_document)
    keep = (state.table_document == last_document)[:, None, None]
    leaving = (jnp.arange(window + n_token) < gone[:, None]) & (documents == last_document[:, None])
    leaving = leaving & (documents != EMPTY)
    n_head = codes.shape[1]
    count, total = fold(
        (state.count * keep).reshape(batch * n_head, -1),
        (state.total * keep[..., None]).reshape(batch * n_head, *state.total.shape[2:]),
        codes.reshape(batch * n_head, -1),
        values.reshape(batch * n_head, *values.shape[2:]),
        jnp.repeat(leaving, n_head, axis=0),
    )

    def last_window(x: Array, axis: int) -> Array:
        if length is None:
            return jax.lax.slice_in_dim(x, n_token, n_token + window, axis=axis)
        return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, window, axis=axis - 1))(x, gone)

    return AttentionState(
        codes=last_window(codes, 2),
        keys=last_window(keys, 2),
        values=last_window(values, 2),
        documents=last_window(documents, 1),
        count=count.reshape(state.count.shape),
        total=total.reshape(state.total.shape),
        table_document=last_document,
    )


def _last_document(documents: Int[Array, "B T"], length: Int[Array, " B"] | None) -> Int[Array, " B"]:
    if length is None:
        return documents[:, -1]
    return jnp.take_along_axis(documents, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]


def _pad(x: Array, axis: int, before: int, after: int, fill: int = 0) -> Array:
    if not before and not after:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, after)
    return jnp.pad(x, widths, constant_values=fill)
