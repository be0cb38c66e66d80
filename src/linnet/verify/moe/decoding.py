"""Recompute prefill and decode results of a Grok-1 reference file with the decoder that is used for serving."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from linnet.convert.grok.checkpoint import find_folder, read_checkpoint
from linnet.convert.grok.settings import grok_config
from linnet.core.errors import UserError
from linnet.models.moe.cache import MoEState
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import MoEParams
from linnet.models.moe.slots import DECODER as decoder
from linnet.models.moe.slots import tick
from linnet.verify.compare import Check
from linnet.verify.moe.files import find_runner_model, load_params, read_json
from linnet.verify.moe.sequences import Variant
from linnet.verify.moe.texts import recompute_texts
from linnet.verify.recomputed import RANDOM, Recomputed

PADDING = (
    "given a padding id, the reference's decoder averages over its complete cache, including positions never written"
)
PADDED_STEP = "the reference returns the padded length of the prompts, not their own"
TRUNCATED = "the reference truncates a prompt that exceeds its largest bucket, and then counts its length wrongly"
GREEDY = 0.01
"""A temperature at which the reference's noise changes nothing."""
ROUNDING = 2.0**-7
"""Largest relative distance of two neighbouring bfloat16 numbers."""
CERTAIN_MARGIN, CERTAIN_GAP = 0.01, 0.05
"""Margins of the second expert's probability and of the top logit beyond which bfloat16 rounding changes nothing."""
CACHES = re.compile(r"prefill_([kv])/(\d+)")


def recompute_decoder(v: Variant) -> None:
    for name, reason in (("decode_padtoken_logits", PADDING), ("prefill_returned_step", PADDED_STEP)):
        if name in v.expected:
            v.skip(name, reason)
    golden, n_layer = v.model.golden, v.cfg.n_layer
    matches = {name: match for name in sorted(v.expected) if (match := CACHES.fullmatch(name))}
    caches = {name: (match[1], int(match[2])) for name, match in matches.items() if int(match[2]) < n_layer}
    if not caches and v.expected.keys().isdisjoint({"prefill_logits", "decode_logits", "decode_final_step"}):
        return
    tokens, lengths = golden.get("tokens"), golden.get("prefill_lengths").tolist()
    n_step = v.expected["decode_logits"].shape[1] if "decode_logits" in v.expected else 0
    if len(lengths) != len(tokens) or min(lengths) < 1 or max(lengths) + n_step > tokens.shape[1]:
        raise UserError(
            f"{golden.path}: prompts of {lengths} tokens and {n_step} steps do not fit its tokens {tokens.shape}."
        )
    params = decoder.cast_weights(v.model.params)
    run = v.read(tokens)  # used to find routers near a tie
    prompts = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
    memories = [decoder.prefill(params, None, prompt, v.cfg) for prompt in prompts]
    diverged = np.zeros(len(tokens), bool)
    for name, (part, layer) in caches.items():
        diverged |= _compare_cache(v, name, memories, part, layer, run.tied(layer))
    following = np.stack([row[n : n + n_step] for row, n in zip(tokens, lengths, strict=True)])
    logits, position = forced_logits(params, prompts, following, v.cfg)
    ties = np.stack([row[n - 1 : n + n_step] for row, n in zip(run.tied(n_layer), lengths, strict=True)])
    ties |= diverged[:, None]
    if "prefill_logits" in v.expected:
        v.compare_by_position("prefill_logits", logits[:, :1], ties[:, :1])
    if "decode_logits" in v.expected:
        v.compare_by_position("decode_logits", logits[:, 1:], ties[:, 1:])
        if "decode_final_step" in v.expected:
            want = v.expected["decode_final_step"]
            v.recomputed.compare(f"{v.prefix}/decode_final_step", position, want, v.tolerance)


def _compare_cache(
    v: Variant, name: str, memories: list[MoEState], part: str, layer: int, tie: Bool[np.ndarray, "B T"]
) -> Bool[np.ndarray, " B"]:
    """Compare keys or values of the prompts, without padding; returns the rows in which another expert was chosen."""
    want = v.expected[name]
    got, is_prompt = np.zeros_like(want), np.zeros(want.shape[:2], bool)
    for b, memory in enumerate(memories):
        blocks = [np.asarray(block.keys if part == "k" else block.values, np.float32)[layer] for block in memory.blocks]
        rows = np.concatenate(blocks, axis=1).transpose(1, 0, 2)[: memory.n_read]  # n H K
        if want.ndim != 4 or want.shape[1] < memory.n_read or want.shape[2:] != rows.shape[1:]:
            note = f"shape {want.shape}, expected room for {rows.shape}"
            v.recomputed.checks.append(Check(f"{v.prefix}/{name}", float("inf"), False, note))
            return np.zeros(len(memories), bool)
        got[b, : memory.n_read], is_prompt[b, : memory.n_read] = rows, True
    want = np.where(is_prompt[..., None, None], want, 0.0)
    ties = np.zeros_like(is_prompt)
    n = min(want.shape[1], tie.shape[1])
    ties[:, :n] = tie[:, :n]
    return np.asarray(v.compare_by_position(name, got, ties, want).any(axis=1))


def forced_logits(
    params: MoEParams, prompts: list[list[int]], following: np.ndarray, cfg: MoEConfig
) -> tuple[Float[np.ndarray, "B T A"], np.ndarray]:
    """Return logits after each prompt and after each following token, with one slot per row, and the final slot positions."""
    slots = decoder.init_slots(cfg, len(prompts))
    for i, prompt in enumerate(prompts):
        slots = decoder.insert(slots, decoder.prefill(params, None, prompt[:-1], cfg), i)
    logits: list[np.ndarray] = []
    inputs = np.concatenate([np.asarray([prompt[-1] for prompt in prompts])[:, None], following], axis=1)
    for token in inputs.T:
        slots, scores = tick(params, slots, jnp.asarray(token, jnp.int32), cfg)
        logits.append(np.asarray(scores))
    return np.stack(logits, axis=1), np.asarray(slots.position)


