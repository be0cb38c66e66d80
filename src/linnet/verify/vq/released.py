"""Verify a checkpoint of the official Transformer-VQ against results of the official code.

The results are a loss on held-out text, greedy continuations, and log-probabilities after each prompt. `official.json` names the
files and contains the settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from linnet.convert.flax import pack_flax, read_flax
from linnet.convert.npz import read_npz
from linnet.convert.transformer_vq import read_official
from linnet.core.errors import UserError
from linnet.core.files import read_json
from linnet.core.special_tokens import EOS
from linnet.models.vq import model
from linnet.models.vq.convert import config_from_reference, from_reference
from linnet.verify.compare import Check, Skipped, Verification, compare
from linnet.verify.vq.model import Model

FILE, KIND = "official.json", "official_checkpoint"
FIRST = "first_logprobs.npz"
LOSS_TOLERANCE = 1e-6
"""Absolute, in nats per byte."""
BYTE_0 = 3
"""Ids of bytes come after PAD, EOS and unknown."""


def official_layout(path: Path) -> Path | None:
    """Return the JSON file if the path is a folder of this layout or the file itself."""
    file = path / FILE if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return None
    return file if isinstance(content, dict) and content.get("kind") == KIND else None


def verify_official(path: Path, *, named: str, tolerance: float) -> Verification:
    values = read_json(path)
    m = _load_model(path, values)
    checks = [_compare_rewritten(path.parent / values["checkpoint"])]
    if "loss_nats_per_byte" in values:
        checks.append(_compare_loss(path, values, m))
    skipped: list[Skipped] = []
    if values.get("continuations"):
        streams, first = _compare_continuations(path, values, m)
        checks += streams
        first_checks = _compare_first_logprobs(path.parent / FIRST, first, tolerance)
        checks += first_checks
        if not first_checks:
            skipped.append(Skipped(FIRST, "this file is missing"))
    return Verification(
        file=named,
        kind="vq official checkpoint",
        tolerance=tolerance,
        checks=tuple(checks),
        not_checked=tuple(skipped),
        notes=(f"the loss is compared within {LOSS_TOLERANCE:g} nats per byte, tokens exactly",),
    )


def _load_model(path: Path, values: dict[str, Any]) -> Model:
    name, settings = values.get("checkpoint"), values.get("args")
    if not isinstance(name, str) or Path(name).name != name or not isinstance(settings, dict):
        raise UserError(f"{path} needs 'checkpoint', a file beside it, and 'args', its settings. Fix: write it again.")
    lengths = {k: values[k] for k in ("block_len", "mem_len", "sequence_len", "update_len") if k in values}
    cfg = config_from_reference({**settings, **lengths}, ignore_unknown=True)
    return Model(cfg, *from_reference(read_official(path.parent / name).params, cfg))


def _compare_rewritten(checkpoint: Path) -> Check:
    """Check that the file is reproduced byte for byte when it is written again."""
    if checkpoint.read_bytes() == pack_flax(read_flax(checkpoint)):
        return Check("checkpoint, written again", 0.0, True, "byte for byte equal")
    return Check(
        "checkpoint, written again", 1.0, False, "the file differs from the one that Linnet writes for the same tree"
    )


def _compare_loss(path: Path, values: dict[str, Any], m: Model) -> Check:
    """Compute the loss; each sequence begins with an empty state and the EOS id."""
    name, length, n = values.get("heldout"), values.get("sequence_len"), values.get("heldout_sequences")
    if not isinstance(name, str) or Path(name).name != name or type(length) is not int or type(n) is not int:
        raise UserError(
            f"{path} needs 'heldout', 'heldout_sequences' and 'sequence_len' for its loss. Fix: write it again."
        )
    try:
        text = np.frombuffer((path.parent / name).read_bytes()[: n * length], np.uint8)
    except OSError as error:
        raise UserError(
            f"{path.parent / name} cannot be read ({error.strerror}). Fix: copy it beside {FILE}."
        ) from None
    if length < 1 or n < 1 or text.size != n * length:
        raise UserError(f"{path.parent / name} has fewer than {n} sequences of {length} bytes. Fix: copy it again.")
    targets = text.reshape(n, length).astype(np.int32) + BYTE_0
    inputs = np.concatenate([np.full((n, 1), EOS, np.int32), targets[:, :-1]], axis=1)
    logprobs, *_ = m.read(model.empty_carry(m.cfg, n), inputs)
    nats = -np.take_along_axis(np.asarray(logprobs, np.float64), targets[..., None], axis=-1)
    error = abs(float(nats.mean()) - float(values["loss_nats_per_byte"]))
    note = f"{nats.mean():.8f} nats per byte, the official code {values['loss_nats_per_byte']:.8f}"
    return Check("loss_nats_per_byte", error, error <= LOSS_TOLERANCE, note)


def _compare_continuations(
    path: Path, values: dict[str, Any], m: Model
) -> tuple[list[Check], Float[np.ndarray, "N A"]]:
    """Return checks of the greedy tokens of every prompt, and the log-probabilities after each."""
    prompts: list[list[int]] = []
    expected: list[np.ndarray] = []
    for entry in values["continuations"]:
        prompt, ids = (entry.get(field) for field in ("prompt", "ids")) if isinstance(entry, dict) else (None, None)
        if not isinstance(prompt, str) or not isinstance(ids, list):
            raise UserError(f"{path}: a continuation needs a prompt and ids. Fix: write it again.")
        prompts.append([EOS, *(byte + BYTE_0 for byte in prompt.encode())])
        expected.append(np.asarray(ids, np.int64))
    lengths = np.asarray([len(prompt) for prompt in prompts])
    total = max(len(prompt) + len(want) for prompt, want in zip(prompts, expected, strict=True))
    padded = np.full((len(prompts), total), EOS, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    logprobs, chosen = _decode_greedily(m, padded, lengths)
    checks = [
        compare(f"continuations/{i}", chosen[i, n - 1 : n - 1 + len(want)], want, 0.0)
        for i, (n, want) in enumerate(zip(lengths, expected, strict=True))
    ]
    return checks, logprobs[np.arange(len(prompts)), lengths - 1]


def _decode_greedily(
    m: Model, prompts: Int[np.ndarray, "N T"], lengths: Int[np.ndarray, " N"]
) -> tuple[Float[np.ndarray, "N T A"], Int[np.ndarray, "N T"]]:
    """Decode token by token: the prompt's tokens first, then the most likely one."""

    def one(state: tuple[model.VQCarry, Array], inputs: tuple[Array, Array]) -> tuple[Any, Any]:
        carry, last = state
        prompt_token, in_prompt = inputs
        logits, carry = m.decode(carry, jnp.where(in_prompt, prompt_token, last))
        logprobs = jax.nn.log_softmax(logits)
        best = jnp.argmax(logprobs, axis=-1).astype(jnp.int32)
        return (carry, best), (logprobs, best)

    in_prompt = np.arange(prompts.shape[1])[None] < lengths[:, None]
    start = (model.empty_carry(m.cfg, len(prompts)), jnp.zeros(len(prompts), jnp.int32))
    _, (logprobs, chosen) = jax.jit(lambda state, inputs: jax.lax.scan(one, state, inputs))(
        start, (jnp.asarray(prompts.T), jnp.asarray(in_prompt.T))
    )
    return np.asarray(logprobs).swapaxes(0, 1), np.asarray(chosen).T


def _compare_first_logprobs(path: Path, first: Float[np.ndarray, "N A"], tolerance: float) -> list[Check]:
    if not path.is_file():
        return []
    arrays = read_npz(path)
    names = [f"after_prompt_{i}" for i in range(len(first))]
    return [
        compare(f"{FIRST}: {n}", row, arrays[n], tolerance) for n, row in zip(names, first, strict=True) if n in arrays
    ]
