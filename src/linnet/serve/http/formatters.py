"""Response formatters: the engine's events as OpenAI completions or chat messages, complete or as stream chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from linnet.models.detokenize import TextAssembler
from linnet.serve.http.responses import ChatLogprob, ChatLogprobs, Likely, TextLogprobs
from linnet.serve.request import PrefillDone, TokenLogprob, TokensEvent
from linnet.tokenizers.base import Tokenizer

Ending = Literal["stop", "length"] | None
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; the same value as OpenAI's."""
NOTHING = TokensEvent(tokens=(), top=(), text="", offsets=())


class ResponseFormatter(Protocol):
    """Formats choices as dicts of the types in `linnet.serve.http.responses`. `i` is the request's index in the call."""

    prefix: str
    whole_object: str
    chunk_object: str

    def note(self, i: int, read: PrefillDone) -> None:
        """Record how much of the prompt was read. Called once per request, before the other methods."""
        ...

    def opening(self, i: int, read: PrefillDone) -> Mapping[str, Any] | None:
        """Return the chunk before the first token, if there is one."""
        ...

    def piece(self, i: int, produced: TokensEvent) -> Mapping[str, Any] | None:
        """Return the chunk of new tokens; None if there is nothing to send yet."""
        ...

    def ending(self, i: int, reason: Ending) -> Mapping[str, Any]: ...

    def whole(self, i: int, read: PrefillDone | None, produced: TokensEvent, reason: Ending) -> Mapping[str, Any]: ...


class CompletionVoice:
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        logprobs: int | None,
        with_ids: bool,
        echoed: Sequence[Sequence[int]] | None,
        *,
        continues: bool = False,
        is_scoring: bool = False,
    ) -> None:
        """`continues`: the prompts continue a session or state. `is_scoring`: no answer follows them."""
        self._tokenizer, self._k, self._with_ids = tokenizer, logprobs, with_ids
        self._continues, self._is_scoring = continues, is_scoring
        self._echoed = None if echoed is None else list(echoed)
        """The prompt of each request after truncation, if prompts are echoed."""
        self._texts = [self._text(ids) for ids in echoed or ()]

    def note(self, i: int, read: PrefillDone) -> None:
        if self._echoed is not None and read.n_truncated:
            self._echoed[i] = self._echoed[i][read.n_truncated :]
            self._texts[i] = self._text(self._echoed[i])

    def opening(self, i: int, read: PrefillDone) -> Mapping[str, Any] | None:
        if self._echoed is None:
            return None
        return self._choice(i, self._texts[i], self._of_prompt(i, read), None, self._echoed[i])

    def piece(self, i: int, produced: TokensEvent) -> Mapping[str, Any] | None:
        if not produced.text and (self._k is None and not self._with_ids):
            return None
        return self._choice(i, produced.text, self._of_answer(i, produced), None, _ids(produced.tokens))

    def ending(self, i: int, reason: Ending) -> Mapping[str, Any]:
        return self._choice(i, "", None, reason, ())

    def whole(self, i: int, read: PrefillDone | None, produced: TokensEvent, reason: Ending) -> Mapping[str, Any]:
        logprobs, text, ids = self._of_answer(i, produced), produced.text, _ids(produced.tokens)
        if self._echoed is not None:
            logprobs = _joined(self._of_prompt(i, read), logprobs)
            text, ids = self._texts[i] + text, [*self._echoed[i], *ids]
        return self._choice(i, text, logprobs, reason, ids)

    def _choice(
        self, i: int, text: str, logprobs: TextLogprobs | None, reason: Ending, ids: Sequence[int]
    ) -> Mapping[str, Any]:
        choice = {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**choice, "token_ids": list(ids)} if self._with_ids else choice

    def _text(self, ids: Sequence[int]) -> str:
        """Return the prompt's text. An incomplete last character is emitted with the completion, if one follows."""
        text = TextAssembler(self._tokenizer.text_rules, before=ids, continues=self._continues)
        return text.before + (text.close() if self._is_scoring else "")

    def _of_prompt(self, i: int, read: PrefillDone | None) -> TextLogprobs | None:
        if self._k is None or self._echoed is None or read is None or read.logprobs is None:
            return None
        ids = self._echoed[i]
        # As in OpenAI's API, the first token has no alternatives.
        tops = [None, *read.top[1:]][: len(ids)] if self._k else None
        return {
            "tokens": [token_name(self._tokenizer, token) for token in ids],
            "token_logprobs": [None if one is None else finite(one) for one in read.logprobs],
            "top_logprobs": None if tops is None else [None if top is None else self._named(top) for top in tops],
            "text_offset": prompt_offsets(self._tokenizer, ids, continues=self._continues),
            "top_token_ids": None if tops is None else [None if top is None else _ids(top) for top in tops],
        }

    def _of_answer(self, i: int, produced: TokensEvent) -> TextLogprobs | None:
        if self._k is None:
            return None
        shift = len(self._texts[i]) if self._echoed is not None else 0
        return {
            "tokens": [token_name(self._tokenizer, choice.token) for choice in produced.tokens],
            "token_logprobs": [finite(choice.logprob) for choice in produced.tokens],
            "top_logprobs": [self._named(top) for top in produced.top] if self._k else None,
            "text_offset": [shift + offset for offset in produced.offsets],
            "top_token_ids": [_ids(top) for top in produced.top] if self._k else None,
        }

    def _named(self, top: Sequence[TokenLogprob]) -> dict[str, float] | None:
        """Return log-probabilities by token text. If two ids have the same text, the likelier one is used."""
        named: dict[str, float] = {}
        for choice in top:
            named.setdefault(token_name(self._tokenizer, choice.token), finite(choice.logprob))
        return named


