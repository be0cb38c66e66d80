"""Recompute the results of a Grok-1 reference file with this implementation: complete sequences, and values inside the layers.

Letters: L layers, B rows, T positions, E experts, A vocabulary.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from linnet.convert.grok.leaves import Tensor, TensorPair, Tensors
from linnet.convert.grok.names import file_order
from linnet.core import quant
from linnet.models.moe import model
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import MoEParams
from linnet.nn.gqa import NEG_INF, capped, grouped_scores
from linnet.verify.compare import Check
from linnet.verify.golden import Golden
from linnet.verify.moe.files import load_params, read_grok_golden, read_json, read_model
from linnet.verify.moe.positions import bfloat16_bound, close_ranks, compare_by_position, near_tie
from linnet.verify.recomputed import Recomputed

DTYPES = {"bf16": "bfloat16", "f32": "float32", "f32pure": "float32"}
INPUTS = ("tokens", "tokens_pad", "prefill_lengths", "prefill_pad")
EAGER = (
    "captured with the release's rounding inside its experts; f32pure/ has the same values without it, and is compared"
)
INDEX = "index.json"
LAYER = re.compile(r"(?:decoder_layer_|^attn/|^router/|^prefill_[kv]/)(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """A pass over complete sequences, and where a router's choice is within rounding of a tie."""

    logits: Float[np.ndarray, "B T A"]
    inner: tuple[np.ndarray, ...]
    """Outputs of all layers, L B T D: of attention, of the experts, of the layer."""
    router_logits: Float[np.ndarray, "L B T E"]
    probability: Float[np.ndarray, "L B T E"]
    ties: Bool[np.ndarray, "L B T"]

    def tied(self, n_layer: int) -> Bool[np.ndarray, "B T"]:
        """Return where there is a tie in any of the first `n_layer` layers."""
        return np.asarray(self.ties[:n_layer].any(axis=0))


@dataclasses.dataclass(frozen=True)
class GrokModel:
    golden: Golden
    cfg: MoEConfig
    params: MoEParams

    def config(self, prefix: str) -> MoEConfig:
        return dataclasses.replace(self.cfg, dtype=DTYPES[prefix])  # pyright: ignore[reportArgumentType]

    def read(self, prefix: str, tokens: np.ndarray, *, rounded: bool = False) -> Sequences:
        cfg = self.config(prefix)
        logits, aux = _forward(self.rounded if rounded else self.params, jnp.asarray(tokens), cfg)
        shape = (cfg.n_layer, *tokens.shape, -1)
        probability = np.asarray(aux.routing.probability).reshape(shape)
        return Sequences(
            logits=np.asarray(logits),
            inner=tuple(np.asarray(x, np.float32) for x in aux.inner),
            router_logits=np.asarray(aux.routing.logits).reshape(shape),
            probability=probability,
            ties=near_tie(probability, cfg.n_choice, prefix, np.arange(1, cfg.n_layer + 1)[:, None, None]),
        )

    @cached_property
    def rounded(self) -> MoEParams:
        """Weights rounded to bfloat16 after scaling, as in the release when it is not compiled."""

        def rounded(leaf: Any) -> Any:
            return quant.dequantize(leaf).astype(jnp.bfloat16).astype(jnp.float32) if quant.is_quantized(leaf) else leaf

        return jax.tree.map(rounded, self.params, is_leaf=quant.is_quantized)


@partial(jax.jit, static_argnames="cfg")
def _forward(params: MoEParams, tokens: Int[Array, "B T"], cfg: MoEConfig) -> tuple[Float[Array, "B T A"], Any]:
    x, aux = model.forward(params, tokens, cfg, keep_inner=True)
    return model.logits(params, x, cfg), aux


def open_model(path: Path, recomputed: Recomputed) -> GrokModel:
    cfg, tensors = read_model(path)
    _check_listing(path, cfg, tensors, recomputed)
    return GrokModel(read_grok_golden(path, "forward"), cfg, load_params(tensors, cfg))


