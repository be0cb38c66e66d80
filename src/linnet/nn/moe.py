"""Mixture of experts: a router selects the top-k experts of each token, and only those are computed.

Letters: P tokens, D model width, E experts, F hidden width, C experts per token, N = P C token-expert pairs, R rows of a block.

Three implementations with the same result. `moe_dense` computes every expert for every token and is the oracle. `moe_grouped` sorts
pairs by expert and multiplies group by group, for training and prefill. `tiled.moe_decode` reads weights tile by tile, for decoding
a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from linnet.core import quant
from linnet.core.pytree import pytree
from linnet.core.quant import Bf16Bits, Quantized, Weight
from linnet.nn.linear import rows
from linnet.nn.norm import rms_norm_gain
from linnet.parallel import sharding
from linnet.parallel.sharding import AxesTree, LogicalAxes, LogicalAxisRules

HEIGHTS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256)
"""Block heights available in prefill. An expert's rows are multiplied as one block of the smallest height that fits them, so little is
wasted on padding. Each height is compiled separately, so training, which has many rows per expert, uses a single height."""


@pytree
class ExpertWeights:
    """Expert weights of one layer, or of several layers concatenated along the expert axis."""

    gate: Weight  # E D F: passed through GELU
    value: Weight  # E D F
    out: Weight  # E F D


@pytree
class Routing:
    logits: Float[Array, "P E"]
    probability: Float[Array, "P E"]
    chosen: Int[Array, "P C"]
    weight: Float[Array, "P C"]  # probabilities of the chosen experts, not renormalised


def route(x: Float[Array, "*B D"], router: Float[Array, "D E"], n_choice: int) -> Routing:
    """Route each token in float32: rounding could change which experts are chosen."""
    logits = jnp.matmul(x.astype(jnp.float32), router, precision="highest")
    return top_k_routing(logits.reshape(-1, logits.shape[-1]), n_choice)


def top_k_routing(logits: Float[Array, "P E"], n_choice: int) -> Routing:
    probability = jax.nn.softmax(logits, axis=-1)
    weight, chosen = jax.lax.top_k(probability, n_choice)
    return Routing(logits=logits, probability=probability, chosen=chosen, weight=weight)


def activation(gate: Array, value: Array) -> Array:
    return jax.nn.gelu(gate, approximate=True) * value


def moe_dense(x: Float[Array, "P D"], routing: Routing, experts: ExpertWeights) -> Float[Array, "P D"]:
    """Compute every expert for every token and mask the result: the oracle."""
    n_expert = routing.probability.shape[-1]
    gate, value, out = (quant.to_array(w, x.dtype) for w in (experts.gate, experts.value, experts.out))
    hidden = activation(jnp.einsum("pd,edf->epf", x, gate), jnp.einsum("pd,edf->epf", x, value))
    each = jnp.einsum("epf,efd->epd", hidden, out)
    by_expert = jnp.sum(jax.nn.one_hot(routing.chosen, n_expert) * routing.weight[..., None], axis=1)  # P E
    return jnp.einsum("pe,epd->pd", by_expert.astype(x.dtype), each)


def moe_grouped(
    x: Float[Array, "P D"],
    routing: Routing,
    experts: ExpertWeights,
    *,
    first: int | Int[Array, ""] = 0,
    n_token: Int[Array, ""] | None = None,
) -> Float[Array, "P D"]:
    """Compute only the chosen experts. `first`: offset of the layer's experts in the stack. `n_token`: number of real tokens; the
    others cost nothing. With `n_token`, or with quantised experts, there is no gradient."""
    n_expert = routing.probability.shape[-1]
    order, sizes = _by_expert(routing.chosen, n_expert, n_token)
    if n_token is None and _is_float(experts):
        return _weighted(x, routing.weight, experts.gate, experts.value, experts.out, order, sizes, first)
    rows = _gather(x, order, routing.chosen.shape[1])
    heights = [n for n in HEIGHTS if n <= max(rows.shape[0], HEIGHTS[0])]
    return _combine(_forward(rows, experts, sizes, first, heights), routing.weight, order)


def _by_expert(
    chosen: Int[Array, "P C"], n_expert: int, n_token: Int[Array, ""] | None
) -> tuple[Int[Array, " N"], Int[Array, " E"]]:
    """Sort pairs by expert, with padding tokens last. Also returns the number of pairs of each expert."""
    if n_token is not None:
        chosen = jnp.where(jnp.arange(chosen.shape[0])[:, None] < n_token, chosen, n_expert)
    return _sorted(chosen, n_expert)


def _sorted(chosen: Int[Array, "P C"], n_expert: int) -> tuple[Int[Array, " N"], Int[Array, " E"]]:
    """Sort pairs by expert. Pairs of no expert (`n_expert`) come last."""
    flat = chosen.reshape(-1)
    sizes = jnp.sum(flat[:, None] == jnp.arange(n_expert), axis=0, dtype=jnp.int32)
    return jnp.argsort(flat, stable=True), sizes


def _gather(x: Float[Array, "P D"], order: Int[Array, " N"], n_choice: int) -> Float[Array, "N D"]:
    return x[order // n_choice]


def _scatter(sorted_rows: Float[Array, "N D"], order: Int[Array, " N"]) -> Float[Array, "N D"]:
    """Restore token order, by a gather with the inverse permutation because scatters are slow."""
    return sorted_rows[jnp.argsort(order)]


def _combine(y: Float[Array, "N D"], weight: Float[Array, "P C"], order: Int[Array, " N"]) -> Float[Array, "P D"]:
    by_token = _scatter(y, order).reshape(*weight.shape, -1)
    return jnp.sum(by_token * weight[..., None].astype(y.dtype), axis=1)


@jax.custom_vjp
def _weighted(
    x: Float[Array, "P D"],
    weight: Float[Array, "P C"],
    gate: Array,
    value: Array,
    out: Array,
    order: Int[Array, " N"],
    sizes: Int[Array, " E"],
    first: int | Int[Array, ""],
) -> Float[Array, "P D"]:
    return _weighted_forward(x, weight, gate, value, out, order, sizes, first)[0]


def _weighted_forward(x: Array, weight: Array, gate: Array, value: Array, out: Array, *where: Any) -> tuple[Array, Any]:
    order, sizes, first = where
    experts = ExpertWeights(gate=gate, value=value, out=out)
    rows = _gather(x, order, weight.shape[1])
    y = _forward(rows, experts, sizes, first, (training_block(rows.shape[0], sizes.shape[0]),))
    return _combine(y, weight, order), (x, weight, gate, value, out, order, sizes, y)


def _weighted_backward(kept: Any, d_result: Float[Array, "P D"]) -> tuple[Any, ...]:
    x, weight, gate, value, out, order, sizes, y = kept
    n_choice = weight.shape[1]
    by_token = _scatter(y, order).reshape(*weight.shape, -1)
    d_weight = jnp.einsum("pd,pcd->pc", d_result, by_token).astype(weight.dtype)
    d_y = (d_result[:, None] * weight[..., None].astype(d_result.dtype)).reshape(-1, d_result.shape[-1])[order]
    experts = ExpertWeights(gate=gate, value=value, out=out)
    d_x, d_experts = _backward(_gather(x, order, n_choice), d_y, experts, sizes)
    d_x = _scatter(d_x, order).reshape(*weight.shape, -1).sum(axis=1)
    return d_x, d_weight, d_experts.gate, d_experts.value, d_experts.out, None, None, None


_weighted.defvjp(_weighted_forward, _weighted_backward)


def _forward(
    x: Float[Array, "N D"],
    experts: ExpertWeights,
    sizes: Int[Array, " E"],
    first: int | Int[Array, ""],
    heights: Sequence[int],
) -> Float[Array, "N D"]:
    """Pass rows sorted by expert through their experts, `heights[-1]` rows at a time. Rows beyond the last group are zero."""
    starts = jnp.cumsum(sizes) - sizes
    padded = jnp.pad(x, [(0, heights[-1]), (0, 0)])

    def expert(e: Array, y: Float[Array, "N D"]) -> Float[Array, "N D"]:
        def compute(y: Float[Array, "N D"]) -> Float[Array, "N D"]:
            gate, value, out = (_take(w, first + e, x.dtype) for w in (experts.gate, experts.value, experts.out))

            def of_height(n: int, y: Float[Array, "N D"], at: Array, left: Array) -> Float[Array, "N D"]:
                rows = jax.lax.dynamic_slice_in_dim(padded, at, n)
                return _put(y, activation(rows @ gate, rows @ value) @ out, at, left)

            def block(i: Array, y: Float[Array, "N D"]) -> Float[Array, "N D"]:
                left = sizes[e] - i * heights[-1]
                fitting = jnp.sum(left > jnp.asarray(heights[:-1], jnp.int32))
                return jax.lax.switch(
                    fitting, [partial(of_height, n) for n in heights], y, starts[e] + i * heights[-1], left
                )

            return jax.lax.fori_loop(0, -(-sizes[e] // heights[-1]), block, y)

        return jax.lax.cond(sizes[e] > 0, compute, lambda y: y, y)

    y = jax.lax.fori_loop(0, sizes.shape[0], expert, jnp.zeros_like(padded))
    return y[: x.shape[0]]


def _backward(
    x: Float[Array, "N D"], d_y: Float[Array, "N D"], experts: ExpertWeights, sizes: Int[Array, " E"]
) -> tuple[Float[Array, "N D"], ExpertWeights]:
    """Backward pass of `_forward`. Hidden activations are recomputed, which is cheaper than storing them."""
    size = training_block(x.shape[0], sizes.shape[0])
    padded, d_padded = (jnp.pad(a, [(0, size), (0, 0)]) for a in (x, d_y))

    def expert(d_x: Array, one: tuple[ExpertWeights, Array, Array]) -> tuple[Array, ExpertWeights]:
        weights, start, n_row = one
        gate, value, out = (quant.to_array(w, x.dtype) for w in (weights.gate, weights.value, weights.out))

        def block(i: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
            d_x, (d_gate, d_value, d_out) = state
            at = start + i * size
            rows = jax.lax.dynamic_slice_in_dim(padded, at, size)
            d_rows = jax.lax.dynamic_slice_in_dim(d_padded, at, size)
            d_rows = jnp.where((jnp.arange(size) < n_row - i * size)[:, None], d_rows, 0)
            hidden, pull = jax.vjp(activation, rows @ gate, rows @ value)
            d_a, d_b = pull(d_rows @ out.T)
            d_x = _put(d_x, d_a @ gate.T + d_b @ value.T, at, n_row - i * size)
            more = (rows.T @ d_a, rows.T @ d_b, hidden.T @ d_rows)
            total = tuple(a + b for a, b in zip((d_gate, d_value, d_out), more, strict=True))
            return d_x, total

        zeros = tuple(jnp.zeros(w.shape, jnp.float32) for w in (gate, value, out))
        d_x, (d_gate, d_value, d_out) = jax.lax.fori_loop(0, -(-n_row // size), block, (d_x, zeros))
        return d_x, ExpertWeights(gate=d_gate, value=d_value, out=d_out)

    starts = jnp.cumsum(sizes) - sizes
    d_x, d_experts = jax.lax.scan(expert, jnp.zeros_like(padded), (experts, starts, sizes))
    d_experts = jax.tree.map(lambda d, w: d.astype(w.dtype), d_experts, experts)
    return d_x[: x.shape[0]], d_experts


def _put(y: Float[Array, "N D"], rows: Float[Array, "R D"], at: Array, n_row: Array) -> Float[Array, "N D"]:
    """Write the first `n_row` of these rows; the rows after them belong to the next expert."""
    there = jax.lax.dynamic_slice_in_dim(y, at, rows.shape[0])
    rows = jnp.where((jnp.arange(rows.shape[0]) < n_row)[:, None], rows, there)
    return jax.lax.dynamic_update_slice_in_dim(y, rows, at, 0)


def training_block(n_pair: int, n_expert: int) -> int:
    """Return the rows per block in training: few enough that the last, partly empty block of each expert wastes little."""
    n = n_pair // n_expert
    return 16 if n <= 16 else 32 if n <= 96 else 64 if n <= 512 else 128


def _take(stack: Weight, i: int | Int[Array, ""], dtype: Any) -> Array:
    one = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, keepdims=False), stack)
    return quant.to_array(one, dtype)


def _is_float(experts: ExpertWeights) -> bool:
    return not any(isinstance(w, Quantized | Bf16Bits) for w in (experts.gate, experts.value, experts.out))


@pytree
class Mixture:
    """Weights of a residual MoE block: h + RMS(experts(RMS(h)))."""

    in_gain: Float[Array, "*L D"]
    router: Float[Array, "*L D E"]
    experts: ExpertWeights
    out_gain: Float[Array, "*L D"]


def moe_block(
    h: Float[Array, "*B D"],
    mixture: Mixture,
    n_choice: int,
    axes: LogicalAxes,
    rules: LogicalAxisRules,
    *,
    plain: bool = False,
) -> tuple[Float[Array, "*B D"], Routing]:
    """Return the block's update of `h`, before its output norm, and the routing. `axes`: logical axes of `h`."""
    x = rms_norm_gain(h, mixture.in_gain)
    routing = route(rows(x), mixture.router, n_choice)
    if plain:
        y = moe_dense(x.reshape(-1, x.shape[-1]), routing, mixture.experts).reshape(h.shape)
    else:
        y = _spread_experts(x, routing, mixture.experts, axes, rules)
    return y, routing


