"""Response formatters: the engine's events as OpenAI completions or chat messages, complete or as stream chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from linnet.models.detokenize import TextAssembler
from linnet.serve.http.responses import ChatLogprob, ChatLogprobs, Likely, TextLogprobs
from linnet.serve.request import PrefillDone, TokenLogprob, TokensEvent
from linnet.tokenizers.base import Tokenizer

ApiFinishReason = Literal["stop", "length"] | None
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; the same value as OpenAI's."""
NO_TOKENS = TokensEvent(tokens=(), top=(), text="", offsets=())


class ResponseFormatter(Protocol):
    """Formats choices as dicts of the types in `linnet.serve.http.responses`. `i` is the request's index in the call."""

    prefix: str
    full_object: str
    chunk_object: str

    def note_prefill(self, i: int, read: PrefillDone) -> None:
        """Record how much of the prompt was read. Called once per request, before the other methods."""
        ...

    def first_chunk(self, i: int, read: PrefillDone) -> Mapping[str, Any] | None:
        """Return the chunk before the first token, if there is one."""
        ...

    def chunk(self, i: int, event: TokensEvent) -> Mapping[str, Any] | None:
        """Return the chunk of new tokens; None if there is nothing to send yet."""
        ...

    def last_chunk(self, i: int, reason: ApiFinishReason) -> Mapping[str, Any]: ...

    def full(
        self, i: int, read: PrefillDone | None, event: TokensEvent, reason: ApiFinishReason
    ) -> Mapping[str, Any]: ...


class CompletionFormatter:
    prefix, full_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        logprobs: int | None,
        with_ids: bool,
        prompts: Sequence[Sequence[int]] | None,
        *,
        continues: bool = False,
        is_scoring: bool = False,
    ) -> None:
        """`continues`: the prompts continue a session or state. `is_scoring`: no answer follows them."""
        self._tokenizer, self._k, self._with_ids = tokenizer, logprobs, with_ids
        self._continues, self._is_scoring = continues, is_scoring
        self._prompts = None if prompts is None else list(prompts)
        """The prompt of each request after truncation, if prompts are echoed."""
        self._texts = [self._text(ids) for ids in prompts or ()]

    def note_prefill(self, i: int, read: PrefillDone) -> None:
        if self._prompts is not None and read.n_truncated:
            self._prompts[i] = self._prompts[i][read.n_truncated :]
            self._texts[i] = self._text(self._prompts[i])

    def first_chunk(self, i: int, read: PrefillDone) -> Mapping[str, Any] | None:
        if self._prompts is None:
            return None
        return self._choice(i, self._texts[i], self._prompt_logprobs(i, read), None, self._prompts[i])

    def chunk(self, i: int, event: TokensEvent) -> Mapping[str, Any] | None:
        if not event.text and (self._k is None and not self._with_ids):
            return None
        return self._choice(i, event.text, self._answer_logprobs(i, event), None, _ids(event.tokens))

    def last_chunk(self, i: int, reason: ApiFinishReason) -> Mapping[str, Any]:
        return self._choice(i, "", None, reason, ())

    def full(self, i: int, read: PrefillDone | None, event: TokensEvent, reason: ApiFinishReason) -> Mapping[str, Any]:
        logprobs, text, ids = self._answer_logprobs(i, event), event.text, _ids(event.tokens)
        if self._prompts is not None:
            logprobs = _join(self._prompt_logprobs(i, read), logprobs)
            text, ids = self._texts[i] + text, [*self._prompts[i], *ids]
        return self._choice(i, text, logprobs, reason, ids)

    def _choice(
        self, i: int, text: str, logprobs: TextLogprobs | None, reason: ApiFinishReason, ids: Sequence[int]
    ) -> Mapping[str, Any]:
        choice = {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**choice, "token_ids": list(ids)} if self._with_ids else choice

    def _text(self, ids: Sequence[int]) -> str:
        """Return the prompt's text. An incomplete last character is emitted with the completion, if one follows."""
        text = TextAssembler(self._tokenizer.text_rules, before=ids, continues=self._continues)
        return text.before + (text.close() if self._is_scoring else "")

    def _prompt_logprobs(self, i: int, read: PrefillDone | None) -> TextLogprobs | None:
        if self._k is None or self._prompts is None or read is None or read.logprobs is None:
            return None
        ids = self._prompts[i]
        # As in OpenAI's API, the first token has no alternatives.
        tops = [None, *read.top[1:]][: len(ids)] if self._k else None
        return {
            "tokens": [token_name(self._tokenizer, token) for token in ids],
            "token_logprobs": [None if one is None else finite(one) for one in read.logprobs],
            "top_logprobs": None if tops is None else [None if top is None else self._by_text(top) for top in tops],
            "text_offset": prompt_offsets(self._tokenizer, ids, continues=self._continues),
            "top_token_ids": None if tops is None else [None if top is None else _ids(top) for top in tops],
        }

    def _answer_logprobs(self, i: int, event: TokensEvent) -> TextLogprobs | None:
        if self._k is None:
            return None
        shift = len(self._texts[i]) if self._prompts is not None else 0
        return {
            "tokens": [token_name(self._tokenizer, entry.token) for entry in event.tokens],
            "token_logprobs": [finite(entry.logprob) for entry in event.tokens],
            "top_logprobs": [self._by_text(top) for top in event.top] if self._k else None,
            "text_offset": [shift + offset for offset in event.offsets],
            "top_token_ids": [_ids(top) for top in event.top] if self._k else None,
        }

    def _by_text(self, top: Sequence[TokenLogprob]) -> dict[str, float] | None:
        """Return log-probabilities by token text. If two ids have the same text, the likelier one is used."""
        named: dict[str, float] = {}
        for entry in top:
            named.setdefault(token_name(self._tokenizer, entry.token), finite(entry.logprob))
        return named


