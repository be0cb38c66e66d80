"""A request's text: whatever the bytes, the cuts and the stop strings, it is the whole decode cut at the first stop string."""

from __future__ import annotations

import codecs
import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from linnet.core.special_tokens import TextRules
from linnet.models.detokenize import TextAssembler
from linnet.tokenizers.base import BytesTokenizer

EMOJI_AND_CJK = ["🐈", "👩‍👩‍👧", "🇩🇪", "漢字かな", "é́", "a🐈b漢", "한글 ok", "𠮷野家"]

pieces = st.lists(st.one_of(st.binary(max_size=5), st.text("aб🐈漢 ", max_size=3).map(str.encode)), max_size=12)
stops = st.lists(st.text("aб🐈漢 b", min_size=1, max_size=4), max_size=3)


def assembled(tokens: Sequence[bytes], stop: Sequence[str], min_tokens: int = 0) -> TextAssembler:
    return TextAssembler(TextRules(id_bytes=lambda i: tokens[i]), stop, min_tokens=min_tokens)


def run(
    tokens: Sequence[bytes], stop: Sequence[str] = (), min_tokens: int = 0
) -> tuple[list[str], list[int], str | None]:
    """The text after each token and at the end, the offsets, and what stopped it."""
    assembler = assembled(tokens, stop, min_tokens)
    parts, offsets = [], []
    for i in range(len(tokens)):
        assembler.feed(i)
        text, places = assembler.take()
        assert len(places) == 1
        parts.append(text)
        offsets += places
        if assembler.stopped is not None:
            break
    return [*parts, assembler.close()], offsets, assembler.stopped


def obvious(tokens: Sequence[bytes], stop: Sequence[str], min_tokens: int = 0) -> tuple[str, str | None]:
    """The shortest beginning that ends with a stop string, without it; the longest one, if several end there."""
    data = b"".join(tokens)
    token_of = [number for number, token in enumerate(tokens, 1) for _ in token]
    for n in range(1, len(data) + 1):
        ending = [s for s in stop if data[:n].endswith(s.encode())]
        if ending and token_of[n - 1] >= min_tokens:
            longest = max(ending, key=lambda s: len(s.encode()))
            return data[: n - len(longest.encode())].decode(errors="replace"), longest
    return data.decode(errors="replace"), None


@given(pieces, stops, st.integers(0, 6))
@example([b"ab", b"cd"], ["abcd", "bc"], 0)
@example([b"ab", b"", b"cabc"], ["abc"], 3)
@example([b"\xf0\x9f", b"ab"], ["a"], 0)
@example([b"aab", b"aab"], ["aabaaa", "abaab"], 2)
@example([b"aba", b"ba"], ["aba"], 2)
@example([b"xab"], ["b", "ab"], 0)
@example([b"aaa", b"b"], ["aab"], 0)
def test_text_is_the_full_decode_up_to_the_first_stop(tokens: list[bytes], stop: list[str], min_tokens: int) -> None:
    parts, _, stopped = run(tokens, stop, min_tokens)
    assert ("".join(parts), stopped) == obvious(tokens, stop, min_tokens)


@given(pieces, stops, st.randoms(use_true_random=False))
def test_splits_do_not_matter(tokens: list[bytes], stop: list[str], draw: random.Random) -> None:
    data = b"".join(tokens)
    splits = sorted(draw.choices(range(len(data) + 1), k=4))
    again = [data[a:b] for a, b in itertools.pairwise([0, *splits, len(data)])]
    one, two = run(tokens, stop), run(again, stop)
    assert ("".join(one[0]), one[2]) == ("".join(two[0]), two[2])


@given(pieces, stops)
def test_certain_text_is_not_delayed(tokens: list[bytes], stop: list[str]) -> None:
    """Held at any time: bytes that begin a stop string, and an unfinished character before them."""
    parts, offsets, stopped = run(tokens, stop)
    for n in range(1, len(offsets) + (stopped is None)):
        data = b"".join(tokens[:n])
        started = [
            data[len(data) - k :] for s in stop for k in range(1, len(s.encode())) if data.endswith(s.encode()[:k])
        ]
        certain = data.removesuffix(max(started, key=len, default=b""))
        assert "".join(parts[:n]) == codecs.getincrementaldecoder("utf-8")("replace").decode(certain)


