"""Tiled matmul for decoding: multiplies a few rows by selected members of a stack of weights, reading the weights tile by tile.

A tile fits into the CPU cache, so each weight is read from memory once, in its storage dtype, for any number of rows; no float copy
of a complete weight is ever made. Each row is multiplied separately, so its result is batch-invariant.
Letters: N rows, K inputs, M outputs, S members of the stack.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from linnet.core import quant
from linnet.core.pytree import pytree
from linnet.core.quant import Quantized, Weight
from linnet.nn.moe import ExpertWeights, activation, top_k_routing

TILE_BYTES = 256 << 10  # size of a float32 tile: well within the private cache of one core


@pytree
class Groups:
    """Rows grouped by the member of the stack that they are multiplied by, so that each member is read once."""

    order: Int[Array, " N"]  # sorted position -> row
    member: Int[Array, " N"]  # of each group
    start: Int[Array, " N"]
    end: Int[Array, " N"]
    count: Int[Array, ""]  # number of groups


def group_rows(member: Int[Array, " N"], wanted: Array) -> Groups:
    """Group rows by `member`. Rows where `wanted` is False belong to no group."""
    n_row = member.shape[0]
    far = jnp.iinfo(jnp.int32).max
    key = jnp.where(wanted, member, far)
    order = jnp.argsort(key, stable=True)
    ordered = key[order]
    real = ordered != far
    begins = real & ((jnp.arange(n_row) == 0) | (ordered != jnp.roll(ordered, 1)))
    number = jnp.cumsum(begins) - 1  # the group of each sorted row
    of = jnp.arange(n_row)
    inside = real & (number == of[:, None])  # group, row
    return Groups(
        order=order.astype(jnp.int32),
        member=jnp.max(jnp.where(inside, ordered, 0), axis=1).astype(jnp.int32),
        start=jnp.argmax(inside, axis=1).astype(jnp.int32),
        end=(jnp.argmax(inside, axis=1) + jnp.sum(inside, axis=1)).astype(jnp.int32),
        count=jnp.sum(begins).astype(jnp.int32),
    )


def tiled_matmul(x: Float[Array, "N K"], stack: Weight, groups: Groups) -> Float[Array, "N M"]:
    """Multiply each row by its member of the stack [S K M]. Rows in no group are zero in the result."""
    _, n_in, n_out = stack.shape
    n_group = stack.n_group if isinstance(stack, Quantized) else 1
    size = tile_rows(n_in // n_group, n_out)
    per_group = n_in // n_group // size

    def member(g: Array, y: Array) -> Array:
        def tile(t: Array, y: Array) -> Array:
            weight = _tile(stack, groups.member[g], t * size, size, x.dtype)
            scale = None
            if isinstance(stack, Quantized):
                at = (groups.member[g], t // per_group, 0)
                scale = jax.lax.dynamic_slice(stack.scales, at, (1, 1, n_out))[0].astype(x.dtype)

            def row(p: Array, y: Array) -> Array:
                i = groups.order[p]
                part = jax.lax.dynamic_slice(x, (i, t * size), (1, size)) @ weight
                part = part if scale is None else part * scale
                there = jax.lax.dynamic_slice(y, (i, 0), (1, n_out))
                return jax.lax.dynamic_update_slice(y, there + part, (i, 0))

            return jax.lax.fori_loop(groups.start[g], groups.end[g], row, y)

        return jax.lax.fori_loop(0, n_in // size, tile, y)

    return jax.lax.fori_loop(0, groups.count, member, jnp.zeros((x.shape[0], n_out), x.dtype))


def tile_rows(n_in: int, n_out: int) -> int:
    """Return the largest divisor of `n_in` whose rows fit into a tile."""
    max_rows = max(1, TILE_BYTES // (4 * n_out))
    return max(n for n in range(1, n_in + 1) if n_in % n == 0 and n <= max_rows)


def _tile(stack: Weight, member: Array, start: Array, size: int, dtype: jnp.dtype) -> Float[Array, "size M"]:
    at, shape = (member, start, 0), (1, size, stack.shape[-1])

    def slice_tile(weight: Array) -> Array:
        return jax.lax.dynamic_slice(weight, at, shape)[0]

    if isinstance(stack, Quantized):
        return slice_tile(stack.weight).astype(dtype)
    return quant.to_array(jax.tree.map(slice_tile, stack), dtype)


def tiled_matmul_rows(x: Float[Array, "N K"], matrix: Weight, wanted: Groups) -> Float[Array, "N M"]:
    """Multiply each row by a matrix stored output-major (embeddings, for example). Rows in no group are zero in the result."""
    n_out, n_in = matrix.shape
    size = tile_rows(n_out, n_in)

    def tile(t: Array, y: Array) -> Array:
        weight = quant.to_array(
            jax.tree.map(lambda w: jax.lax.dynamic_slice(w, (t * size, 0), (size, n_in)), matrix), x.dtype
        )

        def row(p: Array, y: Array) -> Array:
            i = wanted.order[p]
            part = jax.lax.dynamic_slice(x, (i, 0), (1, n_in)) @ weight.T
            return jax.lax.dynamic_update_slice(y, part, (i, t * size))

        return jax.lax.fori_loop(0, jnp.max(wanted.end), row, y)

    return jax.lax.fori_loop(0, n_out // size, tile, jnp.zeros((x.shape[0], n_out), x.dtype))


def moe_decode(
    x: Float[Array, "N D"],
    router: Float[Array, "L D E"],
    experts: ExpertWeights,
    layer: int | Int[Array, ""],
    wanted: Bool[Array, " N"],
    n_choice: int,
    first: int | Int[Array, ""] = 0,
) -> Float[Array, "N D"]:
    """Mixture of experts for a few tokens: only routed experts are read, each once. If `experts` holds only some of each layer's
    experts, starting at `first`, the result is their partial sum; the rest is computed by other devices."""
    n_layer, _, n_expert = router.shape
    n_here = experts.gate.shape[0] // n_layer
    here = group_rows(jnp.full(wanted.shape, layer, jnp.int32), wanted)
    routing = top_k_routing(tiled_matmul(x.astype(jnp.float32), router, here), n_choice)
    member, ours = routing.chosen, jnp.repeat(wanted, n_choice)
    if n_here < n_expert:
        member = member - first
        ours = ours & ((member >= 0) & (member < n_here)).reshape(-1)
    pairs = group_rows((layer * n_here + member).reshape(-1).astype(jnp.int32), ours)
    each = jnp.repeat(x, n_choice, axis=0)
    hidden = activation(tiled_matmul(each, experts.gate, pairs), tiled_matmul(each, experts.value, pairs))
    y = tiled_matmul(hidden, experts.out, pairs).reshape(*routing.weight.shape, -1)
    return jnp.sum(y * routing.weight[..., None].astype(y.dtype), axis=1)
