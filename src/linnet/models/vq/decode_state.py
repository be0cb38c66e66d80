"""Decoding state of `vq` (slots and prepared weights) and its sharding.

Letters as in `slots` and `decode`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from linnet.core.params import Spec
from linnet.core.pytree import pytree, replace
from linnet.models.tensor_parallel import REPLICATED, ShardedModel, current_tp
from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import VQParams, head_axis, param_specs
from linnet.nn.batch_invariant import SplitK
from linnet.nn.moe import ExpertWeights, Mixture
from linnet.parallel.sharding import PSpecTree


@pytree
class UnitMemory:
    """State of one unit for all slots."""

    total: Float[Array, "R N V"]
    codes: Int[Array, "R W"]
    count: Float[Array, "R N"]  # 0 for an empty column, whose total may then be any finite value


@pytree
class VQSlots:
    units: tuple[UnitMemory, ...]  # not stacked: XLA would copy a stack to read one unit
    position: Int[Array, " B"]  # tokens read so far
    condition: Float[Array, "B D"] | None = None  # projected condition of each slot; None in an unconditional model


@pytree
class UnitWeights:
    gain: Float[Array, " D"]
    bias: Float[Array, " D"]
    project: SplitK  # D x (HK + HK + HV + HV): queries, keys, values, gates
    scores: tuple[SplitK, ...]  # per head K x P: the code vectors, then r_0 .. r_M
    offset: Float[Array, "H P"]  # u . C, then w . r
    half_square: Float[Array, "H S"]  # |C|^2 / 2
    out: SplitK  # HV x D
    mixture: Mixture | None  # None without experts


@pytree
class Prepared:
    """Weights in the layout for decoding: one tuple entry per unit, with all constants precomputed."""

    embed: Float[Array, "A D"]  # the vocabulary is padded on a mesh, so that shards are equal
    position_scale: Float[Array, ""] | None
    units: tuple[UnitWeights, ...]
    out_gain: Float[Array, " D"] | None
    out_norm_bias: Float[Array, " D"] | None
    logits: SplitK  # D x A, padded
    logits_bias: Float[Array, " A"]
    position_gain: Float[Array, "P D"] | None = None  # None in an unconditional model


# Sharding. Each device holds some heads, or some values of a single head: a model of that size, except for the psums.


def shard_config(cfg: VQConfig) -> VQConfig:
    """Return the config of one device's shard of the model."""
    n = current_tp().model
    if cfg.n_head > 1:
        return dataclasses.replace(cfg, n_head=cfg.n_head // n)
    return dataclasses.replace(cfg, d_v=cfg.d_v // n)


def split_fused_kvg(params: VQParams, cfg: VQConfig) -> tuple[VQParams, VQParams]:
    """Split the fused keys, values and gates and pad the vocabulary, so that each can be sharded. Also returns the specs."""
    specs, n = param_specs(cfg), current_tp().model
    short, ends = -cfg.n_vocab % n, (cfg.n_head * cfg.d_k, cfg.n_head * (cfg.d_k + cfg.d_v))
    edges = list(zip((0, *ends), (*ends, ends[1] + cfg.n_head * cfg.d_v), strict=True))
    fused = params.units.w_kvg
    columns = tuple(jax.tree.map(lambda w, a=a, b=b: w[..., a:b], fused) for a, b in edges)
    axes = (head_axis(cfg), "values", "values")
    column_specs = tuple(
        _replace_spec(specs.units.w_kvg, shape=(*fused.shape[:-1], b - a), axes=(None, None, axis))
        for (a, b), axis in zip(edges, axes, strict=True)
    )

    def pad(x: Any, axis: int) -> Any:
        return jax.tree.map(lambda x: jnp.pad(x, [(0, short if i == axis % x.ndim else 0) for i in range(x.ndim)]), x)

    def pad_spec(spec: Any, axis: int) -> Spec:
        size = spec.shape[axis] + short
        shape = tuple(size if i == axis % len(spec.shape) else s for i, s in enumerate(spec.shape))
        return _replace_spec(spec, shape=shape)

    return (
        replace(
            params,
            units=replace(params.units, w_kvg=columns),
            embed=pad(params.embed, 0),
            w_out=None if cfg.e_tie else pad(params.w_out, -1),
            out_bias=pad(params.out_bias, 0),
        ),
        replace(
            specs,
            units=replace(specs.units, w_kvg=column_specs),
            embed=pad_spec(specs.embed, 0),
            w_out=None if cfg.e_tie else pad_spec(specs.w_out, -1),
            out_bias=pad_spec(specs.out_bias, 0),
            place=None if specs.place is None else _replace_spec(specs.place, axes=(None, None)),
        ),
    )


def _replace_spec(spec: Any, **changes: Any) -> Spec:
    """Change a Spec, which in a tree of them has the type of the weight that it declares."""
    return dataclasses.replace(spec, **changes)


def prepared_pspecs(cfg: VQConfig) -> PSpecTree[Prepared]:
    """Return PartitionSpecs of the prepared weights: projections are sharded by output, output projections by input."""
    columns, rows = PartitionSpec(None, "model"), PartitionSpec("model")
    by_head = cfg.n_head > 1
    wide, tall = PartitionSpec("expert", None, "model"), PartitionSpec("expert", "model")
    experts = PSpecTree.of(ExpertWeights, gate=wide, value=wide, out=tall)
    mixture = PSpecTree.of(Mixture, in_gain=REPLICATED, router=REPLICATED, experts=experts, out_gain=REPLICATED)
    unit = PSpecTree.of(
        UnitWeights,
        gain=REPLICATED,
        bias=REPLICATED,
        project=columns,
        scores=columns if by_head else REPLICATED,
        offset=rows if by_head else REPLICATED,
        half_square=rows if by_head else REPLICATED,
        out=rows,
        mixture=mixture if cfg.n_expert else None,
    )
    return PSpecTree.of(
        Prepared,
        embed=rows,
        position_scale=REPLICATED,
        units=(unit,) * cfg.n_unit,
        out_gain=REPLICATED,
        out_norm_bias=REPLICATED,
        logits=columns,
        logits_bias=rows,
        position_gain=REPLICATED,
    )


def slot_pspecs(n_head: int, n_unit: int) -> PSpecTree[VQSlots]:
    """Return PartitionSpecs of slots. With several heads a device holds all slots' rows for its heads; the global row order is
    arbitrary."""
    rows = PartitionSpec("model") if n_head > 1 else REPLICATED
    total = rows if n_head > 1 else PartitionSpec(None, None, "model")
    unit = PSpecTree.of(UnitMemory, total=total, codes=rows, count=rows)
    return PSpecTree.of(VQSlots, units=(unit,) * n_unit, position=REPLICATED, condition=REPLICATED)


def shard_model(prepared: Prepared, slots: VQSlots, cfg: VQConfig) -> ShardedModel:
    del prepared, slots
    return ShardedModel(cfg=shard_config(cfg), weights=prepared_pspecs(cfg), slots=slot_pspecs(cfg.n_head, cfg.n_unit))