@given(pieces)
@example([b"\xed", b"\xa0", b"a"])  # half a surrogate is two broken characters
@example([b"\xf0\x9f", b"\xe6", b"\xbc\xa2", b"", b"\x80"])
def test_offsets_point_at_the_character_of_the_first_byte(tokens: list[bytes]) -> None:
    parts, offsets, _ = run(tokens)
    text, before = "".join(parts), b""
    for token, offset in zip(tokens, offsets, strict=True):
        full = (before + token[:1]).decode(errors="replace")
        if token:  # the character of a byte is the last one, of all bytes up to it
            assert offset == len(full) - 1
            assert text[:offset] == full[:-1]
        else:
            assert offset in (len(full), len(full) - 1)
        before += token
    assert offsets == sorted(offsets)


def test_offsets_of_bytes() -> None:
    tokenizer = BytesTokenizer()
    assembler = TextAssembler(tokenizer.text_rules)
    for token in [*tokenizer.encode("a🐈b".encode()).tolist(), tokenizer.eos_id]:
        assembler.feed(token)
    assert assembler.take() == ("a🐈b", (0, 1, 1, 1, 1, 2, 3))
    assert assembler.take() == ("", ())
    assert assembler.close() == ""


@pytest.mark.parametrize("text", EMOJI_AND_CJK)
def test_no_half_character_at_any_split(text: str) -> None:
    data = text.encode()
    for a, b in itertools.combinations_with_replacement(range(len(data) + 1), 2):
        tokens = [data[:a], data[a:b], data[b:]]
        parts, _, _ = run(tokens)
        assert "".join(parts) == text
        assert parts[0] == data[:a].decode(errors="ignore")
        assert parts[-1] == ""


@pytest.mark.parametrize("text", EMOJI_AND_CJK)
def test_stop_string_is_found_at_any_split(text: str) -> None:
    data = f"x{text}y".encode()
    for a, b in itertools.combinations_with_replacement(range(len(data) + 1), 2):
        parts, _, stopped = run([data[:a], data[a:b], data[b:]], [text])
        assert ("".join(parts), stopped) == ("x", text)


def test_stop_string_counts_from_min_tokens_on() -> None:
    tokens = [b"STOP", b"ST", b"OP", b"STOP"]
    assert run(tokens, ["STOP"], 3)[0] == ["STOP", "", "", ""]  # begun earlier, complete at the third
    assert run(tokens, ["STOP"], 4)[0] == ["STOP", "", "STOP", "", ""]
    assert run(tokens, ["STOP"], 5)[2] is None


def test_close_returns_pending_text() -> None:
    assembler = assembled([b"certain ST", b"\xe6\xbc"], ["STOP"])
    assembler.feed(0)
    assert assembler.close() == "certain ST"
    assert assembler.close() == ""
    assert run([b"S", b"\xe6\xbc"], ["STOP"])[0] == ["", "S", "\ufffd"]


def test_nothing_may_follow_a_stop() -> None:
    assembler = assembled([b"ab"], ["a"])
    assembler.feed(0)
    with pytest.raises(AssertionError, match="after the text had ended"):
        assembler.feed(0)


def test_long_stop_strings_cost_little() -> None:
    """Sixteen of a kilobyte that the text nearly completes again and again: steps are counted, as no clock is fair here."""

    class Counted(bytes):
        n_reads = 0

        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            Counted.n_reads += 1
            return super().__getitem__(index)

    assembler = assembled([b"a" * 500 + b"c"], ["a" * 1000 + chr(98 + i) for i in range(16)])
    for stop in assembler._stops:
        stop.data = Counted(stop.data)
    for _ in range(6):
        assembler.feed(0)
    assert 0 < Counted.n_reads < 16 * 6 * 501 * 5
    assert assembler.take()[0] == (("a" * 500 + "c") * 6)
