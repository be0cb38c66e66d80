"""Parameters of a `moe` model: each is declared once, with layers stacked on the leading axis and experts on the next.

Letters: L layers, D model width, Q query heads, H key and value heads, K key width, E experts, F hidden width, A vocabulary.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from linnet.core.dtypes import WeightDtype
from linnet.core.params import Init, Spec
from linnet.core.pytree import pytree, tree_of
from linnet.core.quant import Weight
from linnet.models.moe.config import MoEConfig
from linnet.nn.moe import ExpertWeights
from linnet.parallel.sharding import ROWS, LogicalAxisRules

RULES: LogicalAxisRules = {
    **ROWS,
    "model": "fsdp",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "hidden": "model",
    "experts": "expert",
}
"""Sharding rules of the model."""


@pytree
class LayerParams:
    attention_in_gain: Float[Array, "*L D"]  # rms_norm
    attention_out_gain: Float[Array, "*L D"]  # rms_norm_1
    experts_in_gain: Float[Array, "*L D"]  # rms_norm_2
    experts_out_gain: Float[Array, "*L D"]  # rms_norm_3
    w_q: Weight  # L D QK
    w_k: Weight  # L D HK
    w_v: Weight  # L D HK
    w_o: Weight  # L QK D
    router: Float[Array, "*L D E"]
    experts: ExpertWeights  # L E ..


@pytree
class MoEParams:
    embed: Weight  # A D, tied to the output weights
    layers: LayerParams
    out_gain: Float[Array, " D"]


def param_specs(cfg: MoEConfig) -> MoEParams:
    n, d, f = cfg.n_layer, cfg.d_model, cfg.d_ffn
    qk, hk = cfg.n_q_head * cfg.d_k, cfg.n_kv_head * cfg.d_k

    def layer(
        shape: tuple[int, ...], axes: tuple[str | None, ...], init: Init = "fan_in", min_dtype: WeightDtype = "int8"
    ) -> Spec:
        return Spec((n, *shape), ("layers", *axes), init, min_dtype=min_dtype)

    def gain() -> Spec:
        return layer((d,), ("model",), "ones", "float32")

    return tree_of(
        MoEParams,
        embed=Spec((cfg.n_vocab, d), ("vocab", "model"), "fan_out", min_dtype="bfloat16"),
        layers=tree_of(
            LayerParams,
            attention_in_gain=gain(),
            attention_out_gain=gain(),
            experts_in_gain=gain(),
            experts_out_gain=gain(),
            w_q=layer((d, qk), ("model", "heads")),
            w_k=layer((d, hk), ("model", "kv_heads")),
            w_v=layer((d, hk), ("model", "kv_heads")),
            w_o=layer((qk, d), ("heads", "model")),
            router=layer((d, cfg.n_expert), ("model", None), min_dtype="float32"),
            experts=tree_of(
                ExpertWeights,
                gate=layer((cfg.n_expert, d, f), ("experts", "model", "hidden")),
                value=layer((cfg.n_expert, d, f), ("experts", "model", "hidden")),
                out=layer((cfg.n_expert, f, d), ("experts", "hidden", "model")),
            ),
        ),
        out_gain=Spec((d,), ("model",), "ones"),
    )
