"""What the engine's trials share: random settings, and a request's own engine to compare it with, bit for bit."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from engine_requests import VQ, Answer, Model, PendingRequest, make

from linnet.serve import state as states
from linnet.serve.request import Constraint, Request, Sampling

LONGEST = 2048
GRAMMARS = [
    Constraint(kind="regex", grammar="[a-z]{1,40}( [0-9]+)*"),
    Constraint(kind="json_schema", grammar='{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    Constraint(kind="lark", grammar='start: ("ab" | "c")+ "."'),
]


def length(draw: random.Random, most: int = LONGEST) -> int:
    """1 to `most`: short, middling and long ones alike, both ends and those of chunks among them."""
    if draw.random() < 0.1:
        return min(most, draw.choice([1, 2, 127, 128, 129, 255, 256, 257, 2047, 2048]))
    return round(most ** draw.random())


def sampling(draw: random.Random, *, max_tokens: int) -> Sampling:
    """Any of the settings a request may have, most of them off."""

    def sometimes(value: Any, off: Any) -> Any:
        return value if draw.random() < 0.25 else off

    ids = range(3, 259)
    return Sampling(
        seed=draw.randrange(2**32),
        max_tokens=max_tokens,
        min_tokens=sometimes(draw.randint(0, max_tokens), 0),
        temperature=draw.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.5]),
        top_p=sometimes(draw.uniform(0.05, 1.0), 1.0),
        top_k=sometimes(draw.randint(1, 60), 0),
        min_p=sometimes(draw.uniform(0.0, 0.5), 0.0),
        typical_p=sometimes(draw.uniform(0.1, 1.0), 1.0),
        repetition_penalty=sometimes(draw.uniform(0.5, 2.0), 1.0),
        presence_penalty=sometimes(draw.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(draw.uniform(-2, 2), 0.0),
        logit_bias=sometimes({draw.choice(ids): draw.uniform(-9, 9) for _ in range(5)}, {}),
        allowed=sometimes(frozenset(draw.sample(ids, 40)) | {1}, None),
        banned=sometimes(frozenset(draw.sample(ids, 20)), frozenset()),
        stop=sometimes((chr(draw.randint(97, 122)), "é"), ()),
        stop_ids=sometimes(frozenset(draw.sample(ids, 2)), frozenset()),
        ignore_eos=draw.random() < 0.5,
        top_logprobs=sometimes(draw.randint(1, 20), 0),
        constraint=draw.choice(GRAMMARS) if draw.random() < 0.06 else None,
    )


def result(answer: Answer) -> dict[str, Any]:
    """All that a request returned and that may not depend on others; floats compare bit for bit (none is NaN)."""
    end = answer.end
    return {
        "tokens": answer.tokens,
        "logprobs": answer.logprobs,
        "top": answer.top,
        "text": answer.text,
        "prompt": None if answer.read is None else (answer.read.n_tokens, answer.read.logprobs),
        "end": (end.reason, end.stopped_by, end.n_prompt, end.n_tokens, end.error),
        "state": None if end.state is None else states.to_bytes(end.state),
    }


def solo(requested: Request, *, n_slots: int, model: Model = VQ) -> Answer:
    """The same request on an engine of its own that never saw another, without a prefix cache."""
    engine = make(model, n_slots=n_slots, prefix_bytes=0)
    try:
        return PendingRequest(engine, dataclasses.replace(requested, priority=0, deadline=None)).answer(timeout=120)
    finally:
        engine.stop(within=5)
