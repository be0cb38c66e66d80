"""Decoding state of `vq` (slots and prepared weights) and its sharding.

Letters as in `slots` and `decode`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from linnet.core.pytree import pytree, replace
from linnet.models.tensor_parallel import EVERYWHERE, WHOLE, parts
from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import VQParams, head_axis, param_specs
from linnet.nn.batch_invariant import SplitK
from linnet.nn.moe import ExpertWeights, Mixture
from linnet.parallel import sharding
from linnet.parallel.sharding import shard_map


@pytree
class UnitMemory:
    """State of one unit for all slots."""

    total: Float[Array, "R N V"]
    codes: Int[Array, "R W"]
    count: Float[Array, "R N"]  # 0 for an empty column, whose total may then be any finite value


@pytree
class Slots:
    units: tuple[UnitMemory, ...]  # not stacked: XLA would copy a stack to read one unit
    position: Int[Array, " B"]  # tokens read so far
    condition: Any = None  # B D: projected condition of each slot, or None in an unconditional model


@pytree
class UnitWeights:
    gain: Float[Array, " D"]
    bias: Float[Array, " D"]
    project: SplitK  # D x (HK + HK + HV + HV): queries, keys, values, gates
    scores: tuple[SplitK, ...]  # per head K x P: the code vectors, then r_0 .. r_M
    offset: Float[Array, "H P"]  # u . C, then w . r
    half_square: Float[Array, "H S"]  # |C|^2 / 2
    out: SplitK  # HV x D
    mixture: Any  # a `Mixture`, or None without experts


@pytree
class Prepared:
    """Weights in the layout for decoding: one tuple entry per unit, with all constants precomputed."""

    embed: Float[Array, "A D"]  # the vocabulary is padded on a mesh, so that shards are equal
    position_scale: Any
    units: tuple[UnitWeights, ...]
    out_gain: Any
    out_norm_bias: Any
    logits: SplitK  # D x A, padded
    logits_bias: Float[Array, " A"]
    place: Any = None  # P D, or None in an unconditional model


# Sharding. Each device holds some heads, or some values of a single head: a model of that size, except for the psums.


def part_config(cfg: VQConfig) -> VQConfig:
    """Return the config of one device's shard of the model."""
    n = parts().model
    if cfg.n_head > 1:
        return dataclasses.replace(cfg, n_head=cfg.n_head // n)
    return dataclasses.replace(cfg, d_v=cfg.d_v // n)


def apart(params: VQParams, cfg: VQConfig) -> tuple[VQParams, VQParams]:
    """Split the fused keys, values and gates and pad the vocabulary, so that each can be sharded. Also returns the specs."""
    specs, n = param_specs(cfg), parts().model
    short, ends = -cfg.n_vocab % n, (cfg.n_head * cfg.d_k, cfg.n_head * (cfg.d_k + cfg.d_v))
    edges = list(zip((0, *ends), (*ends, ends[1] + cfg.n_head * cfg.d_v), strict=True))
    joined = params.units.w_kvg
    columns = tuple(jax.tree.map(lambda w, a=a, b=b: w[..., a:b], joined) for a, b in edges)
    names = (head_axis(cfg), "values", "values")
    column_specs = tuple(
        dataclasses.replace(specs.units.w_kvg, shape=(*joined.shape[:-1], b - a), axes=(None, None, name))
        for (a, b), name in zip(edges, names, strict=True)
    )

    def longer(x: Any, axis: int) -> Any:
        return jax.tree.map(lambda x: jnp.pad(x, [(0, short if i == axis % x.ndim else 0) for i in range(x.ndim)]), x)

    def spec(spec: Any, axis: int) -> Any:
        size = spec.shape[axis] + short
        return dataclasses.replace(
            spec, shape=tuple(size if i == axis % len(spec.shape) else s for i, s in enumerate(spec.shape))
        )

    return (
        replace(
            params,
            units=replace(params.units, w_kvg=columns),
            embed=longer(params.embed, 0),
            w_out=None if cfg.e_tie else longer(params.w_out, -1),
            out_bias=longer(params.out_bias, 0),
        ),
        replace(
            specs,
            units=replace(specs.units, w_kvg=column_specs),
            embed=spec(specs.embed, 0),
            w_out=None if cfg.e_tie else spec(specs.w_out, -1),
            out_bias=spec(specs.out_bias, 0),
            place=None if specs.place is None else dataclasses.replace(specs.place, axes=(None, None)),
        ),
    )


def prepared_cuts(cfg: VQConfig) -> Any:
    """Return PartitionSpecs of the prepared weights: projections are sharded by output, output projections by input."""
    columns, rows, whole = PartitionSpec(None, "model"), PartitionSpec("model"), EVERYWHERE
    by_head = cfg.n_head > 1
    wide, tall = PartitionSpec("expert", None, "model"), PartitionSpec("expert", "model")
    mixture: Any = Mixture(
        in_gain=whole, router=whole, experts=ExpertWeights(gate=wide, value=wide, out=tall), out_gain=whole
    )
    unit: Any = UnitWeights(
        gain=cast(Any, whole),
        bias=cast(Any, whole),
        project=cast(Any, columns),
        scores=cast(Any, columns if by_head else whole),
        offset=cast(Any, rows if by_head else whole),
        half_square=cast(Any, rows if by_head else whole),
        out=cast(Any, rows),
        mixture=mixture if cfg.n_expert else None,
    )
    return Prepared(
        embed=cast(Any, rows),
        position_scale=whole,
        units=(unit,) * cfg.n_unit,
        out_gain=whole,
        out_norm_bias=whole,
        logits=cast(Any, columns),
        logits_bias=cast(Any, rows),
        place=whole,
    )


def slot_cuts(n_head: int, n_unit: int) -> Any:
    """Return PartitionSpecs of slots. With several heads a device holds all slots' rows for its heads; the global row order is
    arbitrary."""
    rows = PartitionSpec("model") if n_head > 1 else EVERYWHERE
    total = rows if n_head > 1 else PartitionSpec(None, None, "model")
    unit: Any = UnitMemory(total=cast(Any, total), codes=cast(Any, rows), count=cast(Any, rows))
    return Slots(units=(unit,) * n_unit, position=cast(Any, EVERYWHERE), condition=EVERYWHERE)


def by_parts(
    run: Callable[..., tuple[Any, ...]], prepared: Prepared, slots: Any, cfg: VQConfig, cut: Any, *rest: Any
) -> tuple[Any, ...]:
    """Call `run(prepared, slots, cfg, parts, *rest)`, on a mesh for each device's shard. `run` returns slots, sharded by `cut`, and
    replicated results."""
    if sharding.current() is None:
        return run(prepared, slots, cfg, WHOLE, *rest)
    mine, of = part_config(cfg), parts()

    def here(prepared: Prepared, slots: Any, rest: tuple[Any, ...]) -> tuple[Any, Any]:
        slots, *outputs = run(prepared, slots, mine, of, *rest)
        return slots, outputs

    slots, outputs = shard_map(here, (prepared, slots, rest), (prepared_cuts(cfg), cut, EVERYWHERE), (cut, EVERYWHERE))
    return slots, *outputs
