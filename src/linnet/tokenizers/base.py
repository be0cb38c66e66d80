"""The tokenizer interface and the byte tokenizer. `load.open_tokenizer` opens these, sentencepiece models and Hugging Face
tokenizer.json files. Each tokenizer has a fingerprint, which is used to check that data and model match."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int32

from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write
from linnet.core.special_tokens import EOS, FIRST_BYTE, N_BYTE_IDS, TextRules

BYTES = "bytes"
BYTES_FILE, SENTENCEPIECE_FILE, HUGGINGFACE_FILE = "tokenizer.bytes", "tokenizer.model", "tokenizer.json"
TOKENIZER_FILES = (BYTES_FILE, SENTENCEPIECE_FILE, HUGGINGFACE_FILE)
EOS_FILE = "tokenizer.end"
"""File with the name of the EOS token, next to a saved model: a model file need not define which token is EOS."""
SETTINGS_FILE = "tokenizer_settings.json"
"""File with the `EncodingRules` of a saved tokenizer. Without it the rules are `exact`: versions before the setting had no others."""
EncodingRules = Literal["exact", "released"]
"""`exact`: every byte string round-trips. `released`: encodes and decodes exactly as the model file's own library does."""


class SpecialToken(NamedTuple):
    id: int
    lstrip: bool = False
    """In a template, the token takes the spaces before it."""
    rstrip: bool = False
    """In a template, the token takes the spaces after it."""


class Tokenizer(Protocol):
    """Tokenizer interface. Instances can be pickled for worker processes and hold no open file."""

    @property
    def kind(self) -> str: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def eos_id(self) -> int:
        """The EOS id, which ends a document. No text is encoded to it."""
        ...

    @property
    def exact(self) -> bool:
        """Whether every byte string round-trips, because the vocabulary has a piece for each byte."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, SpecialToken]:
        """Control tokens by name, for chat templates. No text is encoded to them."""
        ...

    @property
    def rules(self) -> EncodingRules: ...
    @property
    def text_rules(self) -> TextRules:
        """The detokenization rules for single ids; `decode` follows them too."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the kind, the content, the EOS id and the rules."""
        ...

    def encode(self, data: bytes, *, continues: bool = False) -> Int32[np.ndarray, " n"]:
        """Encode without EOS. Invalid UTF-8 is allowed. `continues`: the text continues another, so no prefix (such as
        sentencepiece's leading space) is added."""
        ...

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, " n"]) -> bytes:
        """Decode a complete text. Control ids add nothing."""
        ...

    def id_bytes(self, token: int) -> bytes:
        """Return the bytes of one id inside a text."""
        ...

    def lengths(self) -> Int32[np.ndarray, " vocab"]:
        """Return the number of bytes of each id."""
        ...

    def pieces(self, ids: Sequence[int] | Int32[np.ndarray, " n"]) -> list[str]:
        """Return human-readable names of the ids."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files that `open_tokenizer(folder)` needs."""
        ...


_BYTE = tuple(bytes((value,)) for value in range(256))


class BytesTokenizer:
    """Byte-level tokenizer: byte b is id b + 3, after three special ids."""

    kind = BYTES
    n_vocab = N_BYTE_IDS
    eos_id = EOS
    exact = True
    rules: EncodingRules = "exact"
    special_tokens: Mapping[str, SpecialToken] = MappingProxyType({"<end>": SpecialToken(EOS)})

    @property
    def text_rules(self) -> TextRules:
        return TextRules(id_bytes=self.id_bytes)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.kind, b"", self.eos_id)

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
        return [special.get(i) or format_piece(self.id_bytes(i), i) for i in map(int, ids)]

    def save(self, folder: Path) -> None:
        atomic_write(folder / BYTES_FILE, b"ids 0 pad, 1 end, 2 unknown; byte b is b + 3\n")


def decode_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode a complete sequence of ids to a string."""
    return tokenizer.decode(ids).decode(errors=tokenizer.text_rules.errors)


def settings_json(tokenizer: Tokenizer) -> bytes:
    return json.dumps({"rules": tokenizer.rules, "byte_exact": tokenizer.exact}, indent=1).encode() + b"\n"


def format_piece(piece: bytes, token: int) -> str:
    """Return the text of a piece, or its bytes as <0xNN> if it is not printable."""
    text = piece.decode(errors="replace")
    if text.isprintable() and "\ufffd" not in text:
        return text or f"<id {token}>"
    return "".join(f"<0x{byte:02X}>" for byte in piece)


def fingerprint(kind: str, content: bytes, eos_id: int) -> str:
    return hashlib.sha256(f"{kind}\0{eos_id}\0".encode() + content).hexdigest()


def invalid_tokenizer(name: str, needs: str = "") -> UserError:
    return invalid(
        "--tokenizer",
        name,
        needs or f"{BYTES!r}, a sentencepiece .model file, a Hugging Face tokenizer.json, or a folder with one of them",
        "check the path, or make a tokenizer with `linnet tokenizer train`",
    )
