"""A tiny engine, requests to it, and the plain generator that says what each answer must be."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
from collections.abc import Iterator
from typing import Any

import pytest
import tiny

from linnet.core import params as weights
from linnet.core import rng
from linnet.core.errors import UserError
from linnet.models import registry
from linnet.models.base import TokenFamily
from linnet.models.generate import generate
from linnet.nn.sampling import sampling_settings
from linnet.serve import state as states
from linnet.serve.engine import Engine, EngineConfig
from linnet.serve.request import Event, Finished, PrefillDone, Request, Sampling, TokensEvent
from linnet.serve.state import State
from linnet.tokenizers.base import BytesTokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    family: TokenFamily
    cfg: Any
    params: Any
    buffers: Any


def model(family: str, cfg: Any) -> Model:
    """With weights of its own seed: what it says means nothing, and is the same every time."""
    found = registry.tokens(family)
    buffers = weights.init(found.buffer_specs(cfg), rng.root(4))
    return Model(found, cfg, weights.init(found.param_specs(cfg), rng.root(3)), buffers)


VQ = model("vq", tiny.MODEL)
MOE = model("moe", dataclasses.replace(tiny.MOE, context=640))
VQ_MOE = model("vq", dataclasses.replace(tiny.MODEL, n_expert=4, n_choice=2))
MODELS = {"vq": VQ, "moe": MOE, "vq-moe": VQ_MOE}
CFG, FAMILY, PARAMS, BUFFERS = VQ.cfg, VQ.family, VQ.params, VQ.buffers


@dataclasses.dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    text: str
    end: Finished
    read: PrefillDone | None
    top: list[Any]


class PendingRequest:
    """A request on its way; `answer` waits for its end."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.engine, self.request = engine, request
        engine.submit(request, self.events.put)

    def answer(self, timeout: float = 300) -> Answer:
        answer = Answer([], [], "", None, None, [])  # pyright: ignore[reportArgumentType]
        while True:
            event = self.events.get(timeout=timeout)
            if isinstance(event, PrefillDone):
                answer.read = event
            elif isinstance(event, TokensEvent):
                answer.tokens += [choice.token for choice in event.tokens]
                answer.logprobs += [choice.logprob for choice in event.tokens]
                answer.text += event.text
                answer.top += event.top
            else:
                answer.end = event
                assert self.events.empty(), "an event after the last"
                return answer


def make(model: Model = VQ, **changes: Any) -> Engine:
    config = EngineConfig(**{"n_slots": 3, "max_waiting": 100, "prefix_bytes": 1 << 24, **changes})
    return Engine(model.family, model.cfg, model.params, model.buffers, BytesTokenizer(), config).start()


@contextlib.contextmanager
def running_engine(model: Model = VQ, **changes: Any) -> Iterator[Engine]:
    engine = make(model, **changes)
    try:
        yield engine
    finally:
        engine.stop(within=5)


counter = iter(range(10**9))


def request(prompt: str | bytes = "", **changes: Any) -> Request:
    own = {name: changes.pop(name) for name in list(changes) if name in Request.__dataclass_fields__}
    data = prompt.encode() if isinstance(prompt, str) else prompt
    sampling = Sampling(**{"max_tokens": 12, "ignore_eos": True, **changes})
    return Request(id=f"r{next(counter)}", prompt=tuple(b + 3 for b in data), sampling=sampling, **own)


def ask(engine: Engine, prompt: str | bytes = "", **changes: Any) -> Answer:
    return PendingRequest(engine, request(prompt, **changes)).answer()


def assert_altered_is_rejected(engine: Engine, state: State) -> None:
    """A state's file with one bit changed, cut short, or of another model is rejected."""
    saved, like = states.to_bytes(state), engine.backend.abstract_state
    for at in (4, 100, len(saved) // 2, len(saved) - 1):
        altered = bytearray(saved)
        altered[at] ^= 1
        with pytest.raises(UserError):
            states.from_bytes(bytes(altered), like, engine.fingerprint)
    for n in (0, 7, 200, len(saved) - 1):
        with pytest.raises(UserError):
            states.from_bytes(saved[:n], like, engine.fingerprint)
    with pytest.raises(UserError, match="another model"):
        states.from_bytes(saved, like, "0" * 64)


def plain(requested: Request, model: Model = VQ) -> tuple[list[int], list[float]]:
    """The same by the plain generator, alone."""
    s = requested.sampling
    settings = sampling_settings(
        1,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        typical_p=s.typical_p,
        repetition_penalty=s.repetition_penalty,
    )
    pieces = generate(
        model.family.decoder,
        model.params,
        model.buffers,
        model.cfg,
        [list(requested.prompt)],
        max_tokens=s.max_tokens,
        settings=settings,
        seeds=[s.seed],
        ignore_end=s.ignore_eos,
    )
    found = [piece for (piece,) in pieces if piece is not None]
    return [t for piece in found for t in piece.tokens], [v for piece in found for v in piece.logprobs]
