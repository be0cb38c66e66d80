"""Incremental detokenization of one request: text is released once it is final, in complete characters, without stop strings.

Stop strings are matched byte by byte and the first complete one wins, so the text does not depend on token boundaries."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from linnet.core.errors import invalid
from linnet.core.special_tokens import TextRules


def check_stops(stops: Sequence[str]) -> None:
    """Raise an error if a stop string is empty or not valid Unicode."""
    for stop in stops:
        if not stop:
            raise invalid("stop", "", "a string of at least one character", "leave it out")
        # A command-line byte that is not UTF-8 becomes a lone surrogate; JSON can contain one, too.
        if any(0xD800 <= ord(letter) < 0xE000 for letter in stop):
            raise invalid("stop", ascii(stop), "text that is Unicode", "leave out incomplete characters")


def joined_bytes(rules: TextRules, ids: Iterable[int]) -> bytes:
    """Return the bytes of a complete text."""
    opening, ids = _Opening(rules), iter(ids)
    front: list[bytes] = []
    while opening.is_open and (token := next(ids, None)) is not None:
        front.append(opening.bytes_of(token))
    return b"".join([*front, *map(rules.id_bytes, ids)])


class _Opening:
    """Drops the leading spaces of a text that the vocabulary's own decoder drops."""

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self.is_open = rules.opening_bytes is not None

    def bytes_of(self, token: int) -> bytes:
        data = self._rules.id_bytes(token)
        if not self.is_open or self._rules.opening_bytes is None:
            return data
        short = self._rules.opening_bytes(token)
        if short or (len(short) < len(data) and not self._rules.drops_all):
            self.is_open = False
        return short


class TextAssembler:
    """Incremental detokenizer: `feed` tokens until `stopped`, `take` final text at any time, and `close` at the end.

    `before`: tokens that the text continues, if it is displayed after them. `continues`: the text continues one that is not known
    here. Otherwise the text is decoded as a complete text by its vocabulary."""

    def __init__(
        self,
        rules: TextRules,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        before: Sequence[int] = (),
        continues: bool = False,
    ) -> None:
        self.stopped: str | None = None
        """Stop string that ended the text."""
        self._rules = rules
        self._opening = _Opening(rules)
        self._opening.is_open &= not continues
        self._stops = [_Stop(text) for text in stop]
        self._left = min_tokens  # tokens before stop strings apply
        self._pending = b""  # bytes that may be the start of a stop string
        self._begun = b""  # final bytes of an incomplete character
        self._text: list[str] = []  # final, not yet taken
        self._begun_all = b""  # like `_begun`, but ignoring stop strings; used for the offsets
        self._n_chars = 0
        self._offsets: list[int] = []  # not yet taken
        if before:
            self.before, self._begun = self._decoded(b"".join(map(self._opening.bytes_of, before)))
            self._begun_all = self._begun
        else:
            self.before = ""
        """Final text of the tokens in `before`; a character that they leave incomplete belongs to the following text."""

    def feed(self, token: int) -> None:
        """Add a token. Tokens without text also have an offset and count towards `min_tokens`."""
        assert self.stopped is None, "a token after the text had ended"
        self._left -= 1
        data = self._opening.bytes_of(token)
        self._offsets.append(self._char_index(data[:1]))
        text, self._begun_all = self._decoded(self._begun_all + data)
        self._n_chars += len(text)
        if not self._stops:  # no stop strings: every complete character is final
            self._text.append(text)
            self._begun = self._begun_all
            return
        for i in range(len(data)):
            self._push(data[i : i + 1])
            if self.stopped is not None:
                break

    def take(self) -> tuple[str, tuple[int, ...]]:
        """Return the text that became final since the last call, and the offset of each token fed since then in the complete text, in
        characters. A token inside a character has the character's offset; a token of a stop string has an offset past the end."""
        text, offsets = "".join(self._text), tuple(self._offsets)
        self._text, self._offsets = [], []
        return text, offsets

    def close(self) -> str:
        """Return the remaining text after the last token. An incomplete character becomes U+FFFD."""
        rest = [*self._text, (self._begun + self._pending).decode(errors=self._rules.errors)]
        self._text, self._begun, self._pending = [], b"", b""
        return "".join(rest)

    def _push(self, byte: bytes) -> None:
        self._pending += byte
        complete = [stop for stop in self._stops if stop.step(byte[0])]
        if complete and self._left <= 0:
            longest = max(complete, key=lambda stop: len(stop.data))
            self.stopped = longest.text
            ready, self._pending = self._pending[: -len(longest.data)], b""
        else:
            n_ready = len(self._pending) - max(stop.n_matched for stop in self._stops)
            ready, self._pending = self._pending[:n_ready], self._pending[n_ready:]
        if ready:
            text, self._begun = self._decoded(self._begun + ready)
            self._text.append(text)

    def _char_index(self, first: bytes) -> int:
        """Return the index of the character that the first byte belongs to. A token without bytes belongs to the incomplete character,
        if there is one, else to the next character."""
        if not self._begun_all:
            return self._n_chars
        data = self._begun_all + first
        if len(data.decode(errors="replace")) == 1:  # one character, complete or incomplete
            return self._n_chars
        return self._n_chars + len(data.decode(errors=self._rules.errors)) - 1

    def _decoded(self, data: bytes) -> tuple[str, bytes]:
        """Return the complete characters and the bytes of an incomplete one."""
        text, n = codecs.utf_8_decode(data, self._rules.errors, False)
        return text, data[n:]


class _Stop:
    """Knuth-Morris-Pratt matcher for one stop string: constant work per byte for any length."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.data = text.encode()
        assert self.data, "an empty stop string"
        self._borders = _borders(self.data)
        self.n_matched = 0
        """Length of the current partial match. After a complete match, the part of it that may start the next one."""

    def step(self, byte: int) -> bool:
        """Advance by one byte and return whether it completes the stop string."""
        n = self.n_matched
        while n and self.data[n] != byte:
            n = self._borders[n - 1]
        n += self.data[n] == byte
        is_complete = n == len(self.data)
        self.n_matched = self._borders[n - 1] if is_complete else n
        return is_complete


def _borders(data: bytes) -> list[int]:
    """Return, for each prefix, the length of its longest proper suffix that is also a prefix."""
    borders, n = [0], 0
    for byte in data[1:]:
        while n and data[n] != byte:
            n = borders[n - 1]
        n += data[n] == byte
        borders.append(n)
    return borders