class ChatVoice:
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, with_logprobs: bool, with_ids: bool) -> None:
        self._tokenizer, self._with_logprobs, self._with_ids = tokenizer, with_logprobs, with_ids

    def note(self, i: int, read: PrefillDone) -> None:
        """Nothing to record: chat prompts are not echoed."""

    def opening(self, i: int, read: PrefillDone) -> Mapping[str, Any] | None:
        return self._choice(i, {"delta": {"role": "assistant", "content": ""}}, NOTHING, None)

    def piece(self, i: int, produced: TokensEvent) -> Mapping[str, Any] | None:
        if not produced.text and not (self._with_logprobs or self._with_ids):
            return None
        return self._choice(i, {"delta": {"content": produced.text}}, produced, None)

    def ending(self, i: int, reason: Ending) -> Mapping[str, Any]:
        return self._choice(i, {"delta": {}}, NOTHING, reason)

    def whole(self, i: int, read: PrefillDone | None, produced: TokensEvent, reason: Ending) -> Mapping[str, Any]:
        message = {"role": "assistant", "content": produced.text, "refusal": None}
        return self._choice(i, {"message": message}, produced, reason)

    def _choice(self, i: int, content: Mapping[str, Any], produced: TokensEvent, reason: Ending) -> Mapping[str, Any]:
        choice = {"index": i, **content, "logprobs": self._logprobs(produced), "finish_reason": reason}
        return {**choice, "token_ids": _ids(produced.tokens)} if self._with_ids else choice

    def _logprobs(self, produced: TokensEvent) -> ChatLogprobs | None:
        if not self._with_logprobs or produced is NOTHING:
            return None
        tops = produced.top or ((),) * len(produced.tokens)
        told: list[ChatLogprob] = [
            {**self._likely(choice), "top_logprobs": [self._likely(one) for one in top]}
            for choice, top in zip(produced.tokens, tops, strict=True)
        ]
        return {"content": told, "refusal": None}

    def _likely(self, choice: TokenLogprob) -> Likely:
        data = self._tokenizer.id_bytes(choice.token)
        name = data.decode(errors="replace") if data else token_name(self._tokenizer, choice.token)
        return {
            "token": name,
            "token_id": choice.token,
            "logprob": finite(choice.logprob),
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


def _joined(first: TextLogprobs | None, then: TextLogprobs | None) -> TextLogprobs | None:
    if first is None or then is None:
        return first or then
    tops = None if first["top_logprobs"] is None else first["top_logprobs"] + (then["top_logprobs"] or [])
    ids = None if first["top_token_ids"] is None else first["top_token_ids"] + (then["top_token_ids"] or [])
    return {
        "tokens": first["tokens"] + then["tokens"],
        "token_logprobs": first["token_logprobs"] + then["token_logprobs"],
        "top_logprobs": tops,
        "text_offset": first["text_offset"] + then["text_offset"],
        "top_token_ids": ids,
    }


def _ids(choices: Sequence[TokenLogprob]) -> list[int]:
    return [choice.token for choice in choices]