@dataclasses.dataclass(frozen=True)
class Variant:
    """The results of one dtype in a file (those below `bf16/`, `f32/` or `f32pure/`), and how they are compared."""

    model: GrokModel
    prefix: str
    tolerance: float
    recomputed: Recomputed

    @cached_property
    def expected(self) -> dict[str, np.ndarray]:
        return self.model.golden.below(f"{self.prefix}/")

    @property
    def cfg(self) -> MoEConfig:
        return self.model.config(self.prefix)

    def read(self, tokens: np.ndarray, *, rounded: bool = False) -> Sequences:
        return self.model.read(self.prefix, tokens, rounded=rounded)

    def bound(self, name: str) -> float:
        """Return the tolerance of a tensor by the number of layers before it: up to its own layer, or all."""
        layer = LAYER.search(name)
        return tolerance_of(self.prefix, self.tolerance, self.cfg.n_layer if layer is None else int(layer[1]) + 1)

    def compare(self, name: str, got: Any, want: np.ndarray, note: str = "") -> None:
        self.recomputed.compare(f"{self.prefix}/{name}", got, want, self.bound(name), note)

    def compare_by_position(
        self, name: str, got: np.ndarray, tie: Bool[np.ndarray, "B T"], want: np.ndarray | None = None
    ) -> Bool[np.ndarray, "B T"]:
        """Compare arrays [B, T, ...] up to ties, by default with the file's; returns the positions that diverged at one."""
        want = self.expected[name] if want is None else want
        result = compare_by_position(f"{self.prefix}/{name}", got, want, self.bound(name), tie)
        self.recomputed.checks.append(result.check)
        return result.diverged

    def skip(self, name: str, reason: str) -> None:
        self.recomputed.skipped[f"{self.prefix}/{name}"] = reason


def tolerance_of(prefix: str, tolerance: float, depth: int = 1) -> float:
    return max(tolerance, bfloat16_bound(depth)) if prefix == "bf16" else tolerance


def recompute_sequences(v: Variant) -> None:
    """Compare passes over `tokens` and `tokens_pad`: the logits, and for `tokens` values inside the layers."""
    for logits, key in (("full_logits", "tokens"), ("full_logits_padtokens", "tokens_pad")):
        has_inner = key == "tokens" and any(name.startswith("cap/") for name in v.expected)
        if logits not in v.expected and not has_inner:
            continue
        run = v.read(v.model.golden.get(key))
        values = {logits: (run.logits, run.tied(v.cfg.n_layer))}
        values |= _inner_values(run, v.cfg.n_layer) if has_inner else {}
        for name in sorted(values.keys() & v.expected.keys()):
            v.compare_by_position(name, *values[name])


