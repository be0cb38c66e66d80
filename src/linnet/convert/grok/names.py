"""Names of Grok-1's weights: in the release, in the two Hugging Face conversions, and in Linnet.

The release and the conversions name each layer; the conversions name each expert and store matrices as [outputs, inputs].
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal

from linnet.core.errors import UserError
from linnet.models.moe.config import MoEConfig

ShardAxis = Literal["data", "model", "both"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight of a model or of a layer. Conversions: (1) `transformer.decoder_layer`, (2) `model.layers`."""

    leaf: str
    """Name in `linnet.core.pytree.named_leaves`."""
    release: str
    splits: tuple[ShardAxis, ...]
    """Mesh axis that the release shards each axis over."""
    decoder_layer: str
    model_layers: str
    kind: Literal["vector", "matrix", "experts", "embedding"]

    @property
    def in_layer(self) -> bool:
        return self.leaf.startswith("layers/")


def _gain(leaf: str, number: str, model_layers: str) -> Weight:
    name = f"rms_norm{number}"
    return Weight(
        leaf=f"layers/{leaf}",
        release=f"{name}/scale",
        splits=(None,),
        decoder_layer=f"{name}.weight",
        model_layers=f"{model_layers}.scale",
        kind="vector",
    )


def _attention(leaf: str, name: str, short: str, splits: tuple[ShardAxis, ...]) -> Weight:
    return Weight(
        leaf=f"layers/{leaf}",
        release=f"multi_head_attention/{name}/w",
        splits=splits,
        decoder_layer=f"multi_head_attention.{name}.weight",
        model_layers=f"attn.{short}_proj.weight",
        kind="matrix",
    )


def _expert(leaf: str, name: str, splits: tuple[ShardAxis, ...]) -> Weight:
    return Weight(
        leaf=f"layers/experts/{leaf}",
        release=f"moe/{name}/w",
        splits=splits,
        decoder_layer=f"moe.{{e}}.{name}.weight",
        model_layers=f"moe_block.experts.{{e}}.{name}.weight",
        kind="experts",
    )


WEIGHTS: tuple[Weight, ...] = (
    Weight(
        leaf="embed",
        release="language_model/in_out_embed/embeddings",
        splits=(None, "both"),
        decoder_layer="transformer.in_out_embed.weight",
        model_layers="model.embed_tokens.weight",
        kind="embedding",
    ),
    Weight(
        leaf="out_gain",
        release="language_model/rms_norm/scale",
        splits=(None,),
        decoder_layer="transformer.rms_norm.weight",
        model_layers="model.norm.scale",
        kind="vector",
    ),
    _gain("attention_in_gain", "", "pre_attn_norm"),
    _gain("attention_out_gain", "_1", "post_attn_norm"),
    _gain("experts_in_gain", "_2", "pre_moe_norm"),
    _gain("experts_out_gain", "_3", "post_moe_norm"),
    _attention("w_q", "query", "q", ("data", "model")),
    _attention("w_k", "key", "k", ("data", "model")),
    _attention("w_v", "value", "v", ("data", "model")),
    _attention("w_o", "linear", "o", ("model", "data")),
    Weight(
        leaf="layers/router",
        release="router/w",
        splits=("data", None),
        decoder_layer="router.weight",
        model_layers="moe_block.gate.weight",
        kind="matrix",
    ),
    _expert("gate", "linear", (None, "data", "model")),
    _expert("value", "linear_v", (None, "data", "model")),
    _expert("out", "linear_1", (None, "model", "data")),
)
BY_LEAF = {weight.leaf: weight for weight in WEIGHTS}
QUANTIZED = tuple(w.leaf for w in WEIGHTS if w.kind == "experts" or w.release.startswith("multi_head_attention/"))
"""Leaves that are 8-bit in the release."""
HEAD = "lm_head.weight"  # some conversions repeat the embedding under this name


def file_order(cfg: MoEConfig) -> list[tuple[str, Weight, int | None]]:
    """Return the tensors of a checkpoint in file order: name, weight, layer. Names are sorted as text."""
    found: list[tuple[str, Weight, int | None]] = []
    for weight in WEIGHTS:
        if weight.in_layer:
            found += [(f"params/transformer/decoder_layer_{i}/{weight.release}", weight, i) for i in range(cfg.n_layer)]
        else:
            found.append((f"params/{weight.release}", weight, None))
    return sorted(found, key=lambda tensor: tensor[0])


Scheme = Literal["decoder_layer", "model_layers"]
LAYERS: dict[Scheme, str] = {"decoder_layer": "transformer.decoder_layer", "model_layers": "model.layers"}


def converted_name(weight: Weight, scheme: Scheme, layer: int | None, expert: int | None = None) -> str:
    name = getattr(weight, scheme)
    if expert is not None:
        name = name.format(e=expert)
    return name if layer is None else f"{LAYERS[scheme]}.{layer}.{name}"


def find_scheme(names: Iterable[str], where: str) -> Scheme:
    found = set(names)
    for scheme in LAYERS:
        if converted_name(BY_LEAF["embed"], scheme, None) in found:
            return scheme
    some = ", ".join(sorted(found)[:3]) or "nothing"
    wanted = " or ".join(converted_name(BY_LEAF["embed"], scheme, None) for scheme in LAYERS)
    raise UserError(
        f"{where} is not a conversion of Grok-1: it needs {wanted}, got {some}. Fix: name a folder or file with one of these."
    )


def add_suffix(name: str) -> str:
    """Append `.weight`, which some conversions leave out."""
    return name if re.search(r"\.(weight|scale)$", name) else f"{name}.weight"
