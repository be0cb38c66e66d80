"""The inner loop of linear attention: a scan over blocks, and its hand-written backward scan.

Letters: N blocks, B batch, H heads, L block length, M window, P earlier blocks, E = P L their columns, W = E + L columns, S codes,
K key width, V value width, R = M + 1 distances (the largest first).

The backward pass keeps only each block's output and log-sum, and computes scores and tables anew: scores are cheap (K is small),
and so a layer's memory is that of its values. What autodiff would keep and copy (the weights, tables, shifted and joined columns
of every block) took more than half of the time and memory of a step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from linnet.pytree import pytree, replace

EMPTY = -1  # the document of a column that holds no key
SAVED = ("attention_out", "attention_log_sum")  # what a checkpointed layer must keep, or the scan runs twice


class Options(NamedTuple):
    """What is fixed when the program is compiled."""

    window: int
    agg_cache: bool
    grad_thru_cache: bool
    reset: bool


@pytree
class Learned:
    """What gets a gradient, cut into blocks."""

    content: Float[Array, "N B H L K"]  # q + u, against codes
    position: Float[Array, "N B H L K"]  # q + w, against distances
    keys: Float[Array, "N B H L K"]  # quantised
    values: Float[Array, "N B H L V"]


@pytree
class Given:
    """What gets none, cut into blocks."""

    codes: Int[Array, "N B H L"]
    documents: Int[Array, "N B L"]
    table_document: Int[Array, "N B"]  # which document the table holds after each block


@pytree
class Carry:
    """The earlier columns and the table, as a block finds them."""

    keys: Float[Array, "B H E K"]
    values: Float[Array, "B H E V"]
    codes: Int[Array, "B H E"]
    documents: Int[Array, "B E"]
    count: Float[Array, "B H S"]
    total: Float[Array, "B H S V"]
    table_document: Int[Array, " B"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_blocks(
    options: Options,
    learned: Learned,
    distances: Float[Array, "H R K"],
    codebook: Float[Array, "H S K"],
    given: Given,
    start: Carry,
) -> tuple[Float[Array, "N B H L V"], Carry]:
    out, _, end = _forward(options, learned, distances, codebook, given, start)
    return out, end


def _forward(
    options: Options, learned: Learned, distances: Array, codebook: Array, given: Given, start: Carry
) -> tuple[Array, Float[Array, "N B H L"], Carry]:
    def step(carry: Carry, block: tuple[Learned, Given]) -> tuple[Carry, tuple[Array, Array]]:
        mine, info = block
        near_score, far_score = _scores(options, mine, distances, codebook, info, carry)
        top = jnp.maximum(jnp.max(near_score, axis=-1), jnp.max(far_score, axis=-1, initial=-jnp.inf))
        # A padded query may see nothing at all: keep its numbers finite, nobody reads them.
        top = jnp.maximum(top, jnp.finfo(jnp.float32).min)[..., None]
        near, far = jnp.exp(near_score - top), jnp.exp(far_score - top)
        norm = jnp.sum(near, axis=-1) + _dot("bhls,bhs->bhl", far, carry.count[:, :, : far.shape[-1]])
        norm = jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
        out = _mix(near, far, carry, mine.values) / norm[..., None]
        return _next(options, carry, mine, info), (out.astype(mine.values.dtype), top[..., 0] + jnp.log(norm))

    end, (out, log_sum) = jax.lax.scan(step, start, (learned, given))
    return out, log_sum, end


def _forward_keeping(options: Options, *inputs: Any) -> tuple[Any, Any]:
    out, log_sum, end = _forward(options, *inputs)
    out, log_sum = checkpoint_name(out, SAVED[0]), checkpoint_name(log_sum, SAVED[1])
    return (out, end), (*inputs, out, log_sum)


@pytree
class _Pending:
    """Gradients on their way back to earlier blocks."""

    keys: Float[Array, "B H E K"]
    values: Float[Array, "B H E V"]
    table: Float[Array, "B H S V"]
    distances: Float[Array, "H R K"]


def _backward(options: Options, kept: tuple[Any, ...], cotangents: tuple[Array, Carry]) -> tuple[Any, ...]:
    """The state that leaves is never differentiated (a sequence's updates are cut there): only the output's gradient counts."""
    learned, distances, codebook, given, start, out, log_sum = kept
    block_len, earlier = learned.values.shape[3], start.keys.shape[2]
    margin = earlier - options.window

    def step(pending: _Pending, block: Any) -> tuple[_Pending, Learned]:
        mine, info, carry, out, log_sum, d_out = block
        dtype = d_out.dtype
        near_score, far_score = _scores(options, mine, distances, codebook, info, carry)
        log_sum = log_sum[..., None]
        near, far = jnp.exp(near_score - log_sum), jnp.exp(far_score - log_sum)
        centre = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
        d_near_mixed = jnp.concatenate(
            [_dot("bhlv,bhwv->bhlw", d_out, carry.values), _dot("bhlv,bhwv->bhlw", d_out, mine.values)], axis=-1
        )
        d_near = (near * (d_near_mixed - centre)).astype(dtype)
        d_far = _dot("bhlv,bhsv->bhls", d_out, _table(options, carry, dtype))
        d_far = (far * (d_far - centre * carry.count[:, :, None, : far.shape[-1]])).astype(dtype)
        near, far = near.astype(dtype), far.astype(dtype)
        d_by_distance = _unshift(d_near, options.window, margin)
        d_content = (
            _dot("bhlw,bhwk->bhlk", d_near[..., :earlier], carry.keys)
            + _dot("bhlw,bhwk->bhlk", d_near[..., earlier:], mine.keys)
            + _dot("bhls,hsk->bhlk", d_far, codebook[:, : far.shape[-1]])
        )
        d_keys = _dot("bhlw,bhlk->bhwk", d_near[..., earlier:], mine.content)
        d_values = _dot("bhlw,bhlv->bhwv", near[..., earlier:], d_out)
        d_distances = pending.distances + _dot("bhlr,bhlk->hrk", d_by_distance, mine.position)
        if options.grad_thru_cache:
            d_keys, earlier_keys = _later(pending.keys, d_keys, block_len)
            d_values, earlier_values = _later(pending.values, d_values, block_len)
            # Columns older than the window count by their code alone: no gradient to their keys.
            to_keys = _dot("bhlw,bhlk->bhwk", d_near[..., margin:earlier], mine.content)
            leaving = _leaving(options, carry, mine, info)
            pending = _Pending(
                keys=earlier_keys.at[:, :, margin:].add(to_keys),
                values=(earlier_values + _dot("bhlw,bhlv->bhwv", near[..., :earlier], d_out))
                .at[:, :, :block_len]
                .add(gathered_table_gradient(pending.table, leaving)),
                table=_table_gradient(options, pending.table, carry, info, far, d_out),
                distances=d_distances,
            )
        else:
            pending = replace(pending, distances=d_distances)
        return pending, Learned(
            content=d_content,
            position=_dot("bhlr,hrk->bhlk", d_by_distance, distances),
            keys=d_keys,
            values=d_values,
        )

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), start)
    last = _Pending(
        keys=zeros.keys,
        values=zeros.values,
        table=zeros.total,
        distances=jnp.zeros(distances.shape, jnp.float32),
    )
    carries = _carries(options, learned, given, start)
    pending, gradient = jax.lax.scan(step, last, (learned, given, carries, out, log_sum, cotangents[0]), reverse=True)
    gradient = jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, learned)
    return gradient, pending.distances.astype(distances.dtype), None, None, None


attend_blocks.defvjp(_forward_keeping, _backward)


@pytree
class Leaving:
    """The oldest block of columns, about to move into the table."""

    codes: Int[Array, "B H L"]
    values: Float[Array, "B H L V"]
    real: Bool[Array, "B L"]


def _leaving(options: Options, carry: Carry, mine: Learned, info: Given) -> Leaving:
    block_len = info.codes.shape[2]
    documents = carry.documents[:, :block_len]
    real = documents != EMPTY
    if options.reset:
        real = real & (documents == info.table_document[:, None])
    return Leaving(codes=carry.codes[:, :, :block_len], values=carry.values[:, :, :block_len], real=real)


def _next(options: Options, carry: Carry, mine: Learned, info: Given) -> Carry:
    """Moves on by one block: the oldest columns into the table, this block's to the end of the columns."""
    count, total = carry.count, carry.total
    if options.reset:
        keep = (carry.table_document == info.table_document)[:, None, None]
        count, total = count * keep, total * keep[..., None]
    leaving = _leaving(options, carry, mine, info)
    count, total = fold(count, total, leaving)
    block_len = info.codes.shape[2]
    return Carry(
        keys=jnp.concatenate([carry.keys[:, :, block_len:], mine.keys], axis=2),
        values=jnp.concatenate([carry.values[:, :, block_len:], mine.values], axis=2),
        codes=jnp.concatenate([carry.codes[:, :, block_len:], info.codes], axis=2),
        documents=jnp.concatenate([carry.documents[:, block_len:], info.documents], axis=1),
        count=count,
        total=total,
        table_document=info.table_document,
    )


def _carries(options: Options, learned: Learned, given: Given, start: Carry) -> Carry:
    """The carry each block found, stacked: far cheaper to make again than to keep for every layer."""

    def step(carry: Carry, block: tuple[Learned, Given]) -> tuple[Carry, Carry]:
        return _next(options, carry, *block), carry

    return jax.lax.scan(step, start, (learned, given))[1]


def fold(count: Float[Array, "B H S"], total: Float[Array, "B H S V"], leaving: Leaving) -> tuple[Array, Array]:
    """Moves keys into the table: their code's count grows by one, its sum by their value. A scatter of rows: ten times cheaper
    here than a one-hot matmul."""
    width = total.shape[-1]
    row = _table_rows(leaving, total.shape[2])
    new_count = count.reshape(-1).at[row].add(1.0, mode="drop").reshape(count.shape)
    rows = leaving.values.reshape(-1, width).astype(jnp.float32)
    return new_count, total.reshape(-1, width).at[row].add(rows, mode="drop").reshape(total.shape)


def gathered_table_gradient(table: Float[Array, "B H S V"], leaving: Leaving) -> Float[Array, "B H L V"]:
    """The transpose of `fold`."""
    row = _table_rows(leaving, table.shape[2])
    rows = table.reshape(-1, table.shape[-1]).at[row].get(mode="fill", fill_value=0.0)
    return rows.reshape(leaving.values.shape)


def _table_rows(leaving: Leaving, n_code: int) -> Int[Array, " BHL"]:
    batch, n_head, _ = leaving.codes.shape
    row = jnp.arange(batch * n_head, dtype=jnp.int32).reshape(batch, n_head, 1) * n_code + leaving.codes
    return jnp.where(leaving.real[:, None, :], row, batch * n_head * n_code).reshape(-1)  # out of bounds: dropped


def _table_gradient(
    options: Options, later: Float[Array, "B H S V"], carry: Carry, info: Given, far: Array, d_out: Array
) -> Float[Array, "B H S V"]:
    if options.reset:
        later = later * (carry.table_document == info.table_document)[:, None, None, None]
    return later + _dot("bhls,bhlv->bhsv", far, d_out) if options.agg_cache else later


def _later(pending: Array, own: Array, block_len: int) -> tuple[Array, Array]:
    """What later blocks sent to this one joins its own gradient; the rest moves one block on."""
    moved = jnp.concatenate([jnp.zeros_like(pending[:, :, :block_len]), pending[:, :, :-block_len]], axis=2)
    return own + pending[:, :, -block_len:], moved


def _scores(
    options: Options, mine: Learned, distances: Array, codebook: Array, info: Given, carry: Carry
) -> tuple[Float[Array, "B H L W"], Float[Array, "B H L S"]]:
    """-inf where a query does not see. Without the cache there are no far scores (S = 0)."""
    block_len, earlier = info.codes.shape[2], carry.keys.shape[2]
    near = jnp.concatenate(
        [_dot("bhlk,bhwk->bhlw", mine.content, carry.keys), _dot("bhlk,bhwk->bhlw", mine.content, mine.keys)], axis=-1
    )
    near = near + _shift(_dot("bhlk,hrk->bhlr", mine.position, distances), earlier - options.window)
    documents = jnp.concatenate([carry.documents, info.documents], axis=1)
    seen = (documents != EMPTY)[:, None, None, :] & _near_mask(block_len, earlier, options)
    if options.reset:
        seen = seen & (documents[:, None, :] == info.documents[:, :, None])[:, None]
    codebook = codebook if options.agg_cache else codebook[:, :0]
    far = _dot("bhlk,hsk->bhls", mine.content, codebook)
    in_table = (carry.count > 0)[:, :, None, : far.shape[-1]]
    if options.reset:
        in_table = in_table & (carry.table_document[:, None] == info.documents)[:, None, :, None]
    return jnp.where(seen, near, -jnp.inf), jnp.where(in_table, far, -jnp.inf)


def _mix(near: Array, far: Array, carry: Carry, values: Array) -> Float[Array, "B H L V"]:
    earlier = carry.keys.shape[2]
    near, far = near.astype(values.dtype), far.astype(values.dtype)
    return (
        _dot("bhlw,bhwv->bhlv", near[..., :earlier], carry.values)
        + _dot("bhlw,bhwv->bhlv", near[..., earlier:], values)
        + _dot("bhls,bhsv->bhlv", far, carry.total[:, :, : far.shape[-1]].astype(values.dtype))
    )


def _table(options: Options, carry: Carry, dtype: Any) -> Float[Array, "B H S V"]:
    return (carry.total if options.agg_cache else carry.total[:, :, :0]).astype(dtype)


def _near_mask(block_len: int, earlier: int, options: Options) -> Bool[Array, "L W"]:
    distance = earlier + jnp.arange(block_len)[:, None] - jnp.arange(earlier + block_len)
    return (distance >= 0) if options.agg_cache else (distance >= 0) & (distance <= options.window)


def _shift(by_distance: Float[Array, "B H L R"], margin: int) -> Float[Array, "B H L W"]:
    """Position terms by distance to position terms by column: row a moves a places to the right. Padding every row to one more
    than its length and reading the whole as rows of that length does it without a gather."""
    *lead, block_len, n_distance = by_distance.shape
    columns = margin + n_distance - 1 + block_len
    padded = jnp.pad(by_distance, [(0, 0)] * (len(lead) + 1) + [(margin, block_len)])
    flat = padded.reshape(*lead, block_len * (columns + 1))[..., : block_len * columns]
    return flat.reshape(*lead, block_len, columns)


def _unshift(by_column: Float[Array, "B H L W"], window: int, margin: int) -> Float[Array, "B H L R"]:
    """The transpose of `_shift`."""
    *lead, block_len, columns = by_column.shape
    flat = by_column.reshape(*lead, block_len * columns)
    flat = jnp.pad(flat, [(0, 0)] * len(lead) + [(0, block_len)])
    return flat.reshape(*lead, block_len, columns + 1)[..., margin : margin + window + 1]


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
