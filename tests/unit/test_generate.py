"""Generation: same seed, same text, whatever the batch and the dispatch; ends where it should; whole characters only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from linnet import params as weights
from linnet.errors import UserError
from linnet.families.generate import Piece, TextStream, byte_ids, byte_of, generate
from linnet.families.vq import slots
from linnet.families.vq.config import VQConfig
from linnet.families.vq.params import buffer_specs, param_specs
from linnet.nn.sampling import sampling_settings

CFG = VQConfig(d_model=32, d_k=16, d_v=64, n_code=16, n_layer=1, block_len=16, mem_len=8)
KEY = jax.random.key(2)
PARAMS, BUFFERS = weights.init(param_specs(CFG), KEY), weights.init(buffer_specs(CFG), KEY)


def run(prompts: Sequence[Sequence[int]], seeds: Sequence[int], **kwargs: Any) -> list[list[Piece]]:
    options = {"max_tokens": 20, "settings": sampling_settings(len(prompts), top_p=0.95), "n_ticks": 8, **kwargs}
    rows: list[list[Piece]] = [[] for _ in prompts]
    for step in generate(slots, PARAMS, BUFFERS, CFG, prompts, seeds=seeds, **options):
        for row, piece in zip(rows, step, strict=True):
            if piece is not None:
                row.append(piece)
    return rows


def tokens(row: list[Piece]) -> list[int]:
    return [token for piece in row for token in piece.tokens]


def test_same_seed_same_text_whatever_the_batch_and_the_dispatch() -> None:
    prompts = [byte_ids("once"), [], byte_ids("a longer prompt than one block"), byte_ids("once"), byte_ids("x")]
    together = run(prompts, [1, 2, 3, 4, 5], ignore_end=True)
    assert all(len(tokens(row)) == 20 and row[-1].finish == "length" for row in together)
    assert tokens(together[0]) != tokens(together[3])  # same prompt, other seed
    for rows in ([0], [2], [3, 0], [4, 1, 2]):
        apart = run([prompts[i] for i in rows], [i + 1 for i in rows], ignore_end=True, n_ticks=5)
        for i, row in zip(rows, apart, strict=True):
            assert tokens(row) == tokens(together[i])
            assert [x for p in row for x in p.logprobs] == [x for p in together[i] for x in p.logprobs]
            assert "".join(p.text for p in row) == "".join(p.text for p in together[i])


def test_a_prompt_many_rows_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    admit = slots.admit
    monkeypatch.setattr(
        slots, "admit", lambda p, b, prompt, cfg: (read.append(list(prompt)), admit(p, b, prompt, cfg))[1]
    )
    run([byte_ids("ab"), byte_ids("ab"), [], byte_ids("ab")], [1, 2, 3, 4], max_tokens=1)
    assert read == [[1, *byte_ids("a")]]


class Script:
    """A decoder that writes what it is told, to try the endings."""

    def __init__(self, *rows: bytes | list[int]) -> None:
        self.rows = [byte_ids(row) if isinstance(row, bytes) else row for row in rows]

    def prepare(self, params: Any, buffers: Any, cfg: Any) -> Any:
        return None

    def init_slots(self, cfg: Any, n: int) -> Any:
        return 0

    def admit(self, params: Any, buffers: Any, prompt: Sequence[int], cfg: Any) -> Any:
        return None

    def insert(self, slots: Any, one: Any, i: int) -> Any:
        return slots

    def decode(
        self, prepared: Any, slots: Any, tokens: Any, settings: Any, keys: Any, seen: Any, *, cfg: Any, n_ticks: int
    ) -> Any:
        drawn = np.full((n_ticks, tokens.shape[0]), 2, np.int32)
        for i, row in enumerate(self.rows):
            part = row[slots : slots + n_ticks]
            drawn[: len(part), i] = part
        return slots + n_ticks, seen, jnp.asarray(drawn), jnp.zeros(drawn.shape), None


def scripted(
    *rows: bytes | list[int], n_ticks: int = 3, max_tokens: int = 40, **kwargs: Any
) -> list[tuple[str, Any, int]]:
    out = [["", None, 0] for _ in rows]
    for step in generate(
        Script(*rows),
        None,
        None,
        CFG,
        [[] for _ in rows],
        max_tokens=max_tokens,
        settings=sampling_settings(len(rows)),
        seeds=[0] * len(rows),
        n_ticks=n_ticks,
        **kwargs,
    ):
        for row, piece in zip(out, step, strict=True):
            assert (piece is None) == (row[1] is not None)
            if piece is not None:
                row[0] += piece.text
                row[1], row[2] = piece.finish, row[2] + len(piece.tokens)
    return [tuple(row) for row in out]  # pyright: ignore


def test_endings() -> None:
    end = [*byte_ids("done"), 1, *byte_ids("more")]
    assert scripted(end) == [("done", "end", 5)]
    assert scripted(end, ignore_end=True, max_tokens=9) == [("donemore", "length", 9)]
    assert scripted(b"abcdefgh", max_tokens=4) == [("abcd", "length", 4)]
    assert scripted(b"one, two", stop=[", t"], max_tokens=30) == [("one", "stop", 6)]
    assert scripted(b"ababac..", stop=["abac"], n_ticks=1) == [("ab", "stop", 6)]
    assert scripted(b"abab", stop=["ababX"], max_tokens=4) == [("abab", "length", 4)]
    # One row's end is no other's.
    assert scripted(end, b"abcdefgh" * 4, max_tokens=20) == [
        ("done", "end", 5),
        ("abcdefgh" * 2 + "abcd", "length", 20),
    ]


def test_special_ids_print_nothing_and_broken_characters_are_marked() -> None:
    assert scripted([0, 2, *byte_ids("a"), 2], max_tokens=4) == [("a", "length", 4)]
    assert scripted("né".encode()[:2], max_tokens=2) == [("n\ufffd", "length", 2)]


@given_settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=30),
    st.lists(st.text(min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(1, 5), max_size=40),
)
def test_text_comes_whole_however_it_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    data, stream, out = text.encode(), TextStream(stops), []
    while data and not stream.stopped:
        n = cuts.pop() if cuts else 2
        out.append(stream.feed(data[:n]))
        data = data[n:]
        "".join(out).encode()  # no half of a character: those do not encode
    out.append(stream.close())
    first = min((text.find(s) for s in stops if s in text), default=len(text))
    assert "\ufffd" not in "".join(out) or "\ufffd" in text
    assert "".join(out) == text[:first]


def test_bytes_and_ids() -> None:
    assert b"".join(map(byte_of, byte_ids("né"))) == "né".encode()
    assert [byte_of(i) for i in (0, 1, 2, 3)] == [b"", b"", b"", b"\0"]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": [[259]]}, "prompt token"),
        ({"seeds": [1, 2]}, "seeds"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"n_ticks": 0}, "n_ticks"),
        ({"settings": sampling_settings(2)}, "settings"),
    ],
)
def test_mistakes_are_refused_before_any_work(bad: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"prompts": [[]], "seeds": [1], "max_tokens": 1, "settings": sampling_settings(1), **bad}
    with pytest.raises(UserError, match=named):
        generate(slots, None, None, CFG, options.pop("prompts"), **options)