def _spread_experts(
    x: Float[Array, "*B D"], routing: Routing, experts: ExpertWeights, axes: LogicalAxes, rules: LogicalAxisRules
) -> Float[Array, "*B D"]:
    """Run `moe_grouped` with expert and tensor parallelism. Tokens are all-gathered over the expert axis, each device applies
    its experts (or its shard of their hidden units), and the sums are reduced and scattered back. No token is ever dropped."""
    if sharding.current() is None:
        return moe_grouped(x.reshape(-1, x.shape[-1]), routing, experts).reshape(x.shape)
    n_local = routing.probability.shape[-1] // sharding.axis_size("expert")
    shared, divided = sharding.axis_size("expert") > 1, sharding.axis_size("model") > 1

    def here(x: Array, chosen: Array, weight: Array, experts: ExpertWeights) -> Array:
        shape = x.shape
        x, chosen, weight = (a.reshape(-1, a.shape[-1]) for a in (x, chosen, weight))
        if shared:
            x, chosen, weight = (jax.lax.all_gather(a, "expert", tiled=True) for a in (x, chosen, weight))
            chosen = chosen - jax.lax.axis_index("expert") * n_local
        mine = (chosen >= 0) & (chosen < n_local)
        order, sizes = _sorted(jnp.where(mine, chosen, n_local), n_local)
        y = _weighted(x, weight, experts.gate, experts.value, experts.out, order, sizes, 0)
        if divided:
            y = jax.lax.psum(y, "model")
        if shared:
            y = jax.lax.psum_scatter(y, "expert", tiled=True)
        return y.reshape(shape)

    chosen, weight = (a.reshape(*x.shape[:-1], -1) for a in (routing.chosen, routing.weight))
    wide, tall = ("experts", None, "hidden"), ("experts", "hidden", None)
    weights = AxesTree.of(ExpertWeights, gate=wide, value=wide, out=tall)
    return sharding.shard_map_by_axes(here, rules, (x, chosen, weight, experts), (axes, axes, axes, weights), axes, x)


