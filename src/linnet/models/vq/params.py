"""Parameters of a `vq` model: each is declared once, with gated attention units stacked on a leading axis.

Letters: G units, D model width, H heads, K key width, V value width, S codes, A vocabulary, E width of a condition, P positions.
"""

from __future__ import annotations

from functools import partial

from jaxtyping import Array, Float

from linnet.core.dtypes import WeightDtype
from linnet.core.params import Init, Spec
from linnet.core.pytree import pytree, tree_of
from linnet.core.quant import Weight
from linnet.models.model_config import ffn_size
from linnet.models.vq.config import VQConfig
from linnet.nn.moe import ExpertWeights, Mixture
from linnet.parallel.sharding import ROWS, LogicalAxes, LogicalAxisRules

RULES: LogicalAxisRules = {
    **ROWS,
    "model": "fsdp",
    "vocab": "model",
    "heads": "model",
    "values": "model",
    "hidden": "model",
    "experts": "expert",
}
"""Sharding rules. With a single head only the values are sharded: every device computes all scores, which are cheap."""


@pytree
class UnitParams:
    norm_gain: Float[Array, "*G D"]
    norm_bias: Float[Array, "*G D"]
    w_q: Weight  # G D HK
    w_kvg: Weight  # G D (HK + HV + HV)
    w_r: Float[Array, "*G D HK"]
    w_res: Weight  # G HV D
    u: Float[Array, "*G HK"]
    w: Float[Array, "*G HK"]


@pytree
class VQParams:
    embed: Float[Array, "A D"]
    position_scale: Float[Array, ""] | None  # None without absolute positions
    units: UnitParams
    out_gain: Float[Array, " D"] | None  # None without e_preln
    out_norm_bias: Float[Array, " D"] | None  # None without e_preln
    w_out: Weight | None  # D A, or None when tied
    out_bias: Float[Array, " A"]
    mixture: Mixture | None = None  # after each unit; None without experts
    w_condition: Float[Array, "E D"] | None = None  # None in an unconditional model
    place: Float[Array, "P D"] | None = None  # gain of the condition at each position; None in an unconditional model


@pytree
class VQBuffers:
    """Codebooks, which are learned without gradients."""

    code_count: Float[Array, "G H S"]
    code_total: Float[Array, "G H S K"]


def param_specs(cfg: VQConfig) -> VQParams:
    d, hk, hv = cfg.d_model, cfg.n_head * cfg.d_k, cfg.n_head * cfg.d_v
    heads, unit = head_axis(cfg), partial(_stacked, cfg.n_unit)

    return tree_of(
        VQParams,
        embed=Spec((cfg.n_vocab, d), ("vocab", "model"), "normal", min_dtype="bfloat16"),
        position_scale=Spec((), (), "zeros") if cfg.pe_abs else None,
        units=tree_of(
            UnitParams,
            norm_gain=unit((d,), ("model",), "ones"),
            norm_bias=unit((d,), ("model",), "zeros"),
            w_q=unit((d, hk), ("model", heads), "fan_in", "int8"),
            w_kvg=unit((d, hk + 2 * hv), ("model", "values"), "fan_in", "int8"),
            w_r=unit((d, hk), ("model", heads), "fan_in", "bfloat16"),
            w_res=unit((hv, d), ("values", "model"), "fan_in", "int8"),
            u=unit((hk,), (heads,), "zeros"),
            w=unit((hk,), (heads,), "zeros"),
        ),
        out_gain=Spec((d,), ("model",), "ones") if cfg.e_preln else None,
        out_norm_bias=Spec((d,), ("model",), "zeros") if cfg.e_preln else None,
        w_out=None if cfg.e_tie else Spec((d, cfg.n_vocab), ("model", "vocab"), "fan_in", min_dtype="int8"),
        out_bias=Spec((cfg.n_vocab,), ("vocab",), "zeros"),
        mixture=_mixture_specs(cfg) if cfg.n_expert else None,
        w_condition=Spec((cfg.d_condition, d), (None, "model"), "fan_in") if cfg.d_condition else None,
        # Indexed by row like embeddings: the logical axes make the optimizer treat it as one.
        place=Spec((cfg.n_place, d), ("vocab", "model"), "zeros") if cfg.d_condition else None,
    )


def head_axis(cfg: VQConfig) -> str | None:
    """Return the logical axis of queries and keys: sharded by heads, or replicated with a single head."""
    return "heads" if cfg.n_head > 1 else None


def _stacked(
    n_unit: int,
    shape: tuple[int, ...],
    axes: LogicalAxes,
    init: Init = "fan_in",
    min_dtype: WeightDtype = "float32",
) -> Spec:
    """Return the spec of a weight that every unit has."""
    return Spec((n_unit, *shape), ("layers", *axes), init, min_dtype=min_dtype)


def _mixture_specs(cfg: VQConfig) -> Mixture:
    n, d, f = cfg.n_expert, cfg.d_model, ffn_size(cfg.d_model, cfg.widening)
    unit = partial(_stacked, cfg.n_unit)

    return tree_of(
        Mixture,
        in_gain=unit((d,), ("model",), "ones"),
        router=unit((d, n), ("model", None)),
        experts=tree_of(
            ExpertWeights,
            gate=unit((n, d, f), ("experts", "model", "hidden"), min_dtype="int8"),
            value=unit((n, d, f), ("experts", "model", "hidden"), min_dtype="int8"),
            out=unit((n, f, d), ("experts", "hidden", "model"), min_dtype="int8"),
        ),
        out_gain=unit((d,), ("model",), "ones"),
    )


def buffer_specs(cfg: VQConfig) -> VQBuffers:
    shape = (cfg.n_unit, cfg.n_head, cfg.n_code)
    return tree_of(
        VQBuffers,
        code_count=Spec(shape, ("layers", "heads", None), "ones"),
        code_total=Spec((*shape, cfg.d_k), ("layers", "heads", None, None), "fan_in"),
    )
