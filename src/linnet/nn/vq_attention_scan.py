"""Inner loop of VQ attention: a scan over blocks with a hand-written backward scan.

Letters: N blocks, A = batch x heads (nothing is shared between them here), L block length, M window, P earlier blocks, X = P + N
blocks including those of the state in front, W = P L + L columns that a block scores individually, S codes, K key width, V value
width, R = M + 1 distances (the largest first).

The backward pass stores only each block's output and log-sum, and recomputes scores and tables: scores are cheap (K is small), so
a layer's memory is that of its values. The residuals of autodiff (the weights, tables, shifted and joined columns of every block)
took more than half of the time and memory of a step. The backward pass works on transposed scores (a row per key, not per query),
because the products with the wide values then need no transposed operand.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from linnet.core.pytree import pytree

EMPTY = -1  # document id of a column without a key
KEPT = ("attention_out", "attention_log_sum")  # residuals a checkpointed layer must save, or the scan runs twice


class Options(NamedTuple):
    """Static options of the compiled program."""

    window: int
    agg_cache: bool
    grad_thru_cache: bool
    reset: bool


@pytree
class Learned:
    """Differentiable inputs, split into blocks."""

    content: Float[Array, "N A L K"]  # q + u, scored against codes
    position: Float[Array, "N A L K"]  # q + w, scored against distances
    keys: Float[Array, "N A L K"]  # quantised
    values: Float[Array, "N A L V"]


@pytree
class Given:
    """Inputs without a gradient."""

    codes: Int[Array, "N A L"]
    documents: Int[Array, "N A L"]
    table_document: Int[Array, "N A"]  # which document the table holds after each block


@pytree
class Columns:
    """Keys that are scored individually, and their values."""

    keys: Float[Array, "X A L K"]
    values: Float[Array, "X A L V"]
    codes: Int[Array, "X A L"]
    documents: Int[Array, "X A L"]


@pytree
class Table:
    """All older keys, aggregated per code: their number and the sum of their values."""

    count: Float[Array, "A S"]
    total: Float[Array, "A S V"]
    document: Int[Array, " A"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_blocks(
    options: Options,
    learned: Learned,
    distances: Float[Array, "A R K"],
    codebook: Float[Array, "A S K"],
    given: Given,
    earlier: Columns,
    table: Table,
) -> tuple[Float[Array, "N A L V"], Table]:
    """Attend N blocks after the P blocks of `earlier` and the `table`. Also returns the table after them."""
    out, _, end = _forward(options, learned, distances, codebook, given, earlier, table)
    return out, end


def _forward(
    options: Options, learned: Learned, distances: Array, codebook: Array, given: Given, earlier: Columns, table: Table
) -> tuple[Array, Float[Array, "N A L"], Table]:
    columns, codebook = _join(earlier, learned, given), _far(options, codebook)
    n_near = earlier.codes.shape[0] + 1
    distances = _widen(distances, given.codes.shape[-1])

    def step(table: Table, block: tuple[Array, ...]) -> tuple[Table, tuple[Array, Array]]:
        index, content, position, documents, table_document = block
        # Fold before reading: in the other order XLA copies the table before each write, twice per block.
        leaving = _take(columns, jnp.maximum(index - 1, 0), 1)
        leaving = dataclasses.replace(leaving, documents=jnp.where(index > 0, leaving.documents, EMPTY))
        table = _fold_oldest(options, table, leaving, table_document)
        near = _take(columns, index, n_near)
        bias = _near_bias(options, position, distances, documents, near.documents)
        near_score = _dot("alk,awk->alw", content, near.keys) + bias
        far = _far(options, table)
        far_score = _dot("alk,ask->als", content, codebook) + _far_bias(options, documents, far)
        top = jnp.maximum(jnp.max(near_score, axis=-1), jnp.max(far_score, axis=-1, initial=-jnp.inf))
        # A padded query may have no visible key: keep its values finite; they are never used.
        top = jnp.maximum(top, jnp.finfo(jnp.float32).min)[..., None]
        near_weight, far_weight = jnp.exp(near_score - top), jnp.exp(far_score - top)
        norm = jnp.sum(near_weight, axis=-1) + jnp.sum(far_weight * far.count[:, None], axis=-1)
        norm = jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
        dtype = near.values.dtype
        mixed = _dot("alw,awv->alv", near_weight.astype(dtype), near.values)
        mixed = mixed + _dot("als,asv->alv", far_weight.astype(dtype), far.total.astype(dtype))
        out = (mixed / norm[..., None]).astype(dtype)
        return table, (out, top[..., 0] + jnp.log(norm))

    before = jnp.concatenate([table.document[None], given.table_document[:-1]])
    n_block = given.codes.shape[0]
    blocks = (jnp.arange(n_block), learned.content, learned.position, given.documents, before)
    end, (out, log_sum) = jax.lax.scan(step, table, blocks)
    end = _fold_oldest(options, end, _take(columns, jnp.array(n_block - 1), 1), given.table_document[-1])
    return out, log_sum, end


def _forward_keeping(options: Options, *inputs: Any) -> tuple[Any, Any]:
    out, log_sum, end = _forward(options, *inputs)
    out, log_sum = checkpoint_name(out, KEPT[0]), checkpoint_name(log_sum, KEPT[1])
    return (out, end), (*inputs, out, log_sum)


@pytree
class _Pending:
    """Gradients accumulated for earlier blocks."""

    keys: Float[Array, "A E K"]
    values: Float[Array, "A E V"]
    table: Float[Array, "A S V"]


def _backward(options: Options, kept: tuple[Any, ...], cotangents: tuple[Array, Table]) -> tuple[Any, ...]:
    """Backward pass. The final state is never differentiated (backpropagation through time is truncated there), so only the output's
    gradient counts. A trailing `t` marks a matrix with one row per key."""
    learned, distances, codebook, given, earlier, table, out, log_sum = kept
    columns, codebook = _join(earlier, learned, given), _far(options, codebook)
    n_earlier, n_row, block_len, key_width = earlier.keys.shape
    n_column = n_earlier * block_len
    margin = n_column - options.window
    wide_distances = _widen(distances, block_len)

    def step(carry: tuple[_Pending, Array], block: Any) -> tuple[tuple[_Pending, Array], Learned]:
        pending, d_distances = carry
        index, content, position, documents, table_document, table, out, log_sum, d_out = block
        far = _far(options, table)
        near = _take(columns, index, n_earlier + 1)
        dtype, log_sum = d_out.dtype, log_sum[:, None]
        bias = _near_bias(options, position, wide_distances, documents, near.documents)
        near_t = jnp.exp(_dot("awk,alk->awl", near.keys, content) + bias.swapaxes(1, 2) - log_sum)
        far_bias = _far_bias(options, documents, far)
        far_t = jnp.exp(_dot("ask,alk->asl", codebook, content) + far_bias.swapaxes(1, 2) - log_sum)
        centre = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)[:, None]
        d_near_t = (near_t * (_dot("awv,alv->awl", near.values, d_out) - centre)).astype(dtype)
        d_far_t = _dot("asv,alv->asl", far.total.astype(dtype), d_out) - far.count[..., None] * centre
        d_far_t = (far_t * d_far_t).astype(dtype)
        d_by_distance = _unshift(d_near_t.swapaxes(1, 2))
        d_content = _dot("awl,awk->alk", d_near_t, near.keys) + _dot("asl,ask->alk", d_far_t, codebook)
        d_keys = _dot("awl,alk->awk", d_near_t, content)
        d_values = _dot("awl,alv->awv", near_t.astype(dtype), d_out)
        if options.grad_thru_cache:
            # Columns older than the window are scored by their code: no gradient to their keys.
            d_keys = jnp.where(jnp.arange(d_keys.shape[1])[:, None] < margin, 0.0, d_keys) if margin else d_keys
            to_oldest = _unfold_oldest(options, pending.table, _oldest(near, n_earlier + 1), table_document)
            d_keys = d_keys + jnp.concatenate([jnp.zeros((n_row, block_len, key_width)), pending.keys], axis=1)
            d_values = d_values + jnp.concatenate([to_oldest, pending.values], axis=1)
            to_table = pending.table
            if options.reset:
                to_table = to_table * (table.document == table_document)[:, None, None]
            if options.agg_cache:
                to_table = to_table + _dot("asl,alv->asv", far_t.astype(dtype), d_out)
            pending = _Pending(
                keys=d_keys[:, :n_column],
                values=d_values[:, :n_column],
                table=to_table,
            )
        d_distances = d_distances + _dot("alr,alk->ark", d_by_distance, position)
        gradient = Learned(
            content=d_content,
            position=_dot("alr,ark->alk", d_by_distance, wide_distances),
            keys=d_keys[:, n_column:],
            values=d_values[:, n_column:],
        )
        return (pending, d_distances), gradient

    last = _Pending(
        keys=jnp.zeros((n_row, n_column, key_width)),
        values=jnp.zeros((n_row, n_column, learned.values.shape[-1])),
        table=jnp.zeros(table.total.shape),
    )
    blocks = (
        jnp.arange(given.codes.shape[0]),
        learned.content,
        learned.position,
        given.documents,
        given.table_document,
        _tables(options, columns, given, table),
        out,
        log_sum,
        cotangents[0],
    )
    (_, d_distances), gradient = jax.lax.scan(step, (last, jnp.zeros(wide_distances.shape)), blocks, reverse=True)
    d_distances = d_distances[:, margin : margin + distances.shape[1]]
    gradient = jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, learned)
    return gradient, d_distances.astype(distances.dtype), None, None, None, None


attend_blocks.defvjp(_forward_keeping, _backward)


def _join(earlier: Columns, learned: Learned, given: Given) -> Columns:
    new = Columns(keys=learned.keys, values=learned.values, codes=given.codes, documents=given.documents)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), earlier, new)


def _take(columns: Columns, index: Int[Array, ""], n_block: int) -> Columns:
    """Return the columns visible to a block: W replaces X and L."""

    def take(x: Array) -> Array:
        x = jnp.moveaxis(jax.lax.dynamic_slice_in_dim(x, index, n_block), 0, 1)
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])

    return jax.tree.map(take, columns)


def _oldest(near: Columns, n_block: int) -> Columns:
    """Return the columns of the oldest block, which move into the table next."""
    return jax.tree.map(lambda x: x[:, : x.shape[1] // n_block], near)


def _far(options: Options, by_code: Any) -> Any:
    """Return the part of a table or codebook that queries attend to: without the aggregate cache, no code at all (S = 0)."""
    return by_code if options.agg_cache else jax.tree.map(lambda x: x[:, :0] if x.ndim > 1 else x, by_code)


def _tables(options: Options, columns: Columns, given: Given, table: Table) -> Table:
    """Recompute the table before each block, stacked: far cheaper than storing it for every layer."""

    def step(table: Table, block: tuple[Columns, Array]) -> tuple[Table, Table]:
        return _fold_oldest(options, table, *block), table

    oldest = jax.tree.map(lambda x: x[: given.codes.shape[0]], columns)
    return jax.lax.scan(step, table, (oldest, given.table_document))[1]


def _fold_oldest(options: Options, table: Table, oldest: Columns, table_document: Int[Array, " A"]) -> Table:
    """Advance by one block: move the oldest columns into the table and drop documents other than `table_document` from it."""
    count, total = table.count, table.total
    if options.reset:
        keep = (table.document == table_document)[:, None]
        count, total = count * keep, total * keep[..., None]
    real = _real(options, oldest, table_document)
    count, total = fold(count, total, oldest.codes, oldest.values, real)
    return Table(count=count, total=total, document=table_document)


def _unfold_oldest(
    options: Options, d_total: Float[Array, "A S V"], oldest: Columns, table_document: Int[Array, " A"]
) -> Float[Array, "A L V"]:
    """Transpose of `_fold_oldest`: the gradient of the oldest columns' values through the table they moved into."""
    row = _table_rows(oldest.codes, _real(options, oldest, table_document), d_total.shape[1])
    rows = d_total.reshape(-1, d_total.shape[-1]).at[row].get(mode="fill", fill_value=0.0)
    return rows.reshape(oldest.values.shape)


