"""Seeded mutations of files, for the fuzz tests of readers."""

from __future__ import annotations

import random
from collections.abc import Sequence

BOUNDARY_VALUES = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
TOKENS = (
    b"(",
    b")",
    b"{",
    b"}",
    b"[",
    b'"',
    b"'",
    b"\\",
    b"\n",
    b"\0",
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b"[" * 2000,
    b'{"a":' * 2000,
    b"(" * 300,
    b"9" * 30,
    b"9" * 5000,
    b"|O",
    b"<f8",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"../../x",
    b"1_000",
    b"0x",
)
HEAD_BYTES = 256


def mutate(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """One to four random edits. Half of them fall into the first bytes, where most formats keep their header."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        _edit(changed, others, draw)
    return bytes(changed)


def _edit(data: bytearray, others: Sequence[bytes], draw: random.Random) -> None:
    size = len(data)
    reach = min(size, HEAD_BYTES) if draw.random() < 0.5 else size
    at = draw.randrange(reach + 1)
    kind = draw.randrange(10)
    if kind == 0:
        del data[at:]
    elif kind == 1 and at < size:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 2 and at < size:
        data[at] = draw.randrange(256)
    elif kind == 3:
        width, order = draw.choice((1, 2, 4, 8)), draw.choice(("little", "big"))
        value = draw.choice(BOUNDARY_VALUES) % (1 << 8 * width)
        data[at : at + width] = value.to_bytes(width, order)  # pyright: ignore[reportArgumentType]
    elif kind == 4:
        del data[at : at + draw.randint(1, 64)]
    elif kind == 5:
        data[at:at] = draw.randbytes(draw.randint(1, 64))
    elif kind == 6:
        start = draw.randrange(size + 1)
        data[at:at] = data[start : start + draw.randint(1, 512)]
    elif kind == 7:
        data[at:at] = draw.choice(TOKENS)
    elif kind == 8:
        token = draw.choice(TOKENS)
        data[at : at + len(token)] = token
    else:
        other = draw.choice(others)
        start = draw.randrange(len(other) + 1)
        data[at : at + draw.randint(0, 512)] = other[start : start + draw.randint(1, 512)]
