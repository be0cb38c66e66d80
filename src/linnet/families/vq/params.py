"""The weights of a `vq` model: each declared once, the gated attention units stacked on a leading axis.

Letters: G units, D model width, H heads, K key width, V value width, S codes, A vocabulary.
"""

from __future__ import annotations

from typing import Any

from linnet.families.vq.config import VQConfig
from linnet.params import Spec
from linnet.pytree import pytree


@pytree
class UnitParams:
    norm_gain: Any  # G D
    norm_bias: Any  # G D
    w_q: Any  # G D HK
    w_kvg: Any  # G D (HK + HV + HV)
    w_r: Any  # G D HK
    w_res: Any  # G HV D
    u: Any  # G HK
    w: Any  # G HK


@pytree
class VQParams:
    embed: Any  # A D
    position_scale: Any  # scalar, or None without absolute positions
    units: UnitParams
    out_gain: Any  # D, or None without e_preln
    out_norm_bias: Any  # D, or None without e_preln
    w_out: Any  # D A, or None when tied
    out_bias: Any  # A


@pytree
class VQBuffers:
    """The codebooks: what learns without gradients."""

    code_count: Any  # G H S
    code_total: Any  # G H S K


def param_specs(cfg: VQConfig) -> VQParams:
    g, d, hk, hv = cfg.n_unit, cfg.d_model, cfg.n_head * cfg.d_k, cfg.n_head * cfg.d_v

    def unit(shape: tuple[int, ...], axes: tuple[str | None, ...], init: Any) -> Spec:
        return Spec((g, *shape), ("layers", *axes), init)

    return VQParams(
        embed=Spec((cfg.n_vocab, d), ("vocab", "model"), "normal"),
        position_scale=Spec((), (), "zeros") if cfg.pe_abs else None,
        units=UnitParams(
            norm_gain=unit((d,), ("model",), "ones"),
            norm_bias=unit((d,), ("model",), "zeros"),
            w_q=unit((d, hk), ("model", "heads"), "fan_in"),
            w_kvg=unit((d, hk + 2 * hv), ("model", "heads"), "fan_in"),
            w_r=unit((d, hk), ("model", "heads"), "fan_in"),
            w_res=unit((hv, d), ("heads", "model"), "fan_in"),
            u=unit((hk,), ("heads",), "zeros"),
            w=unit((hk,), ("heads",), "zeros"),
        ),
        out_gain=Spec((d,), ("model",), "ones") if cfg.e_preln else None,
        out_norm_bias=Spec((d,), ("model",), "zeros") if cfg.e_preln else None,
        w_out=None if cfg.e_tie else Spec((d, cfg.n_vocab), ("model", "vocab"), "fan_in"),
        out_bias=Spec((cfg.n_vocab,), ("vocab",), "zeros"),
    )


def buffer_specs(cfg: VQConfig) -> VQBuffers:
    shape = (cfg.n_unit, cfg.n_head, cfg.n_code)
    return VQBuffers(
        code_count=Spec(shape, ("layers", "heads", None), "ones"),
        code_total=Spec((*shape, cfg.d_k), ("layers", "heads", None, None), "fan_in"),
    )