def _real(options: Options, oldest: Columns, table_document: Int[Array, " A"]) -> Bool[Array, "A L"]:
    real = oldest.documents != EMPTY
    return real & (oldest.documents == table_document[:, None]) if options.reset else real


def fold(
    count: Float[Array, "A S"],
    total: Float[Array, "A S V"],
    codes: Int[Array, "A J"],
    values: Float[Array, "A J V"],
    real: Bool[Array, "A J"],
) -> tuple[Array, Array]:
    """Move J keys into the table: each adds one to its code's count and its value to the code's sum. A scatter of rows is ten times
    cheaper on CPU than a one-hot matmul."""
    row, width = _table_rows(codes, real, total.shape[1]), total.shape[-1]
    new_count = count.reshape(-1).at[row].add(1.0, mode="drop").reshape(count.shape)
    rows = values.reshape(-1, width).astype(jnp.float32)
    return new_count, total.reshape(-1, width).at[row].add(rows, mode="drop").reshape(total.shape)


def _table_rows(codes: Int[Array, "A J"], real: Bool[Array, "A J"], n_code: int) -> Int[Array, " AJ"]:
    row = jnp.arange(codes.shape[0], dtype=jnp.int32)[:, None] * n_code + codes
    return jnp.where(real, row, codes.shape[0] * n_code).reshape(-1)  # out of bounds: dropped


