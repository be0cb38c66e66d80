"""Constrained decoding: a JSON schema, regular expression or Lark grammar as a mask of the ids that may come next.

llguidance does the parsing. This module adapts a tokenizer to it, bounds its work, and makes its errors readable."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from linnet.core.errors import UserError, invalid
from linnet.serve.request import Constraint
from linnet.tokenizers.base import Tokenizer

MAX_GRAMMAR_BYTES = 32 * 1024
_MAX_REASON = 300
_NO_TOKEN = "no token of the vocabulary can continue or end the text"
_NAMES = {"json_schema": "a JSON schema", "regex": "a regular expression", "lark": "a Lark grammar"}
# Work is bounded in llguidance's own units rather than in seconds, so that acceptance does not depend on the machine's load.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # about 10 ms at the start
    step_lexer_fuel=100_000,  # about 7 ms per mask at worst
    step_max_items=25_000,
    max_lexer_states=20_000,  # 1 to 2 kB each
    max_grammar_size=50_000,
    verbose_errors=False,
)


class Grammars:
    """Compiles constraints for one vocabulary. Thread-safe; compilation does not block other threads."""

    def __init__(self, tokenizer: Tokenizer, *, n_vocab: int | None = None) -> None:
        """`n_vocab`: the model's vocabulary size, if larger than the tokenizer's. The additional ids are never allowed."""
        n_ids = tokenizer.n_vocab if n_vocab is None else n_vocab
        assert n_ids >= tokenizer.n_vocab, "the tokenizer has ids outside the model's vocabulary"
        self._end = tokenizer.eos_id
        self._text_ids = np.zeros(n_ids, bool)
        self._text_ids[: tokenizer.n_vocab] = tokenizer.lengths() > 0
        # Text that the grammar forces is split into tokens as the tokenizer would split it, unless that changes the text.
        self._options = "" if tokenizer.exact else '%llguidance {"no_forcing": true}'
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=tokenizer.eos_id)

    def compile(self, constraint: Constraint) -> Matcher:
        """Compile a constraint. Raises `UserError` if it cannot be parsed, is too large, or matches no text of this vocabulary."""
        kind = constraint.kind
        try:
            n_bytes = len(constraint.grammar.encode())
            if n_bytes > MAX_GRAMMAR_BYTES:
                needs, fix = f"at most {MAX_GRAMMAR_BYTES:,} bytes", "make it smaller"
                raise invalid(kind, f"{n_bytes:,} bytes", needs, fix)
            lark = f"{_TO_LARK[kind](constraint.grammar)}\n{self._options}"
            # Mark it as Lark explicitly: llguidance would take text that begins with a brace for another grammar format.
            grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
            matcher = Matcher(
                LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS), kind, self._end, self._text_ids
            )
            matcher.mask()
        except UserError:
            raise
        except (ValueError, RecursionError) as error:  # invalid JSON, nested too deeply, or invalid Unicode
            raise _unusable(kind, str(error)) from None
        return matcher


class Matcher:
    """Position of one text in its grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, kind: str, end: int, text_ids: Bool[np.ndarray, " vocab"]) -> None:
        self._matcher = matcher
        self._kind = kind
        self._end = end
        self._text_ids = text_ids
        self._check()

    def mask(self) -> Bool[np.ndarray, " vocab"]:
        """Return the ids that may come next, including the EOS id where the text may end. Never empty: raises `UserError` if the
        text can neither continue nor end, or exceeds the limits. Control ids are never allowed, even if a grammar names them."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.zeros_like(self._text_ids)
        unpacked = np.unpackbits(bits, bitorder="little")[: len(allowed)]
        allowed[: len(unpacked)] = unpacked
        allowed &= self._text_ids
        allowed[self._end] = self._matcher.is_accepting()
        if not allowed.any():
            raise _unusable(self._kind, _NO_TOKEN)
        return allowed

    def advance(self, token: int) -> None:
        """Consume an id that the mask allowed."""
        assert token == self._end or not self.is_finished, "a token after the end of the text"
        if not self._matcher.consume_token(token):
            assert "doesn't satisfy the grammar" not in self._matcher.get_error(), (
                f"the token {token} is not allowed here"
            )
            self._check()

    @property
    def is_finished(self) -> bool:
        """Whether, after `advance`, the text matches and can only end, or has ended."""
        return self._matcher.is_stopped()

    def copy(self) -> Matcher:
        """Return an independent copy at the same position."""
        return Matcher(self._matcher.deep_copy(), self._kind, self._end, self._text_ids)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            raise _unusable(self._kind, _NO_TOKEN if reason.startswith("NoExtension") else reason)


class _Vocabulary:
    """Adapts a tokenizer to llguidance's interface."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.id_bytes(i) for i in range(tokenizer.n_vocab)]
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id
        self.special_token_ids = [i for i, piece in enumerate(pieces) if not piece]
        self.tokens = [piece or b"<id %d>" % i for i, piece in enumerate(pieces)]  # llguidance panics on an empty one

    def __call__(self, data: bytes) -> list[int]:
        return self._tokenizer.encode(data).tolist()


def _from_json_schema(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict | bool):
        raise invalid("json_schema", text[:80], "a JSON object", "see json-schema.org")
    return f"start: %json {json.dumps(schema)}"


def _from_regex(text: str) -> str:
    n_backslashes = len(text) - len(text.rstrip("\\"))
    if n_backslashes % 2:  # llguidance would drop it
        raise invalid(
            "regex", text[-80:], "complete (it ends with a single backslash)", "write two backslashes for a literal one"
        )
    return f"start: /{regex_to_lark(text, '')}/"


_TO_LARK: dict[str, Callable[[str], str]] = {
    "json_schema": _from_json_schema,
    "regex": _from_regex,
    "lark": lambda text: text,
}


def _unusable(kind: str, reason: str) -> UserError:
    text = " ".join(reason.split("<backtrace>")[0].split("<non-verbose/>")[0].split())
    short = text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."
    return UserError(
        f"{kind} cannot be used: {short or 'it cannot be parsed'}. Fix: use {_NAMES[kind]} that llguidance supports."
    )
