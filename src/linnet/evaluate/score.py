"""Log-probabilities of a given text, token by token.

The text is one sequence, read as `linnet eval` reads it: in segments of `update_len`, with the state carried from one to the next.
Each text is computed alone, so its result does not depend on the texts beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from linnet.config.schema import RunConfig
from linnet.core.errors import invalid
from linnet.core.special_tokens import PAD
from linnet.data import Batch
from linnet.data.batch import NO_DOCUMENT
from linnet.models.base import TokenFamily

MIN_SEGMENT = 16
"""Shortest segment of a model with a context: texts are padded to powers of two, so that few programs are compiled."""


def score_ids(
    family: TokenFamily, cfg: RunConfig, params: Any, buffers: Any, ids: Sequence[int], nats: Callable[..., Any]
) -> Float32[np.ndarray, " n"]:
    """Return the log-probability of each token given the tokens before it.

    The model's BOS id, if it has one, precedes the text. Otherwise nothing predicts the first token, and its value is NaN. `nats` is
    the jitted function that `language_model.make_nats` returns.
    """
    front = () if cfg.lm.bos_id is None else (cfg.lm.bos_id,)
    targets = np.asarray(ids if front else ids[1:], np.int32)
    inputs = np.asarray([*front, *ids][: len(targets)], np.int32)
    found = [np.full(len(ids) - len(targets), np.nan, np.float32)]
    length = _segment_len(cfg, len(targets))
    carry = jax.jit(lambda: family.empty_carry(cfg.model, 1))()
    for start in range(0, len(targets), length):
        n = len(targets[start : start + length])
        values, carry = nats(params, buffers, carry, _batch(inputs, targets, start, n, length))
        found.append(-np.asarray(values)[0, :n])
    return np.concatenate(found)


def _segment_len(cfg: RunConfig, n: int) -> int:
    context = cfg.lm.context
    if context is None:
        return cfg.tokens.update_len
    if n > context:
        raise invalid("the text", f"{n} tokens", f"at most {context}, the model's context", "score it in parts")
    return min(context, max(MIN_SEGMENT, 1 << (n - 1).bit_length())) if n else context


def _batch(inputs: np.ndarray, targets: np.ndarray, start: int, n: int, length: int) -> Batch:
    def row(values: np.ndarray | int, fill: int, dtype: Any) -> np.ndarray:
        made = np.full((1, length), fill, dtype)
        made[0, :n] = values[start : start + n] if isinstance(values, np.ndarray) else values
        return made

    return Batch(
        inputs=row(inputs, PAD, np.int32),
        targets=row(targets, PAD, np.int32),
        doc_ids=row(0, NO_DOCUMENT, np.int32),
        loss_mask=row(1, 0, np.float32),
    )
