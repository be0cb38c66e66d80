"""A tokenizer of pieces, by one of two rules.

`exact` gives back every byte. What a model encodes is compared with what it was given, from blocks to lines to words; what
differs (odd spaces, normalised letters, bytes that are not UTF-8) goes through the 256 byte pieces.

`released` is what the library of the model file does, with nothing switched off: how the model's own authors encode and decode.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from linnet.core.files import atomic_write
from linnet.core.special_tokens import ONE_PER_BYTE, TextRules
from linnet.models.detokenize import joined_bytes
from linnet.tokenizers.base import END_FILE, SETTINGS_FILE, Rules, fingerprint, readable, settings_json

BLOCK_CHARS = 4096
"""Models take short texts faster than long ones, and hold less memory."""
LONGEST_BLOCK_CHARS = 16 * BLOCK_CHARS

Split = Callable[[str], list[str]]

# Python's stand-ins for the bytes that are no UTF-8: each run of them is a word of its own.
_WORD = re.compile(r"[\udc80-\udcff]+|\s*[^\s\udc80-\udcff]+|\s+")
# Their ends apart: a model that takes them for spaces may still have the rest of the line right.
_LINE = re.compile(r"[^\n]+|\n+")
_NOT_UTF8 = re.compile(r"[\udc80-\udcff]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What is inside a model file."""

    kind: str
    file: str
    """Its name when saved."""
    content: bytes
    names: Sequence[str]
    table: Sequence[bytes]
    """What each id stands for inside a text; nothing for control ids."""
    end_id: int
    byte_ids: Sequence[int] | None
    """The piece of every byte; None if one has none."""
    unknown_id: int | None
    encode_texts: Callable[[list[str]], list[list[int]]]
    reopen: Callable[[bytes, str, str, Rules], PieceTokenizer]
    """From content, the name of the end token, the file's name and the rules: how a worker process gets its own."""
    released: Released | None = None
    """How the file's own library encodes and decodes, where that is to be followed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Released:
    encode: Callable[[str], list[int]]
    """A whole text."""
    encode_continuing: Callable[[str], list[int]]
    """Text that continues another: without the space that belongs in front of a text."""
    opening: Sequence[bytes] | None
    """What each id stands for at the beginning of a text; None: the same as inside."""
    drops_all: bool
    errors: str
    """Both as in `TextRules`."""


class PieceTokenizer:
    def __init__(self, model: Model) -> None:
        self._model = model
        self.kind = model.kind
        self.n_vocab = len(model.table)
        self.end_id = model.end_id
        self.rules: Rules = "exact" if model.released is None else "released"
        self.exact = model.byte_ids is not None and model.released is None
        # Other ids for the same text are another tokenizer; `exact` has the fingerprint that it had before there were two rules.
        kind = model.kind if model.released is None else f"{model.kind} {self.rules}"
        self.fingerprint = fingerprint(kind, model.content, model.end_id)

    def __reduce__(self) -> tuple[Any, ...]:
        model = self._model
        return model.reopen, (model.content, model.names[self.end_id], model.file, self.rules)

    @property
    def text_rules(self) -> TextRules:
        released = self._model.released
        if released is None:
            return TextRules(id_bytes=self.id_bytes)
        opening = released.opening
        return TextRules(
            id_bytes=self.id_bytes,
            opening_bytes=None if opening is None else lambda i: opening[i] if 0 <= i < self.n_vocab else b"",
            drops_all=released.drops_all,
            errors=released.errors,
        )

    def encode(self, data: bytes, *, continues: bool = False) -> Int32[np.ndarray, " n"]:
        byte_ids, released = self._model.byte_ids, self._model.released
        if released is not None:
            encode = released.encode_continuing if continues else released.encode
            return np.asarray(encode(data.decode(errors=ONE_PER_BYTE)), np.int32)
        if byte_ids is None:
            return self._encode_lossy(data.decode(errors="replace"))
        spans = self._encode_exact(blocks(data.decode(errors="surrogateescape")), (lines, words), byte_ids)
        return _joined(list(spans))

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, " n"]) -> bytes:
        table, n = self._model.table, self.n_vocab
        plain = np.asarray(ids, np.int64).tolist()
        if self._model.released is not None:
            return joined_bytes(self.text_rules, plain)
        return b"".join([table[i] for i in plain if 0 <= i < n])

    def id_bytes(self, token: int) -> bytes:
        return self._model.table[token] if 0 <= token < self.n_vocab else b""

    def lengths(self) -> Int32[np.ndarray, " vocab"]:
        return np.asarray([len(piece) for piece in self._model.table], np.int32)

    def pieces(self, ids: Sequence[int] | Int32[np.ndarray, " n"]) -> list[str]:
        return [self._name(int(i)) for i in ids]

    def save(self, folder: Path) -> None:
        atomic_write(folder / END_FILE, self._model.names[self.end_id].encode())
        atomic_write(folder / SETTINGS_FILE, settings_json(self))
        atomic_write(folder / self._model.file, self._model.content)

    def _name(self, token: int) -> str:
        piece = self.id_bytes(token)
        return self._model.names[token] if not piece and 0 <= token < self.n_vocab else readable(piece, token)

    def _encode_exact(
        self, spans: list[str], finer: tuple[Split, ...], byte_ids: Sequence[int]
    ) -> Iterator[Sequence[int]]:
        proper = [_NOT_UTF8.search(span) is None for span in spans]
        encoded = iter(self._model.encode_texts(list(itertools.compress(spans, proper))))
        table = self._model.table
        for span, is_proper in zip(spans, proper, strict=True):
            data = span.encode(errors="surrogateescape")
            ids = next(encoded) if is_proper else []
            if b"".join([table[i] for i in ids]) == data:
                yield ids
            elif finer:
                yield from self._encode_exact(finer[0](span), finer[1:], byte_ids)
            else:
                yield [byte_ids[byte] for byte in data]

    def _encode_lossy(self, text: str) -> Int32[np.ndarray, " n"]:
        """A control id that a text spells out becomes the unknown id: no text may end a document."""
        ids = _joined(self._model.encode_texts(blocks(text)))
        control = self.lengths()[ids] == 0
        if self._model.unknown_id is None:
            return ids[~control]
        return np.where(control, np.int32(self._model.unknown_id), ids)


def blocks(text: str) -> list[str]:
    """Cut where a line begins, so that no model would have joined what is parted; only a giant line is cut elsewhere."""
    found, begin = [], 0
    while begin < len(text):
        end = _block_end(text, begin + BLOCK_CHARS, begin + LONGEST_BLOCK_CHARS)
        found.append(text[begin:end])
        begin = end
    return found


def lines(text: str) -> list[str]:
    return _LINE.findall(text)


def words(text: str) -> list[str]:
    return _WORD.findall(text)


def _block_end(text: str, low: int, high: int) -> int:
    """The first line after `low` that begins with a letter; else the last space before `high`; else `high`."""
    newline = text.find("\n", low, high)
    while newline >= 0:
        if not text[newline + 1 : newline + 2].isspace():
            return newline + 1
        newline = text.find("\n", newline + 1, high)
    if len(text) <= high:
        return len(text)
    space = text.rfind(" ", low, high)
    return space if space >= 0 else high


def _joined(spans: Sequence[Sequence[int]]) -> Int32[np.ndarray, " n"]:
    return np.fromiter(itertools.chain.from_iterable(spans), np.int32, count=sum(map(len, spans)))
