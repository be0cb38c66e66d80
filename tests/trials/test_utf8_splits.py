"""Text told in pieces: wherever a stream is cut, the pieces join to the whole and no piece holds half a character."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_requests import PendingRequest, request, running_engine
from tokenizer_files import corpus

from linnet.data.prepare.train_tokenizer import train_sentencepiece
from linnet.models.detokenize import TextAssembler
from linnet.serve.request import Constraint, TokensEvent
from linnet.tokenizers.base import BytesTokenizer, Tokenizer
from linnet.tokenizers.load import open_tokenizer

JOINER, SELECTOR, KEYCAP = "\u200d", "\ufe0f", "\u20e3"
PEOPLE, TONES = "👩👨🧑👧👦👶", ["", *map(chr, range(0x1F3FB, 0x1F400))]
MARKS = "".join(map(chr, (*range(0x300, 0x370), *range(0x1AB0, 0x1ABF), *range(0x20D0, 0x20DD))))
RANGES = [
    (0x1F300, 0x1F5FF),
    (0x1F600, 0x1F64F),
    (0x1F900, 0x1F9FF),
    (0x4E00, 0x9FFF),
    (0x3041, 0x3096),
    (0xAC00, 0xD7A3),
    (0x20000, 0x2A6DF),
]
BROKEN = [
    b"\xff",
    b"\x80",
    b"\xc3",
    b"\xe6\xbc",
    b"\xf0\x9f\x90",
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xf0\x80",
]
BROKEN_SIGN = "\ufffd"
KINDS = ["bytes", "fallback"]


def character(draw: random.Random) -> str:
    """What a reader takes for one, of one letter or of many."""
    kind = draw.randrange(6)
    if kind == 0:  # a family, joined
        return JOINER.join(draw.choice(PEOPLE) + draw.choice(TONES) for _ in range(draw.randint(2, 4)))
    if kind == 1:  # a flag
        return "".join(chr(0x1F1E6 + draw.randrange(26)) for _ in range(2))
    if kind == 2:
        return draw.choice("0123456789#*") + SELECTOR + KEYCAP
    if kind == 3:  # a letter under a heap of marks
        return draw.choice("aeокकก") + "".join(draw.choices(MARKS, k=draw.randint(1, 4)))
    if kind == 4:
        return draw.choice([" ", "the", "cat", "\n", "\x00", "ß", BROKEN_SIGN])
    return chr(draw.randint(*draw.choice(RANGES)))


def texts(n: int) -> list[bytes]:
    """Half of them whole, half with bytes that are no character."""
    draw, found = random.Random(20), []
    for i in range(n):
        parts = [character(draw).encode() for _ in range(draw.randint(1, 8))]
        if i % 2:
            for _ in range(draw.randint(1, 3)):
                parts.insert(draw.randint(0, len(parts)), draw.choice(BROKEN))
        found.append(b"".join(parts))
    return found


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("fallback")
    (folder / "text.txt").write_text(corpus())
    trained = train_sentencepiece([str(folder / "text.txt")], vocab_size=340, model="bpe", sample_bytes=10**6)
    (folder / "fallback.model").write_bytes(trained)
    return {"bytes": BytesTokenizer(), "fallback": open_tokenizer(str(folder / "fallback.model"))}


def reported(tokenizer: Tokenizer, ids: Sequence[int], splits: Sequence[int]) -> list[str]:
    """The pieces, one for each stretch of ids between two cuts, and the rest."""
    text = TextAssembler(tokenizer.text_rules)
    pieces = []
    for place, token in enumerate(ids):
        if place in splits:
            pieces.append(text.take()[0])
        text.feed(token)
    return [*pieces, text.take()[0], text.close()]


def complete_part(data: bytes) -> str:
    """All of it but a character that is begun at its end and not refuted: the most that may be told of it."""
    for n in range(min(3, len(data)), 0, -1):
        begun = data[-n:]
        if any(is_character(begun + rest) for rest in REST[n]):
            return data[:-n].decode(errors="replace")
    return data.decode(errors="replace")


REST = {
    n: [bytes([a, *[0x80] * (k - 1)]) for k in range(1, 5 - n) for a in (0x80, 0x90, 0xA0, 0xBF)] for n in range(1, 4)
}
"""For a beginning of n bytes: what may make it whole, if anything may."""


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("n", [30, pytest.param(1000, marks=pytest.mark.trial)], ids=["quick", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_join_at_every_split(tokenizers: dict[str, Tokenizer], kind: str, n: int) -> None:
    tokenizer = tokenizers[kind]
    draw, n_splits = random.Random(21), 0
    for data in texts(n):
        ids = tokenizer.encode(data).tolist()
        parts = [tokenizer.id_bytes(token) for token in ids]
        assert b"".join(parts) == data
        text = data.decode(errors="replace")
        for cut in range(len(ids) + 1):
            first, *rest = reported(tokenizer, ids, [cut])
            assert "".join((first, *rest)) == text
            most = complete_part(b"".join(parts[:cut]))
            # Python's decoder waits for the third byte of what can only be a broken sign; it never waits longer.
            assert first == most or (most.startswith(first) and most[len(first) :] == 2 * BROKEN_SIGN), (data, cut)
            n_splits += 1
        for splits in (range(len(ids)), draw.choices(range(len(ids)), k=4)):
            pieces = reported(tokenizer, ids, splits)
            assert "".join(pieces) == text
            assert sum(piece.count(BROKEN_SIGN) for piece in pieces) == text.count(BROKEN_SIGN)
    assert n_splits > 10 * n


@pytest.mark.parametrize("n", [6, pytest.param(200, marks=pytest.mark.trial)], ids=["quick", "full"])
def test_engine_sends_complete_characters(n: int) -> None:
    """Made to write a text, byte after byte: what each event carries is text of whole characters."""
    with running_engine(n_slots=3) as engine:
        for text in [data.decode() for data in texts(2 * n)[::2]]:
            said = Constraint(kind="lark", grammar=f"start: {json.dumps(text, ensure_ascii=False)}")
            asked = PendingRequest(engine, request("x", constraint=said, max_tokens=4096, ignore_eos=False))
            pieces: list[str] = []
            for event in iter(lambda asked=asked: asked.events.get(timeout=60), None):
                if isinstance(event, TokensEvent):
                    pieces.append(event.text)
                elif pieces:
                    break
            assert "".join(pieces) == text
            assert sum(map(len, filter(None, pieces))) == len(text)
            assert len(pieces) >= len(text.encode())
