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
from linnet.verify.compare import Check, compare
from linnet.verify.moe.files import load_params, model_for_runner, read_json
from linnet.verify.moe.positions import compare_by_position
from linnet.verify.moe.sequences import GrokModel
from linnet.verify.moe.texts import recompute_texts
from linnet.verify.recomputed import Recomputed
from linnet.verify.vq.model import RANDOM

PADDING = "a padding id fed to the reference's decoder makes it average its whole cache, places never written included"
PADDED_STEP = "the reference gives the length it padded prompts to, not theirs"
CUT = "the reference cuts a prompt beyond its largest bucket and then counts its length wrongly"
GREEDY = 0.01
"""A temperature at which the reference's noise changes nothing."""
ROUNDING = 2.0**-7
"""Largest relative distance of two neighbouring bfloat16 numbers."""
CERTAIN_MARGIN, CERTAIN_GAP = 0.01, 0.05
"""Margins of the second expert's probability and of the top logit beyond which bfloat16 rounding changes nothing."""
CACHES = re.compile(r"prefill_([kv])/(\d+)")


def recompute_decoder(m: GrokModel, prefix: str, tolerance: float, recomputed: Recomputed) -> set[str]:
    names = {name.removeprefix(f"{prefix}/") for name in m.arrays if name.startswith(f"{prefix}/")}
    done: set[str] = set()
    for name, reason in (("decode_padtoken_logits", PADDING), ("prefill_returned_step", PADDED_STEP)):
        if name in names:
            recomputed.skipped[f"{prefix}/{name}"] = reason
            done.add(name)
    caches = {
        name: match for name in sorted(names) if (match := CACHES.fullmatch(name)) and int(match[2]) < m.cfg.n_layer
    }
    wanted = names & {"prefill_logits", "decode_logits", "decode_final_step"}
    if not caches and not wanted:
        return done
    tokens, lengths = m.array("tokens"), m.array("prefill_lengths").tolist()
    n_step = m.array(f"{prefix}/decode_logits").shape[1] if "decode_logits" in names else 0
    if len(lengths) != len(tokens) or min(lengths) < 1 or max(lengths) + n_step > tokens.shape[1]:
        raise UserError(
            f"{m.path}: prompts of {lengths} tokens and {n_step} steps do not fit its tokens {tokens.shape}."
        )
    cfg, params = m.config(prefix), decoder.cast_weights(m.params)
    run = m.read(prefix, tokens)  # used to find routers near a tie
    parted = np.zeros(len(tokens), bool)
    memories = [decoder.prefill(params, None, tokens[b, :n].tolist(), cfg) for b, n in enumerate(lengths)]
    for name, match in caches.items():
        tie = run.tied(int(match[2]))
        check, rows = _cache(
            m, f"{prefix}/{name}", memories, match[1], int(match[2]), m.within(prefix, name, tolerance), tie
        )
        recomputed.checks.append(check)
        parted |= rows
    within = m.within(prefix, "logits", tolerance)
    logits, position = _written(params, tokens, lengths, n_step, cfg)
    last, tie = np.asarray(lengths) - 1, run.tied(cfg.n_layer)
    if "prefill_logits" in names:
        here = tie[np.arange(len(tokens)), last][:, None] | parted[:, None]
        want = m.array(f"{prefix}/prefill_logits")
        recomputed.checks.append(
            compare_by_position(f"{prefix}/prefill_logits", logits[:, :1], want, within, here).check
        )
    if "decode_logits" in names:
        here = np.stack([tie[b, n : n + n_step] for b, n in enumerate(lengths)]) | parted[:, None]
        want = m.array(f"{prefix}/decode_logits")
        recomputed.checks.append(
            compare_by_position(f"{prefix}/decode_logits", logits[:, 1:], want, within, here).check
        )
        if "decode_final_step" in names:
            want = m.array(f"{prefix}/decode_final_step")
            recomputed.checks.append(compare(f"{prefix}/decode_final_step", position, want, tolerance))
    return done | set(caches) | wanted


def _cache(
    m: GrokModel,
    name: str,
    memories: list[MoEState],
    part: str,
    layer: int,
    tolerance: float,
    tie: Bool[np.ndarray, "B T"],
) -> tuple[Check, Bool[np.ndarray, " B"]]:
    """Compare keys or values of the prompts, without padding; also returns the rows in which another expert was chosen."""
    want = m.array(name)
    none = np.zeros(len(memories), bool)
    got, mine = np.zeros_like(want), np.zeros(want.shape[:2], bool)
    for b, memory in enumerate(memories):
        blocks = [np.asarray(block.keys if part == "k" else block.values, np.float32)[layer] for block in memory.blocks]
        cut = np.concatenate(blocks, axis=1).transpose(1, 0, 2)[: memory.n_read]  # n H K
        if want.ndim != 4 or want.shape[1] < memory.n_read or want.shape[2:] != cut.shape[1:]:
            return Check(name, float("inf"), False, f"shape {want.shape}, expected room for {cut.shape}"), none
        got[b, : memory.n_read], mine[b, : memory.n_read] = cut, True
    want = np.where(mine[..., None, None], want, 0.0)
    room = np.zeros_like(mine)
    n = min(want.shape[1], tie.shape[1])
    room[:, :n] = tie[:, :n]
    found = compare_by_position(name, got, want, tolerance, room)
    return found.check, np.asarray(found.parted.any(axis=1))


