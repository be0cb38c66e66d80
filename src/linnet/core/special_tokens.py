"""The ids that mean the same in every vocabulary of bytes and pixels: three special ones, then the 256 values of a byte. And
the rules by which the ids of any vocabulary become text."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable

PAD, EOS, UNKNOWN = 0, 1, 2
FIRST_BYTE = 3
"""Byte b is id b + 3."""
N_BYTE_IDS = FIRST_BYTE + 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRules:
    """How ids become text: what the streaming and the whole detokenization of a vocabulary have in common."""

    id_bytes: Callable[[int], bytes]
    """What an id stands for inside a text."""
    opening_bytes: Callable[[int], bytes] | None = None
    """What it stands for at the beginning of a text, where that differs: sentencepiece drops the space that it puts in front."""
    drops_all: bool = False
    """Every space at the beginning is dropped; else only the first."""
    errors: str = "replace"
    """How bytes that are not UTF-8 are decoded, as a name for `bytes.decode`."""


ONE_PER_BYTE = "linnet-one-per-byte"
"""U+FFFD for every byte of an invalid sequence, as sentencepiece has it; Python's `replace` has one for several bytes."""


def _one_per_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(ONE_PER_BYTE, _one_per_byte)
