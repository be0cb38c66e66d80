"""What turns bytes into ids and back. `open_tokenizer` knows the bytes themselves, sentencepiece models, and Hugging Face
tokenizer.json files; each has a fingerprint, so that data and model can be held to the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from jaxtyping import Int32

from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write
from linnet.core.special_tokens import EOS, FIRST_BYTE, N_BYTE_IDS, TextRules

BYTES = "bytes"
BYTES_FILE, SENTENCEPIECE_FILE, HUGGINGFACE_FILE = "tokenizer.bytes", "tokenizer.model", "tokenizer.json"
TOKENIZER_FILES = (BYTES_FILE, SENTENCEPIECE_FILE, HUGGINGFACE_FILE)
END_FILE = "tokenizer.end"
"""The name of the end token, beside a saved model: a model file need not say which of its tokens ends a document."""
SETTINGS_FILE = "tokenizer_settings.json"
"""The rules by which a saved model is used. Without this file: `exact`, as in every version before there was a choice."""
Rules = Literal["exact", "released"]
"""`exact`: every byte string comes back as it was. `released`: as the library of the model file encodes and decodes."""


class Tokenizer(Protocol):
    """Can be pickled for worker processes, and holds no open file."""

    @property
    def kind(self) -> str: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def end_id(self) -> int:
        """Ends a document. No text is ever encoded to it."""
        ...

    @property
    def exact(self) -> bool:
        """Every byte string comes back as it was: the vocabulary has a piece for every byte."""
        ...

    @property
    def rules(self) -> Rules: ...
    @property
    def text_rules(self) -> TextRules:
        """How ids become text, piece by piece; `decode` follows them too."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 of the kind, the content, the end id and the rules."""
        ...

    def encode(self, data: bytes, *, continues: bool = False) -> Int32[np.ndarray, " n"]:
        """Without an end id. Bytes that are not UTF-8 are no error. `continues`: the text continues another, so nothing that
        belongs in front of a text is added to it."""
        ...

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, " n"]) -> bytes:
        """Of a whole text. An id that stands for no text adds nothing."""
        ...

    def id_bytes(self, token: int) -> bytes:
        """What one id stands for, inside a text."""
        ...

    def lengths(self) -> Int32[np.ndarray, " vocab"]:
        """The number of bytes of every id."""
        ...

    def pieces(self, ids: Sequence[int] | Int32[np.ndarray, " n"]) -> list[str]:
        """Names for people to read."""
        ...

    def save(self, folder: Path) -> None:
        """Writes what `open_tokenizer(folder)` needs."""
        ...


_BYTE = tuple(bytes((value,)) for value in range(256))


class BytesTokenizer:
    """A byte is an id. Nothing to learn, nothing to lose."""

    kind = BYTES
    n_vocab = N_BYTE_IDS
    end_id = EOS
    exact = True
    rules: Rules = "exact"

    @property
    def text_rules(self) -> TextRules:
        return TextRules(id_bytes=self.id_bytes)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.kind, b"", self.end_id)

    def encode(self, data: bytes, *, continues: bool = False) -> Int32[np.ndarray, " n"]:
        return np.frombuffer(data, np.uint8).astype(np.int32) + FIRST_BYTE

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, " n"]) -> bytes:
        values = np.asarray(ids, np.int64) - FIRST_BYTE
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes()

    def id_bytes(self, token: int) -> bytes:
        byte = token - FIRST_BYTE
        return _BYTE[byte] if 0 <= byte < 256 else b""

    def lengths(self) -> Int32[np.ndarray, " vocab"]:
        return (np.arange(self.n_vocab) >= FIRST_BYTE).astype(np.int32)

    def pieces(self, ids: Sequence[int] | Int32[np.ndarray, " n"]) -> list[str]:
        special = dict(enumerate(("<pad>", "<end>", "<unknown>")))
        return [special.get(i) or readable(self.id_bytes(i), i) for i in map(int, ids)]

    def save(self, folder: Path) -> None:
        atomic_write(folder / BYTES_FILE, b"ids 0 pad, 1 end, 2 unknown; byte b is b + 3\n")


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of a whole sequence of ids."""
    return tokenizer.decode(ids).decode(errors=tokenizer.text_rules.errors)


def settings_json(tokenizer: Tokenizer) -> bytes:
    return json.dumps({"rules": tokenizer.rules, "byte_exact": tokenizer.exact}, indent=1).encode() + b"\n"


def readable(piece: bytes, token: int) -> str:
    """The text of a piece, or its bytes as <0xNN> where it is not a text that can be printed."""
    text = piece.decode(errors="replace")
    if text.isprintable() and "\ufffd" not in text:
        return text or f"<id {token}>"
    return "".join(f"<0x{byte:02X}>" for byte in piece)


def fingerprint(kind: str, content: bytes, end_id: int) -> str:
    return hashlib.sha256(f"{kind}\0{end_id}\0".encode() + content).hexdigest()


def not_a_tokenizer(name: str, needs: str = "") -> UserError:
    return invalid(
        "--tokenizer",
        name,
        needs or f"{BYTES!r}, a sentencepiece .model file, a Hugging Face tokenizer.json, or a folder with one of them",
        "check the path, or make a tokenizer with `linnet tokenizer train`",
    )