def _written(
    params: MoEParams, tokens: np.ndarray, lengths: list[int], n_step: int, cfg: MoEConfig
) -> tuple[Float[np.ndarray, "B T A"], np.ndarray]:
    """Return logits after the prompt and after each following token, with one slot per row, and the final slot positions."""
    prompts = [tokens[b, :n].tolist() for b, n in enumerate(lengths)]
    following = np.stack([tokens[b, n : n + n_step] for b, n in enumerate(lengths)])
    return write_on(params, prompts, following, cfg)


def write_on(
    params: MoEParams, prompts: list[list[int]], following: np.ndarray, cfg: MoEConfig
) -> tuple[Float[np.ndarray, "B T A"], np.ndarray]:
    slots = decoder.init_slots(cfg, len(prompts))
    for i, prompt in enumerate(prompts):
        slots = decoder.insert(slots, decoder.prefill(params, None, prompt[:-1], cfg), i)
    logits: list[np.ndarray] = []
    fed = np.concatenate([np.asarray([prompt[-1] for prompt in prompts])[:, None], following], axis=1)
    for token in fed.T:
        slots, scores = tick(params, slots, jnp.asarray(token, jnp.int32), cfg)
        logits.append(np.asarray(scores))
    return np.stack(logits, axis=1), np.asarray(slots.position)


def recompute_runner(path: Path, recomputed: Recomputed) -> None:
    """Verify greedy streams of the released runner.

    At each step its token must be our most likely one, or equally likely within bfloat16. If the file has them, streams of the
    plain float32 model must match exactly, as must a bfloat16 stream in which nothing is near a tie; the ids of a text, and the
    text of the ids, must match the tokenizer's.
    """
    runs, folder = read_runs(path), model_for_runner(path)
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
            recomputed.skipped[name] = CUT
        elif len(run["prompt"]) + len(run["out"]) > cfg.context:
            recomputed.skipped[name] = f"continues beyond the context of {cfg.context} tokens, which Linnet refuses"
        else:
            greedy[name] = run
    if not greedy:
        return
    for name, scores, run in _scored(path, params, greedy, "out", cfg):
        check = _stream(name, scores, np.asarray(run["out"]), is_certain=_is_certain(run))
        if check.passed or "float32_gap" not in run or _is_certain(run):
            recomputed.checks.append(check)
        else:  # the float32 stream below is exact, so a real error is still detected
            recomputed.skipped[name] = (
                f"{check.note}; an expert or a token is within bfloat16 rounding of a tie, as the file says"
            )
    plain = {name: run for name, run in greedy.items() if "float32_greedy" in run}
    if plain:
        cfg = dataclasses.replace(cfg, dtype="float32")
        for name, scores, run in _scored(path, params, plain, "float32_greedy", cfg):
            want = np.asarray(run["float32_greedy"])
            recomputed.checks.append(_stream(f"{name}/float32_greedy", scores, want, is_certain=True))


def _is_certain(run: dict[str, Any]) -> bool:
    """Return whether, by the file, no router and no choice of a token is within bfloat16 rounding of a tie."""
    gaps = run.get("float32_gap")
    return bool(gaps) and min(gaps) >= CERTAIN_GAP and run.get("router_margin", 0.0) >= CERTAIN_MARGIN


def _scored(
    path: Path, params: MoEParams, runs: dict[str, dict[str, Any]], field: str, cfg: MoEConfig
) -> Iterator[tuple[str, Float[np.ndarray, "T A"], dict[str, Any]]]:
    """Yield logits at each step of the runs' streams, with teacher forcing."""
    outs = np.zeros((len(runs), max(len(run[field]) for run in runs.values())), np.int64)
    for row, run in zip(outs, runs.values(), strict=True):
        row[: len(run[field])] = run[field]
    highest = max(outs.max(), *(max(run["prompt"]) for run in runs.values()))
    if highest >= cfg.n_vocab:
        raise UserError(f"{path}: a token is {highest}, but the vocabulary has {cfg.n_vocab}. Fix: write it again.")
    logits, _ = write_on(params, [run["prompt"] for run in runs.values()], outs[:, :-1], cfg)
    for (name, run), scores in zip(runs.items(), logits, strict=True):
        yield name, scores[: len(run[field])], run


def _stream(name: str, logits: Float[np.ndarray, "T A"], want: np.ndarray, *, is_certain: bool) -> Check:
    ours = logits.argmax(axis=-1)
    best, theirs = (np.take_along_axis(logits, x[:, None], axis=-1)[:, 0] for x in (ours, want))
    differ = ours != want
    wrong = differ if is_certain else differ & ~(best - theirs <= ROUNDING * np.abs(best))
    note = "equal"
    if wrong.any():
        at = int(np.argmax(wrong))
        note = f"token {at} is {want[at]}, ours {ours[at]}: logits {theirs[at]:.4f} and {best[at]:.4f}"
    elif differ.any():
        note = f"{int(differ.sum())} of {len(want)} tokens are second likeliest here, within bfloat16 rounding of the likeliest"
    return Check(name, float(wrong.sum()), not wrong.any(), note)


def read_runs(path: Path) -> list[dict[str, Any]]:
    runs = read_json(path)["runs"]
    for number, run in enumerate(runs):
        whole = isinstance(run, dict) and isinstance(run.get("temperature"), int | float)
        for part in ("prompt", "out", "float32_greedy"):
            ids = run.get(part) if whole else None
            if part == "float32_greedy" and whole and ids is None:
                continue
            whole = isinstance(ids, list) and len(ids) > 0 and all(type(token) is int and token >= 0 for token in ids)
        if not whole:
            raise UserError(
                f"{path}: runs/{number} needs a prompt, a temperature and out, all of ids. Fix: write it again."
            )
    return runs
