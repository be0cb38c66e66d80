"""A slow trial: a million random byte strings through each tokenizer, and each comes back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tokenizer_files import EXACT, ODD, corpus, write_all

from linnet.tokenizers.base import Tokenizer
from linnet.tokenizers.load import open_tokenizer

N_STRINGS = 1_000_000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_all(tmp_path_factory.mktemp("tokenizers"))


def random_strings(n: int, seed: int) -> Iterator[bytes]:
    """In turn: any bytes; any characters; a stretch of text with one byte changed, odd bytes among it."""
    draw = np.random.default_rng(seed)
    text = np.frombuffer(corpus().encode() + b"".join(ODD[:10]), np.uint8)
    lengths = draw.integers(0, 25, n)
    for i, length in enumerate(lengths.tolist()):
        if i % 3 == 0:
            yield draw.bytes(length)
        elif i % 3 == 1:
            # UTF-32 of any planes; surrogates have no UTF-8, so they are passed over.
            points = draw.integers(0, (0x80, 0x3000, 0x110000)[i // 3 % 3], length)
            yield "".join(chr(p) for p in points.tolist() if not 0xD800 <= p < 0xE000).encode()
        else:
            begin = int(draw.integers(len(text) - 2000 if i % 2 else 0, len(text) - 25))
            stretch = bytearray(text[begin : begin + length + 1].tobytes())
            stretch[int(draw.integers(len(stretch)))] = int(draw.integers(256))
            yield bytes(stretch)


def check(tokenizer: Tokenizer, strings: Iterator[bytes]) -> int:
    n = 0
    for n, data in enumerate(strings, start=1):  # noqa: B007
        ids = tokenizer.encode(data)
        assert tokenizer.decode(ids) == data, f"{data!r} became {tokenizer.pieces(ids)}"
        assert tokenizer.eos_id not in ids
    return n


@pytest.mark.trial
@pytest.mark.parametrize("name", EXACT)
def test_million_byte_strings_come_back(files: dict[str, str], name: str) -> None:
    assert check(open_tokenizer(files[name]), random_strings(N_STRINGS, seed=EXACT.index(name))) == N_STRINGS
