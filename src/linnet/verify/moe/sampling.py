"""Compare Grok-1's sampling goldens with the engine's own sampling.

There are four differences. Of equal tokens at the edge of the nucleus the release keeps all, Linnet as many as needed. Linnet's
nucleus is smaller than requested by a slack of 1e-4. The release may sum probabilities in bfloat16, Linnet never does. A sample of
the release depends on its own random stream. Tokens affected only by these are excluded and counted. Letters: B rows, A vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from linnet.core.pytree import replace
from linnet.nn.sampling import MASKED, NUCLEUS_SLACK, LogitMask, SamplingSettings, allowed, sample, sampling_settings
from linnet.verify.compare import Check, compare
from linnet.verify.golden import Arrays
from linnet.verify.moe.sequences import tolerance_of
from linnet.verify.recomputed import RANDOM, Recomputed

NO_NUCLEUS = "with top_p 0 the reference may keep all tokens; Linnet requires top_p above 0"
NAN = "at temperature 0 the reference divides by zero; Linnet decodes greedily"
UNSURE = {"f32": 1e-6, "bf16": 0.01}
"""Accuracy of a cumulative sum of probabilities."""
MIN_DRAWN, MAX_DRAWN = 1e-4, 64  # the likely tokens of each row are drawn


def recompute_top_p(arrays: Arrays, tolerance: float, recomputed: Recomputed) -> None:
    for name, want in arrays.items():
        match = re.fullmatch(r"top_p/(\w+)/(f32|bf16)/([0-9.]+)", name)
        if match is None:
            continue
        p = float(match[3])
        if p <= 0.0:
            recomputed.skipped[name] = NO_NUCLEUS
            continue
        logits = _round_to(arrays[f"top_p/{match[1]}/logits"], match[2])
        _compare_nucleus(name, logits, np.full(len(logits), p), want, match[2], tolerance, recomputed)


def _round_to(logits: np.ndarray, kind: str) -> Float[np.ndarray, "*B A"]:
    return np.asarray(jnp.asarray(logits).astype(jnp.bfloat16), np.float32) if kind == "bf16" else logits


def _compare_nucleus(
    name: str, scaled: np.ndarray, p: np.ndarray, want: np.ndarray, kind: str, tolerance: float, recomputed: Recomputed
) -> Bool[np.ndarray, "B A"]:
    """Compare which tokens are kept, their logits, and that their total probability reaches p. Returns the tokens Linnet keeps."""
    settings = replace(sampling_settings(len(scaled)), top_p=jnp.asarray(p, jnp.float32))
    kept = np.asarray(allowed(jnp.asarray(scaled), settings)) & (scaled > MASKED / 2)
    if want.shape != scaled.shape:
        recomputed.compare(name, scaled, want, tolerance)
        return kept
    theirs = want > MASKED / 2
    edge = edge_of_nucleus(scaled, p, theirs, kind)
    excluded = edge & (kept != theirs)
    note = f"{int(excluded.sum())} of {want.size} tokens excluded: at the edge of the nucleus" if excluded.any() else ""
    recomputed.compare(f"{name}: mask", np.where(excluded, theirs, kept), theirs, tolerance, note)
    mass = np.sum(np.where(kept, _softmax(scaled), 0.0), axis=-1)
    enough = mass >= p - NUCLEUS_SLACK - UNSURE["f32"]
    recomputed.compare(f"{name}: reaches p", enough, np.ones_like(enough), tolerance)
    bound = tolerance_of(kind, tolerance)
    recomputed.compare(name, np.where(theirs, scaled, 0.0), np.where(theirs, want, 0.0), bound)
    return kept


def edge_of_nucleus(
    scaled: Float[np.ndarray, "B A"], p: Float[np.ndarray, " B"], theirs: Bool[np.ndarray, "B A"], kind: str
) -> Bool[np.ndarray, "B A"]:
    """Return tokens whose more likely tokens sum to about p, and those equal to the least likely kept one."""
    probability = _softmax(scaled)
    falling = -np.sort(-probability, axis=-1)
    sums = np.concatenate([np.zeros((len(scaled), 1)), np.cumsum(falling, axis=-1)], axis=-1)
    n_likelier = np.stack(
        [np.searchsorted(-row, -probs, side="left") for row, probs in zip(falling, probability, strict=True)]
    )
    before = np.take_along_axis(sums, n_likelier, axis=-1)
    near = UNSURE[kind]
    edge = (before >= p[:, None] - NUCLEUS_SLACK - near) & (before <= p[:, None] + near)
    least = np.min(np.where(theirs, probability, np.inf), axis=-1, keepdims=True)
    equal = np.abs(probability - least) <= near * least
    return (edge | equal) & (p < 1.0)[:, None]


def _softmax(logits: np.ndarray) -> Float[np.ndarray, "B A"]:
    wide = logits.astype(np.float64)
    weight = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def recompute_sample(arrays: Arrays, tolerance: float, recomputed: Recomputed) -> None:
    """Compare temperature, masking and nucleus, and the distribution that tokens are then drawn from."""
    if "sample/logits" not in arrays:
        return
    p = arrays["sample/nucleus_p"].astype(np.float64)
    for kind in ("f32", "bf16"):
        part = {name: arrays[f"sample/{kind}/{name}"] for name in OUTPUTS if f"sample/{kind}/{name}" in arrays}
        if not part:
            continue
        scaled = scaled_logits(arrays, kind)
        kept = np.asarray(scaled > MASKED / 2)
        same_nucleus = np.ones(len(scaled), bool)
        if "final_logits" in part:
            want = part["final_logits"].reshape(len(scaled), -1)
            kept = _compare_nucleus(f"sample/{kind}/final_logits", scaled, p, want, kind, tolerance, recomputed)
            same_nucleus = ((want > MASKED / 2) == kept).all(axis=-1)
        ours = np.where(kept, _softmax(np.where(kept, scaled, -np.inf)), 0.0)
        _compare_distribution(arrays, kind, part, ours, same_nucleus, tolerance, recomputed)
        if "token_id_threefry" in part:
            recomputed.skipped[f"sample/{kind}/token_id_threefry"] = RANDOM


OUTPUTS = ("final_logits", "probs", "prob", "token_id_threefry", "top_k_token_ids", "top_k_probs")


def scaled_logits(arrays: Arrays, kind: str) -> Float[np.ndarray, "B A"]:
    """Return the logits after temperature and mask."""
    logits = _round_to(arrays["sample/logits"], kind)
    logits = logits.reshape(-1, logits.shape[-1])
    scaled = logits / np.maximum(arrays["sample/temperature"], 1e-30)[:, None]
    return np.where(arrays["sample/mask"] > 0, scaled, MASKED).astype(np.float32)


def _compare_distribution(
    arrays: Arrays,
    kind: str,
    part: Arrays,
    ours: np.ndarray,
    same_nucleus: np.ndarray,
    tolerance: float,
    recomputed: Recomputed,
) -> None:
    """Compare distributions, in the rows with the same nucleus. In other rows everything is scaled by the mass at the edge."""
    bound, n_row = tolerance_of(kind, tolerance), len(same_nucleus)
    n_other = n_row - int(same_nucleus.sum())
    note = f"{n_other} of {n_row} rows excluded: another nucleus at its edge" if n_other else ""
    expected = {name: value.reshape(n_row, -1) for name, value in part.items()}

    def check(name: str, got: np.ndarray) -> None:
        want = expected[name][same_nucleus]
        recomputed.compare(f"sample/{kind}/{name}", got[same_nucleus], want, bound, note)

    if "probs" in part:
        check("probs", ours)
        if kind == "f32":
            recomputed.checks.append(_compare_drawn(arrays, expected["probs"], same_nucleus))
    if "prob" in part and "token_id_threefry" in part:
        check("prob", np.take_along_axis(ours, expected["token_id_threefry"], axis=-1))
    if "top_k_probs" not in part:
        return
    n = part["top_k_probs"].shape[-1]
    order = np.argsort(-ours, axis=-1, kind="stable")[:, : n + 1]
    falling = np.take_along_axis(ours, order, axis=-1)
    check("top_k_probs", falling[:, :n])
    if "top_k_token_ids" in part:
        want = expected["top_k_token_ids"]
        # Tokens without probability have no rank, and ties have no order.
        is_distinct = -np.diff(falling, axis=-1, append=-1.0) > UNSURE[kind]
        clear = is_distinct[:, :n] & np.concatenate([np.ones((n_row, 1), bool), is_distinct[:, : n - 1]], axis=-1)
        clear &= (falling[:, :n] > 0) & same_nucleus[:, None]
        compared = f"{int(clear.sum())} of {clear.size} ids compared: the others have no probability, or are near a tie"
        recomputed.compare(f"sample/{kind}/top_k_token_ids", np.where(clear, order[:, :n], want), want, bound, compared)


def _compare_drawn(arrays: Arrays, probs: Float[np.ndarray, "B A"], same_nucleus: np.ndarray) -> Check:
    """Draw every likely token with the engine's own function, with the uniform sample in the middle of the token's interval."""
    rows, tokens = [], []
    for row in np.flatnonzero(same_nucleus):
        likely = np.argsort(-probs[row], kind="stable")[:MAX_DRAWN]
        likely = likely[probs[row][likely] > MIN_DRAWN]
        rows += [row] * len(likely)
        tokens += likely.tolist()
    at, want = np.asarray(rows, int), np.asarray(tokens, int)
    upto = np.cumsum(probs, axis=-1, dtype=np.float64)
    chance = (upto[at, want] - probs[at, want] / 2) / upto[at, -1]
    settings = _settings(arrays["sample/temperature"], arrays["sample/nucleus_p"])
    got = _draw(arrays, jax.tree.map(lambda x: x[at], settings), at, chance)
    return compare("sample/f32/probs: drawn", got, want, 0.0)


def _settings(temperature: np.ndarray, p: np.ndarray) -> SamplingSettings:
    plain = sampling_settings(len(p))
    return replace(plain, temperature=jnp.asarray(temperature, jnp.float32), top_p=jnp.asarray(p, jnp.float32))


def _draw(
    arrays: Arrays, settings: SamplingSettings, rows: np.ndarray, chance: np.ndarray, masked: bool = True
) -> np.ndarray:
    logits = arrays["sample/logits"]
    logits = jnp.asarray(logits.reshape(-1, logits.shape[-1])[rows])
    free = arrays["sample/mask"][rows] > 0 if masked else np.ones(logits.shape, bool)
    nowhere = jnp.zeros(logits.shape, bool)
    bias = jnp.asarray(np.where(free, 0.0, -np.inf), jnp.float32)
    mask = LogitMask(
        bias=bias, min_token_mask=nowhere, min_token_until=jnp.zeros(len(rows), jnp.int32), in_prompt=nowhere
    )
    position = jnp.zeros(len(rows), jnp.int32)
    drawn, _ = sample(logits, settings, jnp.asarray(chance, jnp.float32), None, mask, position)
    return np.asarray(drawn)


def recompute_temperatures(
    name: str, temperature: float, value: dict[str, Any], arrays: Arrays, recomputed: Recomputed
) -> None:
    """Compare the most likely token at and near temperature 0, without masking."""
    if "sample/logits" not in arrays or "argmax" not in value:
        recomputed.skipped[name] = "needs sample/logits and 'argmax'"
        return
    n = len(value["argmax"])
    rows, chance, ones = np.arange(n), np.full(n, 0.5), np.ones(n)
    greedy = _draw(arrays, _settings(np.zeros(n), ones), rows, chance, masked=False)
    recomputed.compare(f"{name}/argmax", greedy, np.asarray(value["argmax"], int), 0.0)
    if temperature <= 0.0:
        recomputed.skipped[f"{name}/token"] = NAN
        return
    sure = np.asarray(value["prob"], float) == 1.0
    got = _draw(arrays, _settings(np.full(n, temperature), ones), rows, chance, masked=False)[sure]
    note = f"{sure.sum()} of {n} rows compared: those with probability 1 in the reference"
    recomputed.compare(f"{name}/token", got, np.asarray(value["token"], int)[sure], 0.0, note)
