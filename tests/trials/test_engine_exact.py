"""Many requests at once are each what they are alone: tokens, log-probabilities, text and state, bit for bit. Nothing leaks."""

from __future__ import annotations

import random
import string
import threading
from collections.abc import Iterator, Sequence

import pytest
from engine_requests import MODELS, Answer, PendingRequest, running_engine
from engine_trials import length, result, sampling, solo

from linnet.serve.engine import Engine
from linnet.serve.request import Request, Sampling

pytestmark = pytest.mark.optimized

SEED = 4
SECRET_LETTERS = 24
PREFIX_BYTES = 1 << 18
"""Room for some of the beginnings: they come, are found, go, and come again."""


def answers(engine: Engine, requests: Sequence[Request], *, at_once: int) -> list[Answer]:
    """Never more than so many on their way."""
    found: dict[str, Answer] = {}
    todo = iter(requests)
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                one = next(todo, None)
            if one is None:
                return
            found[one.id] = PendingRequest(engine, one).answer(timeout=300)

    threads = [threading.Thread(target=client) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[one.id] for one in requests]


def mixed(n: int, longest: int) -> Iterator[Request]:
    """Some of 256 tokens and more do not fit a context together with their answers, which then end where it does."""
    draw = random.Random(SEED)
    for i in range(n):
        yield Request(
            id=f"mixed-{i}",
            prompt=tuple(draw.randrange(259) for _ in range(length(draw, longest))),
            sampling=sampling(draw, max_tokens=length(draw, longest)),
            priority=draw.choice([0, 0, 0, 1, 2]),
            return_state=draw.random() < 0.2,
            prompt_logprobs=draw.random() < 0.1,
            use_prefix_cache=draw.random() < 0.8,
        )


@pytest.mark.trial  # fewer: tests/serve/test_engine.py and test_engine_moe.py
@pytest.mark.parametrize(
    ("family", "n", "at_once", "longest", "n_slots", "solo_slots"),
    [("moe", 24, 16, 400, 3, 3), ("vq-moe", 24, 16, 256, 3, 3), ("vq", 500, 64, 2048, 8, 1)],
    ids=["moe", "vq-moe", "vq"],
)
def test_each_of_many_is_what_it_is_alone(
    family: str, n: int, at_once: int, longest: int, n_slots: int, solo_slots: int
) -> None:
    requests, model = list(mixed(n, longest)), MODELS[family]
    with running_engine(model, n_slots=n_slots) as engine:
        found = answers(engine, requests, at_once=at_once)
    for one, answer in zip(requests, found, strict=True):
        assert result(answer) == result(solo(one, n_slots=solo_slots, model=model)), one.id
    assert {answer.end.reason for answer in found} >= {"length", "stop"}


def with_secrets(n: int, context: int | None) -> Iterator[tuple[str, Request]]:
    """Beginnings that many share, of lengths that end in, at and after a chunk's end; then a secret; then some words.

    A third have the secret first and what is shared after it: a beginning found by less than all of it would be another's. A third
    may write nothing but the letters of their secret: rules left behind in a slot would show in the next one's text."""
    draw = random.Random(SEED + 1)
    shared = ["".join(draw.choices(string.ascii_lowercase, k=k)) for k in (0, 40, 127, 128, 200, 255, 256, 511, 640)]
    if context is not None:
        shared = [text for text in shared if len(text) + 250 < context]
        shared += ["".join(draw.choices(string.ascii_lowercase, k=k)) for k in (255, 256, 300)]
    for i in range(n):
        secret = "".join(draw.choices(string.ascii_uppercase, k=SECRET_LETTERS))
        parts = [draw.choice(shared), secret] if i % 3 else [secret, draw.choice(shared)]
        text = "".join([*parts, " tell me" * draw.choice([0, 1, 20])])
        own = frozenset(ord(letter) + 3 for letter in secret) if i % 3 == 1 else None
        yield (
            secret,
            Request(
                id=f"secret-{i}",
                prompt=tuple(byte + 3 for byte in text.encode()),
                # The same seed for all: what differs between answers comes from the prompts alone.
                sampling=Sampling(max_tokens=draw.randint(8, 40), ignore_eos=True, allowed=own, seed=7),
                return_state=True,
            ),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "n", "at_once", "n_slots", "solo_slots"),
    [
        ("vq", 48, 24, 3, 3),
        pytest.param("moe", 36, 24, 3, 3, marks=pytest.mark.trial),
        pytest.param("vq-moe", 48, 24, 3, 3, marks=pytest.mark.trial),
        pytest.param("vq", 1000, 64, 8, 1, marks=pytest.mark.trial),
    ],
    ids=["quick", "moe", "vq-moe", "full"],
)
def test_no_secret_reaches_another(family: str, n: int, at_once: int, n_slots: int, solo_slots: int) -> None:
    """A tiny model repeats no words, but its state and its log-probabilities change with any token that it read: compared bit for
    bit with those of a solo run they show any trace of another's. That they do change is checked too."""
    model = MODELS[family]
    secrets, requests = zip(*with_secrets(n, model.cfg.context), strict=True)
    with running_engine(model, n_slots=n_slots, prefix_bytes=PREFIX_BYTES) as engine:
        found = answers(engine, requests, at_once=at_once)
        assert engine.stats()["prefix_hits"] > n // 10
    marks = set()
    for i, (one, answer) in enumerate(zip(requests, found, strict=True)):
        reported, alone = result(answer), result(solo(one, n_slots=solo_slots, model=model))
        assert reported == alone, one.id
        marks.add(reported["state"])
        assert not any(other in answer.text for k, other in enumerate(secrets) if k != i)
        if one.sampling.allowed is not None:
            assert set(answer.text) <= set(secrets[i])
    assert len(marks) == n, "two secrets left the same state: a leak could not be seen"


def test_other_secret_would_be_found() -> None:
    """One letter of a secret, 600 letters before the end, changes what is compared above."""
    text = bytearray(b"x" * 100 + b"SECRET" + b"y" * 600)
    kinds = []
    for letter in b"AB":
        text[103] = letter
        one = Request(
            id="one",
            prompt=tuple(byte + 3 for byte in text),
            sampling=Sampling(max_tokens=8, ignore_eos=True, seed=7),
            return_state=True,
        )
        kinds.append(result(solo(one, n_slots=3)))
    assert kinds[0]["state"] != kinds[1]["state"]
    assert kinds[0]["logprobs"] != kinds[1]["logprobs"]