def _near_bias(
    options: Options, position: Array, distances: Array, documents: Int[Array, "A L"], columns: Int[Array, "A W"]
) -> Float[Array, "A L W"]:
    """Return the position terms, with -inf where the column is not visible to the query."""
    block_len, n_column = documents.shape[1], columns.shape[1]
    earlier = n_column - block_len
    distance = earlier + jnp.arange(block_len)[:, None] - jnp.arange(n_column)
    seen = (distance >= 0) if options.agg_cache else (distance >= 0) & (distance <= options.window)
    seen = seen & (columns != EMPTY)[:, None, :]
    if options.reset:
        seen = seen & (columns[:, None, :] == documents[:, :, None])
    by_distance = _dot("alk,ark->alr", position, distances)
    return jnp.where(seen, _shift(by_distance), -jnp.inf)


def _far_bias(options: Options, documents: Int[Array, "A L"], table: Table) -> Float[Array, "A _ S"]:
    """Return -inf where the table has no key of that code visible to the query, else 0; one row for all queries unless `reset`."""
    seen = (table.count > 0)[:, None, :]
    if options.reset:
        seen = seen & (table.document[:, None] == documents)[..., None]
    return jnp.where(seen, 0.0, -jnp.inf)


def _widen(distances: Float[Array, "A R K"], block_len: int) -> Float[Array, "A W1 K"]:
    """Pad the distances with zeros to W1 = W + 1, so that their product with the queries is in the layout `_shift` expects."""
    margin = -(distances.shape[1] - 1) % block_len
    return jnp.pad(distances, [(0, 0), (margin, block_len), (0, 0)])


def _shift(by_distance: Float[Array, "A L W1"]) -> Float[Array, "A L W1-1"]:
    """Convert position terms from by-distance to by-column layout: row a moves a places to the right. Reinterpreting rows of length
    W + 1 as rows of length W does this without a gather."""
    n_row, block_len, wide = by_distance.shape
    flat = by_distance.reshape(n_row, block_len * wide)[:, : block_len * (wide - 1)]
    return flat.reshape(n_row, block_len, wide - 1)


def _unshift(by_column: Float[Array, "A L W"]) -> Float[Array, "A L W+1"]:
    """Transpose of `_shift`; entries that fall on the zero padding of `_widen` are meaningless."""
    n_row, block_len, n_column = by_column.shape
    flat = jnp.pad(by_column.reshape(n_row, block_len * n_column), [(0, 0), (0, block_len)])
    return flat.reshape(n_row, block_len, n_column + 1)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
