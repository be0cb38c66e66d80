"""Special token ids of the byte and pixel vocabularies (three special ids, then the 256 byte values), and the detokenization
rules of any vocabulary."""

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
    """Detokenization rules of a vocabulary, shared by the streaming and the one-shot detokenizer."""

    id_bytes: Callable[[int], bytes]
    """Bytes of an id inside a text."""
    opening_bytes: Callable[[int], bytes] | None = None
    """Bytes of an id at the beginning of a text, if different: sentencepiece drops the space that it prepends when encoding."""
    drops_all: bool = False
    """Whether all leading spaces are dropped, instead of only the first."""
    errors: str = "replace"
    """Error handler for invalid UTF-8, as passed to `bytes.decode`."""


ONE_PER_BYTE = "linnet-one-per-byte"
"""Error handler that emits one U+FFFD per invalid byte, as sentencepiece does; Python's `replace` emits one for several bytes."""


def _one_per_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(ONE_PER_BYTE, _one_per_byte)
