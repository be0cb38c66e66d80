"""Generation: same seed, same text, whatever the batch and the dispatch; ends where it should; whole characters only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from linnet.config.schema import RunConfig
from linnet.core import params as weights
from linnet.core.errors import UserError
from linnet.core.special_tokens import FIRST_BYTE, N_BYTE_IDS, TextRules
from linnet.generate.samples import sample_images
from linnet.models.decoder import Decoder
from linnet.models.generate import Piece, byte_of, generate
from linnet.models.registry import tokens as tokens_family
from linnet.models.vq import slots
from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import buffer_specs, param_specs
from linnet.nn.sampling import sampling_settings
from linnet.serve.job import TokenJob
from linnet.serve.request import Event, Request, Sampling, TokensEvent
from linnet.tokenizers.base import BytesTokenizer

CFG = VQConfig(d_model=32, d_k=16, d_v=64, n_code=16, n_layer=1, block_len=16, mem_len=8)
KEY = jax.random.key(2)
PARAMS, BUFFERS = weights.init(param_specs(CFG), KEY), weights.init(buffer_specs(CFG), KEY)


def byte_ids(text: str | bytes) -> list[int]:
    return BytesTokenizer().encode(text.encode() if isinstance(text, str) else text).tolist()


def run(prompts: Sequence[Sequence[int]], seeds: Sequence[int], **kwargs: Any) -> list[list[Piece]]:
    options = {"max_tokens": 20, "settings": sampling_settings(len(prompts), top_p=0.95), "n_ticks": 8, **kwargs}
    rows: list[list[Piece]] = [[] for _ in prompts]
    for step in generate(slots.DECODER, PARAMS, BUFFERS, CFG, prompts, seeds=seeds, **options):
        for row, piece in zip(rows, step, strict=True):
            if piece is not None:
                row.append(piece)
    return rows


def tokens(row: list[Piece]) -> list[int]:
    return [token for piece in row for token in piece.tokens]


@pytest.mark.optimized
def test_same_seed_gives_the_same_text_for_any_batch_and_dispatch() -> None:
    prompts = [byte_ids("once"), [], byte_ids("a longer prompt than one block"), byte_ids("once"), byte_ids("x")]
    together = run(prompts, [1, 2, 3, 4, 5], ignore_end=True)
    assert all(len(tokens(row)) == 20 and row[-1].finish == "length" for row in together)
    assert tokens(together[0]) != tokens(together[3])  # same prompt, other seed
    for rows in ([2], [3, 0]):
        separate = run([prompts[i] for i in rows], [i + 1 for i in rows], ignore_end=True, n_ticks=5)
        for i, row in zip(rows, separate, strict=True):
            assert tokens(row) == tokens(together[i])
            assert [x for p in row for x in p.logprobs] == [x for p in together[i] for x in p.logprobs]
            assert "".join(p.text for p in row) == "".join(p.text for p in together[i])


def test_prompt_many_rows_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    admit = Decoder.prefill
    monkeypatch.setattr(
        Decoder,
        "prefill",
        lambda self, p, b, prompt, cfg: (read.append(list(prompt)), admit(self, p, b, prompt, cfg))[1],
    )
    run([byte_ids("ab"), byte_ids("ab"), [], byte_ids("ab")], [1, 2, 3, 4], max_tokens=1)
    assert read == [[1, *byte_ids("a")]]


class Script:
    """A decoder that writes what the test gives it, to try the endings."""

    def __init__(self, *rows: bytes | list[int]) -> None:
        self.rows = [byte_ids(row) if isinstance(row, bytes) else row for row in rows]

    def cast_weights(self, params: Any) -> Any:
        return params

    def prepare(self, params: Any, buffers: Any, cfg: Any) -> Any:
        return None

    def init_slots(self, cfg: Any, n: int) -> Any:
        return 0

    def prefill(self, params: Any, buffers: Any, prompt: Sequence[int], cfg: Any, state: Any = None, /) -> Any:
        return None

    def insert(self, slots: Any, one: Any, i: int) -> Any:
        return slots

    def decode(
        self,
        prepared: Any,
        slots: Any,
        tokens: Any,
        settings: Any,
        keys: Any,
        seen: Any,
        rules: Any = None,
        active: Any = None,
        n: Any = None,
        *,
        cfg: Any,
        n_ticks: int,
        n_top: int = 0,
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


def test_text_is_emitted_with_the_dispatch_that_determines_it() -> None:
    pieces = generate(
        Script(b"ab, c, d"),
        None,
        None,
        CFG,
        [[]],
        max_tokens=9,
        settings=sampling_settings(1),
        seeds=[0],
        stop=[", d"],
        n_ticks=3,
    )
    assert [piece.text for (piece,) in pieces if piece is not None] == ["ab", ", c", ""]


def test_special_ids_print_nothing_and_broken_characters_are_marked() -> None:
    assert scripted([0, 2, *byte_ids("a"), 2], max_tokens=4) == [("a", "length", 4)]
    assert scripted("né".encode()[:2], max_tokens=2) == [("n\ufffd", "length", 2)]


def reported(drawn: Sequence[int], id_bytes: Callable[[int], bytes], sampling: Sampling) -> tuple[str, Any, int]:
    """What the server tells of the same tokens."""
    events: list[Event] = []
    request = Request(id="r", prompt=(), sampling=sampling)
    rules = TextRules(id_bytes=id_bytes)
    job = TokenJob(
        request, events.append, end_id=CFG.end_id, bos_id=CFG.bos_id, context=None, text_rules=rules, matcher=None
    )
    n, reason, _ = job.take(drawn, [0.0] * len(drawn), None)
    return "".join(event.text for event in events if isinstance(event, TokensEvent)), reason, n


@given_settings(max_examples=60, deadline=None)
@given(
    st.text("aбc🐈", max_size=20),
    st.lists(st.text("aбc🐈", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(1, 5), max_size=40),
)
@example("acca", ["cca", "ac"], [4])  # complete first, though begun later or cut otherwise
@example("aacca", ["acca", "cc"], [5])
@example("aac", ["c", "ac"], [1, 2])  # complete together: the longest
@example("aбc", ["б"], [1, 1, 1, 1])
def test_text_is_complete_and_stops_as_on_the_server_for_any_split(
    text: str, stops: list[str], splits: list[int]
) -> None:
    data, pieces = text.encode(), [b""]
    while data:
        n = splits.pop() if splits else 2
        pieces.append(data[:n])
        data = data[n:]
    drawn = [FIRST_BYTE + i for i in range(len(pieces))]
    options = {"stop": tuple(stops), "max_tokens": len(pieces)}

    def id_bytes(token: int) -> bytes:
        return pieces[token - FIRST_BYTE]

    (row,) = scripted(drawn, text_rules=TextRules(id_bytes=id_bytes), **options)
    output, finish, n = row
    cut = min(((text.find(s) + len(s), -len(s)) for s in stops if s in text), default=(len(text), 0))
    assert output == text[: sum(cut)]
    assert finish == ("stop" if any(s in text for s in stops) else "length")
    assert (output, finish, n) == reported(drawn, id_bytes, Sampling(**options))


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
        ({"stop": ["a", "\udcff"]}, "stop"),
        ({"n_ticks": 0}, "n_ticks"),
        ({"settings": sampling_settings(2)}, "settings"),
    ],
)
def test_mistakes_are_rejected_before_any_work(bad: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"prompts": [[]], "seeds": [1], "max_tokens": 1, "settings": sampling_settings(1), **bad}
    with pytest.raises(UserError, match=named):
        generate(slots.DECODER, None, None, CFG, options.pop("prompts"), **options)


def test_only_allowed_ids_are_drawn_and_a_pixel_run_paints_no_special_ids() -> None:
    wide = sampling_settings(3, temperature=50.0)  # so hot that every id has its chance
    free = [
        token
        for row in run([[]] * 3, [1, 2, 3], settings=wide, max_tokens=400, ignore_end=True)
        for token in tokens(row)
    ]
    assert min(free) < FIRST_BYTE
    allowed = [5, 70, 100]
    rows = run([[]] * 3, [1, 2, 3], settings=wide, max_tokens=64, ignore_end=True, allowed=allowed)
    assert {token for row in rows for token in tokens(row)} == set(allowed)
    cfg, shape = RunConfig(model=CFG), (8, 16, 3)
    images = sample_images(tokens_family("vq"), cfg, PARAMS, BUFFERS, shape, [b"\x07" * 48] * 3, wide, [1, 2, 3])
    assert images.shape == (3, *shape)
    assert (images[:, 0] == 7).all()  # what was given stays
    bytes_only = run(
        [byte_ids(b"\x07" * 48)] * 3,
        [1, 2, 3],
        settings=wide,
        max_tokens=336,
        ignore_end=True,
        allowed=range(FIRST_BYTE, N_BYTE_IDS),
    )
    assert images[:, 1:].reshape(3, -1).tolist() == [
        [token - FIRST_BYTE for token in tokens(row)] for row in bytes_only
    ]
    assert min(min(tokens(row)) for row in bytes_only) >= FIRST_BYTE


def test_unrestricted_mask_changes_nothing() -> None:
    requested = {"max_tokens": 60, "settings": sampling_settings(2, repetition_penalty=1.3), "ignore_end": True}
    prompts = [byte_ids("abcabc"), byte_ids("x")]
    plain, same = run(prompts, [4, 5], **requested), run(prompts, [4, 5], **requested, allowed=range(CFG.n_vocab))
    assert [tokens(row) for row in plain] == [tokens(row) for row in same]
