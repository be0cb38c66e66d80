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
from linnet.convert.npz import read_npz
from linnet.core import quant
from linnet.core.errors import UserError
from linnet.models.moe import model
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import MoEParams
from linnet.nn.gqa import NEG_INF, capped, grouped_scores
from linnet.verify.compare import Check, compare
from linnet.verify.moe.files import load_params, model_of, read_json
from linnet.verify.moe.positions import bfloat16_bound, close_ranks, compare_by_position, near_tie
from linnet.verify.recomputed import Recomputed

DTYPES = {"bf16": "bfloat16", "f32": "float32", "f32pure": "float32"}
INPUTS = ("tokens", "tokens_pad", "prefill_lengths", "prefill_pad")
EAGER = "captured where the release rounds inside its experts; f32pure/, without that, is compared"
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
    path: Path
    cfg: MoEConfig
    params: MoEParams
    arrays: dict[str, np.ndarray]

    def array(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise UserError(f"{self.path} has no {name!r}, which its other arrays need. Fix: write it again.")
        return self.arrays[name]

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

    def within(self, prefix: str, name: str, tolerance: float) -> float:
        """Return the bound of a tensor by the number of layers before it: up to its own layer, or all."""
        layer = LAYER.search(name)
        return tolerance_of(prefix, tolerance, self.cfg.n_layer if layer is None else int(layer[1]) + 1)

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
    cfg, tensors = model_of(path)
    _check_listing(path, cfg, tensors, recomputed)
    return GrokModel(path, cfg, load_params(tensors, cfg), read_npz(path))


def tolerance_of(prefix: str, tolerance: float, depth: int = 1) -> float:
    return max(tolerance, bfloat16_bound(depth)) if prefix == "bf16" else tolerance


def prefixes(m: GrokModel) -> list[str]:
    return [prefix for prefix in DTYPES if any(name.startswith(f"{prefix}/") for name in m.arrays)]


def recompute_sequences(m: GrokModel, prefix: str, tolerance: float, recomputed: Recomputed) -> set[str]:
    """Compare passes over `tokens` and `tokens_pad`; returns the names that were handled."""
    names = {name.removeprefix(f"{prefix}/") for name in m.arrays if name.startswith(f"{prefix}/")}
    done: set[str] = set()
    runs = {"full_logits": "tokens", "full_logits_padtokens": "tokens_pad"}
    runs = {name: key for name, key in runs.items() if name in names or (key == "tokens" and _has(names, "cap"))}
    for logits, key in runs.items():
        run = m.read(prefix, m.array(key))
        values = {logits: (run.logits, run.tied(m.cfg.n_layer))}
        values |= _inside(run, m.cfg.n_layer) if key == "tokens" else {}
        for name in sorted(names & values.keys()):
            got, tie = values[name]
            want = m.array(f"{prefix}/{name}")
            within = m.within(prefix, name, tolerance)
            recomputed.checks.append(compare_by_position(f"{prefix}/{name}", got, want, within, tie).check)
            done.add(name)
    return done


def _has(names: set[str], part: str) -> bool:
    return any(name.partition("/")[0] == part for name in names)


def _inside(run: Sequences, n_layer: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
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


def recompute_eager(m: GrokModel, prefix: str, tolerance: float, recomputed: Recomputed) -> set[str]:
    """Compare values captured in an uncompiled run: logits, attention scores, the routers' choices."""
    names = {name.removeprefix(f"{prefix}/") for name in m.arrays if name.startswith(f"{prefix}/")}
    eager = {name for name in names if name == "full_logits_eager" or name.partition("/")[0] in ("attn", "router")}
    if prefix == "f32":
        for name in sorted(eager):
            recomputed.skipped[f"{prefix}/{name}"] = EAGER
        return eager
    if not eager:
        return set()
    n_row = max(m.arrays[f"{prefix}/{name}"].shape[0] for name in eager)
    tokens = m.array("tokens")[:n_row]
    run = m.read(prefix, tokens, rounded=True)
    done: set[str] = set()
    for name in sorted(eager):
        full, want = f"{prefix}/{name}", m.array(f"{prefix}/{name}")
        within = m.within(prefix, name, tolerance)
        if name == "full_logits_eager":
            tie = run.tied(m.cfg.n_layer)
            recomputed.checks.append(compare_by_position(full, run.logits, want, within, tie).check)
        elif (part := re.fullmatch(r"router/(\d+)/top\d+_(gate|index)", name)) and int(part[1]) < m.cfg.n_layer:
            recomputed.checks.append(_routed(full, run, int(part[1]), want, within, prefix))
        elif (part := re.fullmatch(r"attn/(\d+)/(\w+)", name)) and int(part[1]) < m.cfg.n_layer:
            scores = attention_scores(m, prefix, tokens, run, int(part[1]))
            if part[2] not in scores:
                continue
            recomputed.checks += _attended(full, scores[part[2]], want, within, run.tied(int(part[1])))
        else:
            continue
        done.add(name)
    return done


def attention_scores(
    m: GrokModel, prefix: str, tokens: np.ndarray, run: Sequences, layer: int
) -> dict[str, Float[np.ndarray, "B H J T T"]]:
    cfg = m.config(prefix)
    h = (
        model.embed(m.rounded, jnp.asarray(tokens), cfg)
        if layer == 0
        else jnp.asarray(run.inner[2][layer - 1], cfg.dtype)
    )
    p = jax.tree.map(lambda x: x[layer], m.rounded.layers)
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


def _attended(name: str, got: np.ndarray, want: np.ndarray, tolerance: float, tie: np.ndarray) -> list[Check]:
    """Compare attention scores of the first positions, which are all that the file has.

    Masked scores are compared separately: beside -1e30 every error would look small.
    """
    if want.ndim != 5:
        return [compare(name, got, want, tolerance)]
    got = got[..., : want.shape[3], : want.shape[4]]
    checks: list[Check] = []
    if name.endswith("masked_capped_logits") and got.shape == want.shape:
        hidden = got <= NEG_INF / 2
        checks.append(compare(f"{name}: mask", hidden, want <= NEG_INF / 2, tolerance))
        seen = ~(hidden | (want <= NEG_INF / 2))
        got, want = np.where(seen, got, 0.0), np.where(seen, want, 0.0)
    ours, theirs = (x.transpose(0, 3, 1, 2, 4) for x in (got, want))
    tie = tie[: want.shape[0], : want.shape[3]]
    return [*checks, compare_by_position(name, ours, theirs, tolerance, tie).check]


def _routed(name: str, run: Sequences, layer: int, want: np.ndarray, tolerance: float, prefix: str) -> Check:
    """Compare the top-k experts. Their order is compared only if they differ by more than rounding."""
    probability, tie = run.probability[layer], run.tied(layer)
    order = np.argsort(-probability, axis=-1, kind="stable")
    n = want.shape[-1]
    falling = np.take_along_axis(probability, order, axis=-1)
    if name.endswith("gate"):
        return compare_by_position(name, falling[..., :n], want, tolerance, tie).check
    close = np.zeros(probability.shape[:2], bool)
    for i in range(min(n, probability.shape[-1] - 1)):
        close |= close_ranks(probability, i + 1, prefix, layer + 1)
    index = order[..., :n]
    if index.shape != want.shape:
        return compare(name, index, want, tolerance)
    unsure = (close | tie)[..., None] & (index != want)
    check = compare(name, np.where(unsure, want, index), want, tolerance)
    n_left = int(unsure.any(axis=-1).sum())
    note = f"{n_left} of {close.size} positions left out: experts within rounding of a tie" if n_left else check.note
    return dataclasses.replace(check, note=note)


def _check_listing(path: Path, cfg: MoEConfig, tensors: Tensors, recomputed: Recomputed) -> None:
    """Check what the folder states about itself, if it does: the hidden size, and the list of tensors."""
    settings = read_json(path.parent / "config.json")
    if isinstance(settings, dict) and isinstance(settings.get("ffn_size"), int):
        recomputed.checks.append(compare("config.json: ffn_size", cfg.d_ffn, np.asarray(settings["ffn_size"]), 0.0))
    if not (path.parent / INDEX).is_file():
        return
    listed = read_json(path.parent / INDEX)
    ours = [
        _listing(number, name, tensors[weight.leaf][layer or 0])
        for number, (name, weight, layer) in enumerate(file_order(cfg))
    ]
    if not isinstance(listed, list) or len(listed) != len(ours):
        recomputed.checks.append(
            Check(INDEX, float("inf"), False, f"{len(ours)} tensors are there, and not so many listed")
        )
        return
    wrong = [str(theirs) for mine, theirs in zip(ours, listed, strict=True) if mine != theirs]
    recomputed.checks.append(Check(INDEX, float(len(wrong)), not wrong, wrong[0] if wrong else f"{len(ours)} tensors"))


def _listing(number: int, name: str, tensor: Tensor | TensorPair) -> list[Any]:
    if isinstance(tensor, TensorPair):
        weight, scales = tensor.weight, tensor.scales
        return [number, name, "q8", list(weight.shape), str(weight.dtype), list(scales.shape), str(scales.dtype)]
    return [number, name, "raw", list(tensor.shape), str(tensor.dtype), None, None]