@pytree
class RouterStats:
    """Statistics of a layer's router over a batch."""

    balance: Float[Array, "*L"]
    z: Float[Array, "*L"]
    load: Float[Array, "*L E"]
    confidence: Float[Array, "*L"]


def router_stats(routing: Routing, mask: Float[Array, " P"]) -> RouterStats:
    n = jnp.maximum(jnp.sum(mask), 1.0)
    return RouterStats(
        balance=balance_loss(routing, mask),
        z=z_loss(routing, mask),
        load=jax.lax.stop_gradient(load(routing, mask)),
        confidence=jax.lax.stop_gradient(jnp.sum(jnp.sum(routing.weight, axis=-1) * mask) / n),
    )


def balance_loss(routing: Routing, mask: Float[Array, " P"]) -> Float[Array, ""]:
    """Return the load-balancing loss: E * sum over experts of load * mean probability. It is 1 if both are uniform."""
    probability = jnp.sum(routing.probability * mask[:, None], axis=0) / jnp.maximum(jnp.sum(mask), 1.0)
    return routing.probability.shape[-1] * jnp.sum(load(routing, mask) * probability)


def load(routing: Routing, mask: Float[Array, " P"]) -> Float[Array, " E"]:
    """Return each expert's fraction of all routed pairs."""
    chosen = jnp.sum(jax.nn.one_hot(routing.chosen, routing.probability.shape[-1]), axis=1) * mask[:, None]
    return jnp.sum(chosen, axis=0) / (jnp.maximum(jnp.sum(mask), 1.0) * routing.chosen.shape[1])


def z_loss(routing: Routing, mask: Float[Array, " P"]) -> Float[Array, ""]:
    """Return the mean squared log-sum-exp of the router logits."""
    square = jax.nn.logsumexp(routing.logits, axis=-1) ** 2
    return jnp.sum(square * mask) / jnp.maximum(jnp.sum(mask), 1.0)