class ChatFormatter:
    prefix, full_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, with_logprobs: bool, with_ids: bool) -> None:
        self._tokenizer, self._with_logprobs, self._with_ids = tokenizer, with_logprobs, with_ids

    def note_prefill(self, i: int, read: PrefillDone) -> None:
        """Nothing to record: chat prompts are not echoed."""

    def first_chunk(self, i: int, read: PrefillDone) -> Mapping[str, Any] | None:
        return self._choice(i, {"delta": {"role": "assistant", "content": ""}}, NO_TOKENS, None)

    def chunk(self, i: int, event: TokensEvent) -> Mapping[str, Any] | None:
        if not event.text and not (self._with_logprobs or self._with_ids):
            return None
        return self._choice(i, {"delta": {"content": event.text}}, event, None)

    def last_chunk(self, i: int, reason: ApiFinishReason) -> Mapping[str, Any]:
        return self._choice(i, {"delta": {}}, NO_TOKENS, reason)

    def full(self, i: int, read: PrefillDone | None, event: TokensEvent, reason: ApiFinishReason) -> Mapping[str, Any]:
        message = {"role": "assistant", "content": event.text, "refusal": None}
        return self._choice(i, {"message": message}, event, reason)

    def _choice(
        self, i: int, content: Mapping[str, Any], event: TokensEvent, reason: ApiFinishReason
    ) -> Mapping[str, Any]:
        choice = {"index": i, **content, "logprobs": self._logprobs(event), "finish_reason": reason}
        return {**choice, "token_ids": _ids(event.tokens)} if self._with_ids else choice

    def _logprobs(self, event: TokensEvent) -> ChatLogprobs | None:
        if not self._with_logprobs or event is NO_TOKENS:
            return None
        tops = event.top or ((),) * len(event.tokens)
        content: list[ChatLogprob] = [
            {**self._likely(entry), "top_logprobs": [self._likely(one) for one in top]}
            for entry, top in zip(event.tokens, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _likely(self, entry: TokenLogprob) -> Likely:
        data = self._tokenizer.id_bytes(entry.token)
        name = data.decode(errors="replace") if data else token_name(self._tokenizer, entry.token)
        return {
            "token": name,
            "token_id": entry.token,
            "logprob": finite(entry.logprob),
            "bytes": list(data) if data else None,
        }


def finite(logprob: float) -> float:
    return max(MIN_LOGPROB, logprob)


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text; incomplete UTF-8 in OpenAI's notation (`bytes:\\xe2`); the id's name if it has no text."""
    data = tokenizer.id_bytes(token)
    if not data:
        return tokenizer.pieces([token])[0]
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], *, continues: bool = False) -> list[int]:
    """Return the offset of each id's text in characters."""
    text = TextAssembler(tokenizer.text_rules, continues=continues)
    for token in ids:
        text.feed(token)
    return list(text.take()[1])


def _join(first: TextLogprobs | None, second: TextLogprobs | None) -> TextLogprobs | None:
    if first is None or second is None:
        return first or second
    tops = None if first["top_logprobs"] is None else first["top_logprobs"] + (second["top_logprobs"] or [])
    ids = None if first["top_token_ids"] is None else first["top_token_ids"] + (second["top_token_ids"] or [])
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": tops,
        "text_offset": first["text_offset"] + second["text_offset"],
        "top_token_ids": ids,
    }


def _ids(entries: Sequence[TokenLogprob]) -> list[int]:
    return [entry.token for entry in entries]
