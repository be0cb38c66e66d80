"""Subword tokenizer with one of two rules.

`exact` round-trips every byte. The encoding is compared with its input, first by blocks, then by lines, then by words; words that
differ (unusual spaces, normalized characters, invalid UTF-8) are encoded with the 256 byte pieces.

`released` encodes and decodes exactly as the model file's own library does, and so as the model was trained.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from linnet.core.files import atomic_write
from linnet.core.special_tokens import ONE_PER_BYTE, TextRules
from linnet.models.detokenize import joined_bytes
from linnet.tokenizers.base import (
    EOS_FILE,
    SETTINGS_FILE,
    EncodingRules,
    SpecialToken,
    fingerprint,
    format_piece,
    settings_json,
)

BLOCK_CHARS = 4096
"""Target block size: the libraries encode short texts faster and with less memory than long ones."""
LONGEST_BLOCK_CHARS = 16 * BLOCK_CHARS

Split = Callable[[str], list[str]]

# Each run of surrogate escapes (Python's representation of invalid UTF-8 bytes) is a separate word.
_WORD = re.compile(r"[\udc80-\udcff]+|\s*[^\s\udc80-\udcff]+|\s+")
# Newlines are separate, because a model that normalizes them to spaces may still encode the rest of the line exactly.
_LINE = re.compile(r"[^\n]+|\n+")
_NOT_UTF8 = re.compile(r"[\udc80-\udcff]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PieceModel:
    """The contents of a model file, independent of its library."""

    kind: str
    file: str
    """File name under which the model is saved."""
    content: bytes
    names: Sequence[str]
    table: Sequence[bytes]
    """Bytes of each id inside a text; empty for control ids."""
    eos_id: int
    byte_ids: Sequence[int] | None
    """The id of each byte; None unless all 256 bytes have one."""
    unknown_id: int | None
    encode_texts: Callable[[list[str]], list[list[int]]]
    reopen: Callable[[bytes, str, str, EncodingRules], PieceTokenizer]
    """Reopens the tokenizer in a worker process from the content, the EOS token's name, the file name and the rules."""
    released: ReleasedCodec | None = None
    """The library's own encoding and decoding, with the rules `released`."""
    special: Mapping[int, SpecialToken] = dataclasses.field(default_factory=dict)
    """Control ids with settings of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleasedCodec:
    encode: Callable[[str], list[int]]
    """Encodes a complete text."""
    encode_continuing: Callable[[str], list[int]]
    """Encodes text that continues another, without the space prefix."""
    opening: Sequence[bytes] | None
    """Bytes of each id at the beginning of a text. None: the same as inside."""
    drops_all: bool
    errors: str
    """`drops_all` and `errors` are as in `TextRules`."""


class PieceTokenizer:
    def __init__(self, model: PieceModel) -> None:
        self._model = model
        self.kind = model.kind
        self.n_vocab = len(model.table)
        self.eos_id = model.eos_id
        self.rules: EncodingRules = "exact" if model.released is None else "released"
        self.exact = model.byte_ids is not None and model.released is None
        # The rules change the ids and therefore the fingerprint; that of `exact` is the same as before there were two rules.
        kind = model.kind if model.released is None else f"{model.kind} {self.rules}"
        self.fingerprint = fingerprint(kind, model.content, model.eos_id)
        control = (i for i, piece in enumerate(model.table) if not piece)
        self.special_tokens: Mapping[str, SpecialToken] = {
            model.names[i]: model.special.get(i, SpecialToken(i)) for i in control
        }

    def __reduce__(self) -> tuple[Any, ...]:
        model = self._model
        return model.reopen, (model.content, model.names[self.eos_id], model.file, self.rules)

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
        atomic_write(folder / EOS_FILE, self._model.names[self.eos_id].encode())
        atomic_write(folder / SETTINGS_FILE, settings_json(self))
        atomic_write(folder / self._model.file, self._model.content)

    def _name(self, token: int) -> str:
        piece = self.id_bytes(token)
        return self._model.names[token] if not piece and 0 <= token < self.n_vocab else format_piece(piece, token)

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
        """Encode, replacing control ids that the text spells out by the unknown id: a text must not produce EOS."""
        ids = _joined(self._model.encode_texts(blocks(text)))
        control = self.lengths()[ids] == 0
        if self._model.unknown_id is None:
            return ids[~control]
        return np.where(control, np.int32(self._model.unknown_id), ids)


def blocks(text: str) -> list[str]:
    """Split into blocks at line starts, so that no piece would span a boundary. Only an extremely long line is split elsewhere."""
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
    """Return the start of the first line after `low` that does not begin with whitespace; else the last space before `high`; else
    `high`."""
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