def _inner_values(run: Sequences, n_layer: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return values by the release's names, and where an earlier choice may differ."""
    values: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for i in range(n_layer):
        layer, before, upto = f"cap/transformer/decoder_layer_{i}", run.tied(i), run.tied(i + 1)
        values |= {
            f"{layer}/multi_head_attention:out": (run.inner[0][i], before),
            f"{layer}/moe:out": (run.inner[1][i], upto),
            f"{layer}:out": (run.inner[2][i], upto),
            f"{layer}/router:logits": (run.router_logits[i], before),
            f"{layer}/router:probs": (run.probability[i], before),
        }
    return values


def recompute_eager(v: Variant) -> None:
    """Compare values captured in an uncompiled run: logits, attention scores, the routers' choices."""
    eager = sorted(name for name in v.expected if name == "full_logits_eager" or name.startswith(("attn/", "router/")))
    if v.prefix == "f32":
        for name in eager:
            v.skip(name, EAGER)
        return
    if not eager:
        return
    tokens = v.model.golden.get("tokens")[: max(v.expected[name].shape[0] for name in eager)]
    run = v.read(tokens, rounded=True)
    for name in eager:
        if name == "full_logits_eager":
            v.compare_by_position(name, run.logits, run.tied(v.cfg.n_layer))
        elif (part := re.fullmatch(r"router/(\d+)/top\d+_(gate|index)", name)) and int(part[1]) < v.cfg.n_layer:
            _compare_routing(v, name, run, int(part[1]))
        elif (part := re.fullmatch(r"attn/(\d+)/(\w+)", name)) and int(part[1]) < v.cfg.n_layer:
            scores = attention_scores(v, tokens, run, int(part[1]))
            if part[2] in scores:
                _compare_scores(v, name, scores[part[2]], run.tied(int(part[1])))


def attention_scores(
    v: Variant, tokens: np.ndarray, run: Sequences, layer: int
) -> dict[str, Float[np.ndarray, "B H J T T"]]:
    cfg, params = v.cfg, v.model.rounded
    h = model.embed(params, jnp.asarray(tokens), cfg) if layer == 0 else jnp.asarray(run.inner[2][layer - 1], cfg.dtype)
    p = jax.tree.map(lambda x: x[layer], params.layers)
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    q, k, _ = model.project(h, p, position, cfg)
    raw = grouped_scores(q, k)
    real = (tokens != cfg.pad_id)[:, None, None, None, :] & np.tri(tokens.shape[1], dtype=bool)
    score = jnp.where(real, capped(raw, model.scores(cfg)), NEG_INF)
    return {
        "pre_tanh": np.asarray(raw * cfg.score_scale),
        "masked_capped_logits": np.asarray(score),
        "weights_f32_softmax": np.asarray(jax.nn.softmax(score, axis=-1)),
    }


def _compare_scores(v: Variant, name: str, got: np.ndarray, tie: np.ndarray) -> None:
    """Compare attention scores of the first positions, which are all that the file has.

    Masked scores are compared separately: beside -1e30 every error would look small.
    """
    want = v.expected[name]
    if want.ndim != 5:
        v.compare(name, got, want)
        return
    got = got[..., : want.shape[3], : want.shape[4]]
    if name.endswith("masked_capped_logits") and got.shape == want.shape:
        masked = got <= NEG_INF / 2
        v.compare(f"{name}: mask", masked, want <= NEG_INF / 2)
        visible = ~(masked | (want <= NEG_INF / 2))
        got, want = np.where(visible, got, 0.0), np.where(visible, want, 0.0)
    ours, theirs = (x.transpose(0, 3, 1, 2, 4) for x in (got, want))
    v.compare_by_position(name, ours, tie[: want.shape[0], : want.shape[3]], theirs)


def _compare_routing(v: Variant, name: str, run: Sequences, layer: int) -> None:
    """Compare the top-k experts. Their order is compared only if they differ by more than rounding."""
    want, probability, tie = v.expected[name], run.probability[layer], run.tied(layer)
    order = np.argsort(-probability, axis=-1, kind="stable")
    n = want.shape[-1]
    falling = np.take_along_axis(probability, order, axis=-1)
    if name.endswith("gate"):
        v.compare_by_position(name, falling[..., :n], tie)
        return
    close = np.zeros(probability.shape[:2], bool)
    for i in range(min(n, probability.shape[-1] - 1)):
        close |= close_ranks(probability, i + 1, v.prefix, layer + 1)
    index = order[..., :n]
    if index.shape != want.shape:
        v.compare(name, index, want)
        return
    unsure = (close | tie)[..., None] & (index != want)
    n_excluded = int(unsure.any(axis=-1).sum())
    note = f"{n_excluded} of {close.size} positions excluded: experts within rounding of a tie" if n_excluded else ""
    v.compare(name, np.where(unsure, want, index), want, note)


def _check_listing(path: Path, cfg: MoEConfig, tensors: Tensors, recomputed: Recomputed) -> None:
    """Check what the folder states about itself, if it does: the hidden size, and the list of tensors."""
    settings = read_json(path.parent / "config.json")
    if isinstance(settings, dict) and isinstance(settings.get("ffn_size"), int):
        recomputed.compare("config.json: ffn_size", cfg.d_ffn, np.asarray(settings["ffn_size"]), 0.0)
    if not (path.parent / INDEX).is_file():
        return
    listed = read_json(path.parent / INDEX)
    ours = [
        _listing(number, name, tensors[weight.leaf][layer or 0])
        for number, (name, weight, layer) in enumerate(file_order(cfg))
    ]
    if not isinstance(listed, list) or len(listed) != len(ours):
        note = f"the checkpoint has {len(ours)} tensors, and the list another number"
        recomputed.checks.append(Check(INDEX, float("inf"), False, note))
        return
    wrong = [str(theirs) for mine, theirs in zip(ours, listed, strict=True) if mine != theirs]
    recomputed.checks.append(Check(INDEX, float(len(wrong)), not wrong, wrong[0] if wrong else f"{len(ours)} tensors"))


def _listing(number: int, name: str, tensor: Tensor | TensorPair) -> list[Any]:
    if isinstance(tensor, TensorPair):
        weight, scales = tensor.weight, tensor.scales
        return [number, name, "q8", list(weight.shape), str(weight.dtype), list(scales.shape), str(scales.dtype)]
    return [number, name, "raw", list(tensor.shape), str(tensor.dtype), None, None]