def recompute_runner(path: Path, recomputed: Recomputed) -> None:
    """Verify greedy streams of the released runner.

    At each step its token must be our most likely one, or equally likely within bfloat16. If the file has them, streams of the
    plain float32 model must match exactly, as must a bfloat16 stream in which nothing is near a tie; the ids of a text, and the
    text of the ids, must match the tokenizer's.
    """
    runs, folder = read_runs(path), find_runner_model(path)
    cfg = dataclasses.replace(grok_config(path), dtype="bfloat16")
    checkpoint = find_folder(folder)
    assert checkpoint is not None
    params = decoder.cast_weights(load_params(read_checkpoint(checkpoint, cfg), cfg))
    recomputed.notes.append(f"the model of {folder.name}, with the sizes and multipliers of {path.name}")
    recompute_texts(path, runs, recomputed)
    largest = max(read_json(path).get("pad_sizes") or [cfg.context])
    greedy: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        name = f"runs/{number}"
        if run["temperature"] > GREEDY:
            recomputed.skipped[name] = f"temperature {run['temperature']:g}: {RANDOM}"
        elif len(run["prompt"]) > largest:
            recomputed.skipped[name] = TRUNCATED
        elif len(run["prompt"]) + len(run["out"]) > cfg.context:
            recomputed.skipped[name] = f"exceeds the context of {cfg.context} tokens, which Linnet does not allow"
        else:
            greedy[name] = run
    if not greedy:
        return
    for name, logits, run in _stream_logits(path, params, greedy, "out", cfg):
        check = _compare_stream(name, logits, np.asarray(run["out"]), is_certain=_is_certain(run))
        if check.passed or "float32_gap" not in run or _is_certain(run):
            recomputed.checks.append(check)
        else:  # the float32 stream below is exact, so a real error is still detected
            recomputed.skipped[name] = (
                f"{check.note}; by the file's margins, an expert or a token is within bfloat16 rounding of a tie"
            )
    plain = {name: run for name, run in greedy.items() if "float32_greedy" in run}
    if plain:
        cfg = dataclasses.replace(cfg, dtype="float32")
        for name, logits, run in _stream_logits(path, params, plain, "float32_greedy", cfg):
            want = np.asarray(run["float32_greedy"])
            recomputed.checks.append(_compare_stream(f"{name}/float32_greedy", logits, want, is_certain=True))


def _is_certain(run: dict[str, Any]) -> bool:
    """Return whether, by the file, no router and no choice of a token is within bfloat16 rounding of a tie."""
    gaps = run.get("float32_gap")
    return bool(gaps) and min(gaps) >= CERTAIN_GAP and run.get("router_margin", 0.0) >= CERTAIN_MARGIN


def _stream_logits(
    path: Path, params: MoEParams, runs: dict[str, dict[str, Any]], field: str, cfg: MoEConfig
) -> Iterator[tuple[str, Float[np.ndarray, "T A"], dict[str, Any]]]:
    """Yield logits at each step of the runs' streams, with teacher forcing."""
    outs = np.zeros((len(runs), max(len(run[field]) for run in runs.values())), np.int64)
    for row, run in zip(outs, runs.values(), strict=True):
        row[: len(run[field])] = run[field]
    highest = max(outs.max(), *(max(run["prompt"]) for run in runs.values()))
    if highest >= cfg.n_vocab:
        raise UserError(f"{path}: a token is {highest}, but the vocabulary has {cfg.n_vocab}. Fix: write it again.")
    logits, _ = forced_logits(params, [run["prompt"] for run in runs.values()], outs[:, :-1], cfg)
    for (name, run), rows in zip(runs.items(), logits, strict=True):
        yield name, rows[: len(run[field])], run


def _compare_stream(name: str, logits: Float[np.ndarray, "T A"], want: np.ndarray, *, is_certain: bool) -> Check:
    ours = logits.argmax(axis=-1)
    best, theirs = (np.take_along_axis(logits, x[:, None], axis=-1)[:, 0] for x in (ours, want))
    differ = ours != want
    wrong = differ if is_certain else differ & ~(best - theirs <= ROUNDING * np.abs(best))
    note = "equal"
    if wrong.any():
        at = int(np.argmax(wrong))
        note = f"token {at} is {want[at]}, ours {ours[at]}: logits {theirs[at]:.4f} and {best[at]:.4f}"
    elif differ.any():
        note = f"{int(differ.sum())} of {len(want)} tokens are not our most likely ones, but within bfloat16 rounding of them"
    return Check(name, float(wrong.sum()), not wrong.any(), note)


def read_runs(path: Path) -> list[dict[str, Any]]:
    runs = read_json(path)["runs"]
    for number, run in enumerate(runs):
        is_valid = isinstance(run, dict) and isinstance(run.get("temperature"), int | float)
        fields = ("prompt", "out", *(("float32_greedy",) if is_valid and run.get("float32_greedy") is not None else ()))
        if not is_valid or not all(_is_ids(run.get(field)) for field in fields):
            raise UserError(
                f"{path}: runs/{number} needs a temperature, and token ids as prompt and out. Fix: write it again."
            )
    return runs


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(token) is int and token >= 0 for token in value)
