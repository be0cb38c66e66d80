"""What the API returns: plain values with the details beside them, which a notebook shows as tables."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32, Int32

FinishReason = Literal["end", "stop", "length"]
"""end: the EOS id. stop: a stop string. length: `max_tokens`, or the model's context."""
MAX_ROWS = 64
"""Tokens that a notebook shows of a score."""


class GeneratedText(str):
    """Generated text: a `str` that also has the tokens it was made of.

    A piece of a stream is one too; only the last piece has a finish reason.
    """

    token_ids: tuple[int, ...]
    """The generated ids, including EOS."""
    logprobs: tuple[float, ...]
    """Log-probability of each id in the model's own distribution, before temperature and the other settings."""
    finish_reason: FinishReason | None
    seed: int
    state: bytes | None
    """The state after the text, if a client requested it with `return_state`. `state=` continues from it."""

    def __new__(
        cls,
        text: str,
        *,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        finish_reason: FinishReason | None = None,
        seed: int = 0,
        state: bytes | None = None,
    ) -> GeneratedText:
        self = super().__new__(cls, text)
        self.token_ids, self.logprobs = tuple(token_ids), tuple(logprobs)
        self.finish_reason, self.seed, self.state = finish_reason, seed, state
        return self

    @classmethod
    def from_pieces(cls, pieces: Iterable[GeneratedText]) -> GeneratedText:
        """Concatenate the pieces of a stream."""
        parts = list(pieces)
        return cls(
            "".join(map(str, parts)),
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=[value for part in parts for value in part.logprobs],
            finish_reason=parts[-1].finish_reason if parts else None,
            seed=parts[-1].seed if parts else 0,
            state=parts[-1].state if parts else None,
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Log-probabilities of a text."""

    text: str
    tokens: tuple[str, ...]
    """The tokens in readable form."""
    token_ids: Int32[np.ndarray, " n"]
    logprobs: Float32[np.ndarray, " n"]
    """Natural log-probability of each token given the tokens before it. NaN for a first token that nothing predicts, in models
    without a BOS id."""
    n_bytes: int
    """Bytes of the predicted text."""

    @property
    def nats(self) -> float:
        """Negative log-likelihood of the text, summed over all predicted tokens."""
        return -sum(value for value in self.logprobs.tolist() if not math.isnan(value))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes else math.nan

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        n = sum(not math.isnan(value) for value in self.logprobs.tolist())
        return math.exp(min(self.nats / n, 700.0)) if n else math.nan

    def __repr__(self) -> str:
        return f"Score({self.bits_per_byte:.4f} bits per byte, {len(self.tokens)} tokens, {self.text[:40]!r})"

    def _repr_html_(self) -> str:
        rows = [
            f"<tr><td><code>{html.escape(token)}</code></td><td>{value:.3f}</td></tr>"
            for token, value in list(zip(self.tokens, self.logprobs.tolist(), strict=True))[:MAX_ROWS]
        ]
        rows += ["<tr><td colspan=2>...</td></tr>"] if len(self.tokens) > MAX_ROWS else []
        head = f"{self.bits_per_byte:.4f} bits per byte, perplexity {self.perplexity:.3f}"
        return f"<p>{head}</p><table><tr><th>token</th><th>log-probability</th></tr>{''.join(rows)}</table>"
