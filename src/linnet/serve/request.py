"""Requests to the engine and the events it emits: plain values, the same for every model family, transport and backend."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from linnet.core.errors import UserError, invalid
from linnet.models.detokenize import check_stops
from linnet.nn.sampling_bounds import MIN_REPETITION_PENALTY, MIN_TEMPERATURE

FinishReason = Literal["stop", "length", "stuck", "cancelled", "deadline", "error"]
"""stop: the EOS id, a stop id, a stop string, or a completed grammar (for a prior: its last step). length: max_tokens, or the model's
context. stuck: the request's grammar and settings leave no token, or the grammar exceeded its limits. The others are external."""

MAX_STOPS, MAX_STOP_BYTES, MAX_TOP, MAX_BIAS = 16, 1024, 20, 1024
MAX_SEED = 2**32 - 1


class QueueFull(UserError):
    """The queue is full; retry after `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"the queue is full ({waiting} requests are waiting). Fix: try again in {retry_after:.0f} s.")
        self.retry_after = retry_after


class TooLong(UserError):
    """The prompt, or the conversation so far, does not fit the model's context."""


class Draining(UserError):
    """The engine is about to stop and accepts no new requests."""


class NoSession(UserError):
    def __init__(self, id: str) -> None:
        super().__init__(f"there is no session {id[:64]!r}. Fix: create one, or restore a saved one.")


class SessionInUse(UserError):
    """Another call is using the session. Only one at a time may continue it, since two would overwrite each other's state."""

    def __init__(self, id: str) -> None:
        super().__init__(
            f"session {id!r} is in use by another call. Fix: wait until that call ends, or fork the session."
        )


class AnswerLost(UserError):
    """An earlier attempt of the same call advanced the session, but the replica died before it could answer."""

    def __init__(self, id: str) -> None:
        super().__init__(
            f"session {id!r} was advanced by this call, but the answer was lost when the replica died. Fix: continue from the new "
            "state; to be able to repeat a call, fork the session before it."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
    """A grammar that the generated text must match."""

    kind: Literal["json_schema", "regex", "lark"]
    grammar: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings and stop conditions. Validated on construction."""

    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    typical_p: float = 1.0
    """1: off."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed: frozenset[int] | None = None
    """Only these ids may be sampled; None: all."""
    banned: frozenset[int] = frozenset()
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    """Minimum number of tokens before the EOS id, a stop id or a stop string may end the answer."""
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_logprobs: int = 0
    """Number of top log-probabilities returned with each token."""
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise invalid("temperature", self.temperature, f"0 (greedy), or at least {MIN_TEMPERATURE:g}", "use 0")
        _check_range("top_p", self.top_p, 0.0, 1.0, exclusive=True)
        _check_range("typical_p", self.typical_p, 0.0, 1.0, exclusive=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("seed", self.seed, 0, MAX_SEED)
        _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("logprobs", self.top_logprobs, 0, MAX_TOP)
        if len(self.stop) + len(self.stop_ids) > MAX_STOPS:
            raise invalid("stop", f"{len(self.stop) + len(self.stop_ids)} entries", f"at most {MAX_STOPS}", "use fewer")
        check_stops(self.stop)
        for stop in self.stop:
            _check_range("the length of a stop string in bytes", len(stop.encode()), 1, MAX_STOP_BYTES)
        if len(self.logit_bias) > MAX_BIAS:
            raise invalid("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_BIAS}", "use fewer")
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -100.0, 100.0)
        if self.allowed is not None and not self.allowed - self.banned:
            raise invalid(
                "allowed_token_ids", "no id", "at least one id that is not banned", "omit it to allow all ids"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request for one answer. Several answers to one prompt are several requests with different seeds."""

    id: str
    prompt: tuple[int, ...]
    """Ids without the BOS id, which the engine prepends to a sequence that does not start from a state."""
    sampling: Sampling
    priority: int = 0
    """Higher values are served first."""
    deadline: float | None = None
    """Time on the engine's clock."""
    state: Any = None
    """State to continue from, as returned by a finished request or restored from a session; None: start empty."""
    appended: tuple[int, ...] = ()
    """Prompt ids that `state` has already read since its last answer (`Engine.append`). They count as part of the prompt."""
    return_state: bool = False
    """Return the state after the last token with `Finished`."""
    truncate_prompt: bool = False
    """Truncate a prompt that does not fit the model's context at its start; otherwise it is an error."""
    prompt_logprobs: bool = False
    """Return the log-probability of each prompt token (`echo`)."""
    use_prefix_cache: bool = True
    add_special_tokens: bool = True
    """False: do not prepend the model's BOS id."""
    shows_prompt: bool = False
    """The answer's text is shown appended to the prompt's (`echo`) rather than as a separate text."""


class TokenLogprob(NamedTuple):
    """A token and its log-probability in the model's own distribution. (A tuple, because one is made for every token.)"""

    token: int
    logprob: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillDone:
    """The prompt has been read; the next event has the first token."""

    n_tokens: int
    n_cached: int
    """Those of `n_tokens` that came from the prefix cache."""
    n_truncated: int = 0
    """Prompt tokens truncated at the start, not counted in `n_tokens`."""
    logprobs: tuple[float | None, ...] | None
    """Log-probability of each prompt token, if requested. The first is None if no token precedes it."""
    top: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Top log-probabilities at the position of each prompt token; empty unless requested."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensEvent:
    """New tokens, and the text that is final: complete characters, and no possible start of a stop string."""

    tokens: tuple[TokenLogprob, ...]
    top: tuple[tuple[TokenLogprob, ...], ...]
    """Top log-probabilities at each token; empty unless requested."""
    text: str
    offsets: tuple[int, ...]
    """Offset of each token's text in the complete text, in characters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TerminalEvent:
    """The last event of every request; there is exactly one."""

    reason: FinishReason
    error: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished(TerminalEvent):
    """Terminal event of a token request."""

    stopped_by: str | int | None
    """The stop string, stop id or EOS id that ended the answer."""
    n_prompt: int
    n_tokens: int
    state: Any


Event = PrefillDone | TokensEvent | Finished
OnEvent = Callable[[Event], None]
"""Called in the engine's thread: must return immediately and never raise."""


def _check_range(field: str, value: float, low: float, high: float, *, exclusive: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not (low < value if exclusive else low <= value) or value > high:
        needs = f"{'above' if exclusive else 'at least'} {low:g} and at most {high:g}"
        raise invalid(field, value, needs, f"use a number {needs}")
