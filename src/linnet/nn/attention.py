"""Dense softmax attention in linear time: near keys one by one, all older keys through their codes.

Letters: B batch, H heads, T tokens, N blocks, L block length, M window, P = ceil(M / L) earlier blocks whose keys are still
taken one by one, W = P L + L columns, S codes, K key width, V value width, R = M + 1 distances.

A block of L queries sees three things: the table (for each code the number of older keys that had it and the sum of their
values), the P blocks before it, and itself. A key moves into the table when it is P blocks old. The result does not depend on L;
`attention_dense` computes the same thing the obvious way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from linnet.nn.attention_blocks import EMPTY, Carry, Given, Learned, Leaving, Options, attend_blocks, fold
from linnet.pytree import pytree


@pytree
class AttentionState:
    """All that attention remembers of a sequence: its size never grows.

    The window holds the last M tokens, oldest first; the table holds everything older.
    """

    codes: Int[Array, "*G B H M"]
    keys: Float[Array, "*G B H M K"]  # as quantised when read: the codebook may have moved since
    values: Float[Array, "*G B H M V"]
    documents: Int[Array, "*G B M"]
    count: Float[Array, "*G B H S"]
    total: Float[Array, "*G B H S V"]
    table_document: Int[Array, "*G B"]


@pytree
class Queries:
    """What the queries need besides the state: q + u against codes, q + w against distances."""

    content: Float[Array, "B H T K"]
    position: Float[Array, "B H T K"]


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


def attention(
    queries: Queries,
    keys: Float[Array, "B H T K"],
    chosen: Int[Array, "B H T"],
    values: Float[Array, "B H T V"],
    codebook: Float[Array, "H S K"],
    distances: Float[Array, "H R K"],
    state: AttentionState,
    documents: Int[Array, "B T"],
    *,
    block_len: int,
    agg_cache: bool,
    grad_thru_cache: bool,
    reset: bool,
    length: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B H T V"], AttentionState]:
    """Attends T tokens after `state`. `keys` are the quantised keys (straight-through). With `reset`, tokens see only their own
    document. With `length`, only so many tokens of each row are real; outputs beyond are meaningless and the state ignores them.
    """
    n_token, window = values.shape[2], state.codes.shape[-1]
    if not reset:  # one document: from here on `documents` only tells real tokens from EMPTY ones
        documents = jnp.zeros_like(documents)
    if length is not None:
        documents = jnp.where(jnp.arange(n_token) < length[:, None], documents, EMPTY)
    n_block, n_earlier = -(-n_token // block_len), -(-window // block_len)
    padding, margin = n_block * block_len - n_token, n_earlier * block_len - window
    last_document = _last_document(documents, length)

    def blocks(x: Array, axis: int, fill: int = 0) -> Array:
        """Cuts `axis` into blocks and brings them to the front, for scan."""
        x = _pad(x, axis, 0, padding, fill)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], n_block, block_len, *x.shape[axis + 1 :]), axis, 0)

    block_documents = blocks(documents, 1, EMPTY)
    codebook = codebook.astype(values.dtype)
    # The state's window becomes the P blocks before the first one; what does not fill a block is empty.
    start = Carry(
        keys=_pad(state.keys, 2, margin, 0),
        values=_pad(state.values, 2, margin, 0),
        codes=_pad(state.codes, 2, margin, 0),
        documents=_pad(state.documents, 1, margin, 0, EMPTY),
        count=state.count,
        total=state.total,
        table_document=state.table_document,
    )
    out, end = attend_blocks(
        Options(window=window, agg_cache=agg_cache, grad_thru_cache=grad_thru_cache, reset=reset),
        Learned(
            content=blocks(queries.content, 2),
            position=blocks(queries.position, 2),
            keys=blocks(keys, 2),
            values=blocks(values, 2),
        ),
        distances[:, ::-1],
        codebook,
        Given(
            codes=blocks(chosen, 2),
            documents=block_documents,
            table_document=jnp.concatenate([block_documents[1:, :, 0], last_document[None]]),
        ),
        jax.lax.stop_gradient(start),
    )
    out = jnp.moveaxis(out, 0, 2).reshape(*values.shape[:2], n_block * block_len, values.shape[3])[:, :, :n_token]
    if length is None and not padding and not margin:
        after = AttentionState(
            codes=end.codes,
            keys=end.keys,
            values=end.values,
            documents=end.documents,
            count=end.count,
            total=end.total,
            table_document=end.table_document,
        )
    else:
        after = _advance(state, chosen, keys, values, documents, length, last_document)
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
    """The state after the real tokens, for any length: the last M tokens stay in the window, the rest goes to the table."""
    batch, _, n_token, _ = values.shape
    window = state.codes.shape[-1]
    codes = jnp.concatenate([state.codes, chosen], axis=2)
    keys = jnp.concatenate([state.keys, keys], axis=2)
    values = jnp.concatenate([state.values, values], axis=2)
    documents = jnp.concatenate([state.documents, documents], axis=1)
    gone = jnp.full((batch,), n_token, jnp.int32) if length is None else length.astype(jnp.int32)
    # A row without a real token keeps its state whole.
    last_document = jnp.where(gone > 0, last_document, state.table_document)
    keep = (state.table_document == last_document)[:, None, None]
    leaving = (jnp.arange(window + n_token) < gone[:, None]) & (documents == last_document[:, None])
    leaving = leaving & (documents != EMPTY)
    count, total = fold(
        state.count * keep, state.total * keep[..., None], Leaving(codes=codes, values=values, real=leaving)
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
        count=count,
        total=total,
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
