"""From the tokens of one request to its text: told as soon as it is certain, whole characters only, nothing of a stop string.

A stop string is the one that is complete first, byte by byte: the text does not depend on how its bytes were cut into tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from linnet.core.errors import invalid
from linnet.core.special_tokens import TextRules


def check_stops(stops: Sequence[str]) -> None:
    """Each is of at least one byte, and of whole characters."""
    for stop in stops:
        if not stop:
            raise invalid("stop", "", "a string of at least one character", "leave it out")
        # A byte that is not UTF-8 comes from a command line as half of a surrogate pair; JSON may have one, too.
        if any(0xD800 <= ord(letter) < 0xE000 for letter in stop):
            raise invalid("stop", ascii(stop), "text that is Unicode", "leave out what is not a whole character")


def joined_bytes(rules: TextRules, ids: Iterable[int]) -> bytes:
    """Of a whole text."""
    opening, ids = _Opening(rules), iter(ids)
    front: list[bytes] = []
    while opening.is_open and (token := next(ids, None)) is not None:
        front.append(opening.bytes_of(token))
    return b"".join([*front, *map(rules.id_bytes, ids)])


class _Opening:
    """Drops the spaces at the beginning of a text that the vocabulary's own decoder drops."""

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
    """Feed tokens until `stopped`, `take` what is certain as often as you like, `close` at the end, whatever ended it.

    `before`: the tokens that the text continues, where it is shown after theirs. `continues`: it continues a text that is not
    known here. Without both it is a text of its own, decoded as its vocabulary decodes a whole."""

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
        """The stop string that ended the text."""
        self._rules = rules
        self._opening = _Opening(rules)
        self._opening.is_open &= not continues
        self._stops = [_Stop(text) for text in stop]
        self._left = min_tokens  # tokens until a stop string counts
        self._held = b""  # bytes that may yet turn out to begin a stop string
        self._begun = b""  # of those that may not, the beginning of a character
        self._text: list[str] = []  # certain, not taken
        self._begun_all = b""  # the same as if nothing were held back, for the offsets
        self._n_chars = 0
        self._offsets: list[int] = []  # not taken
        if before:
            self.before, self._begun = self._decoded(b"".join(map(self._opening.bytes_of, before)))
            self._begun_all = self._begun
        else:
            self.before = ""
        """The certain text of the tokens before: a character that they only begin belongs to what follows."""

    def feed(self, token: int) -> None:
        """An id that stands for no text is a token too: it has an offset, and counts for `min_tokens`."""
        assert self.stopped is None, "a token after the text had ended"
        self._left -= 1
        data = self._opening.bytes_of(token)
        self._offsets.append(self._place(data[:1]))
        text, self._begun_all = self._decoded(self._begun_all + data)
        self._n_chars += len(text)
        if not self._stops:  # nothing is ever held back: what is whole is certain
            self._text.append(text)
            self._begun = self._begun_all
            return
        for i in range(len(data)):
            self._push(data[i : i + 1])
            if self.stopped is not None:
                break

    def take(self) -> tuple[str, tuple[int, ...]]:
        """The text that became certain since the last time, and of each token fed since then where its text begins in the whole
        text, in characters. A token inside a character begins where the character does; one of a stop string, past the end."""
        text, offsets = "".join(self._text), tuple(self._offsets)
        self._text, self._offsets = [], []
        return text, offsets

    def close(self) -> str:
        """The rest of the text, when no more can come. A character that never became whole is U+FFFD."""
        rest = [*self._text, (self._begun + self._held).decode(errors=self._rules.errors)]
        self._text, self._begun, self._held = [], b"", b""
        return "".join(rest)

    def _push(self, byte: bytes) -> None:
        self._held += byte
        complete = [stop for stop in self._stops if stop.step(byte[0])]
        if complete and self._left <= 0:
            longest = max(complete, key=lambda stop: len(stop.data))
            self.stopped = longest.text
            ready, self._held = self._held[: -len(longest.data)], b""
        else:
            cut = len(self._held) - max(stop.n_matched for stop in self._stops)
            ready, self._held = self._held[:cut], self._held[cut:]
        if ready:
            text, self._begun = self._decoded(self._begun + ready)
            self._text.append(text)

    def _place(self, first: bytes) -> int:
        """Which character the first byte is part of; of a token without bytes, the one that is begun, or else the next."""
        if not self._begun_all:
            return self._n_chars
        data = self._begun_all + first
        if len(data.decode(errors="replace")) == 1:  # one character, whole or begun
            return self._n_chars
        return self._n_chars + len(data.decode(errors=self._rules.errors)) - 1

    def _decoded(self, data: bytes) -> tuple[str, bytes]:
        """The characters that are whole, and the beginning of another."""
        text, n = codecs.utf_8_decode(data, self._rules.errors, False)
        return text, data[n:]


class _Stop:
    """How much of one stop string the bytes so far end with (Knuth, Morris and Pratt): constant work a byte, however long it is."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.data = text.encode()
        assert self.data, "an empty stop string"
        self._borders = _borders(self.data)
        self.n_matched = 0
        """Never the whole string: when complete, what of it may begin the next."""

    def step(self, byte: int) -> bool:
        """Whether this byte completes it."""
        n = self.n_matched
        while n and self.data[n] != byte:
            n = self._borders[n - 1]
        n += self.data[n] == byte
        is_complete = n == len(self.data)
        self.n_matched = self._borders[n - 1] if is_complete else n
        return is_complete


def _borders(data: bytes) -> list[int]:
    """Of each prefix, the length of the longest shorter prefix that it ends with."""
    borders, n = [0], 0
    for byte in data[1:]:
        while n and data[n] != byte:
            n = borders[n - 1]
        n += data[n] == byte
        borders.append(n)
    return borders
