"""A model without arithmetic for the HTTP tests: in a thread of its own it says its prompt again and again, at a given pace."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
from waiting import PATIENCE

from linnet.core.errors import UserError
from linnet.models.detokenize import TextAssembler
from linnet.serve.chat_template import PLAIN, Template
from linnet.serve.http.app import make_app
from linnet.serve.http.limits import Limits
from linnet.serve.http.model import PriorModel, SessionStore, TokenModel
from linnet.serve.request import (
    Draining,
    Finished,
    NoSession,
    OnEvent,
    PrefillDone,
    QueueFull,
    Request,
    SessionInUse,
    TokenLogprob,
    TokensEvent,
    TooLong,
)
from linnet.tokenizers.base import BytesTokenizer, Tokenizer


class FakeState(list[int]):
    """All ids of a conversation. As in a real state, the last one can be asked for."""

    @property
    def last(self) -> int:
        return self[-1]


@dataclasses.dataclass
class FakeSession:
    state: Any
    n_tokens: int


class FakeSessions:
    def __init__(self) -> None:
        self.all: dict[str, FakeSession] = {}
        self.held: set[str] = set()
        self.most = 1024
        self._names = (f"session-{i}" for i in itertools.count())

    def create(self) -> str:
        if len(self.all) >= self.most:
            raise UserError("there are as many sessions as may be")
        id = next(self._names)
        self.all[id] = FakeSession(None, 0)
        return id

    def get(self, id: str) -> FakeSession:
        if id not in self.all:
            raise NoSession(id)
        return self.all[id]

    def n_tokens(self, id: str) -> int:
        return self.get(id).n_tokens

    def acquire(self, id: str, call: str) -> None:
        self.get(id)
        if id in self.held:
            raise SessionInUse(id)
        self.held.add(id)

    def release(self, id: str) -> None:
        self.held.remove(id)

    def put(self, id: str, state: Any, n_tokens: int) -> None:
        self.get(id)
        self.all[id] = FakeSession(None if state is None else FakeState(state), n_tokens)

    def fork(self, id: str) -> str:
        fork = self.create()
        self.put(fork, self.get(id).state, self.get(id).n_tokens)
        return fork

    def save(self, id: str) -> bytes:
        return json.dumps(dataclasses.asdict(self.get(id))).encode()

    def restore(self, data: bytes) -> str:
        session, id = self.unpack(data), self.create()
        self.all[id] = session
        return id

    def pack(self, state: Any) -> bytes:
        return json.dumps({"state": state, "n_tokens": len(state)}).encode()

    def unpack(self, data: bytes) -> FakeSession:
        try:
            found = json.loads(data)
            return FakeSession(FakeState(found["state"]), found["n_tokens"])
        except (ValueError, TypeError, KeyError):
            raise UserError("the file is damaged") from None

    def delete(self, id: str) -> None:
        self.get(id)
        del self.all[id]


class FakeModel:
    """Token j is the (seed + j)-th of what it has read; its log-probability is -(seed + 1)."""

    created, fingerprint, state_bytes, family = 1_700_000_000, "fp_fake", 4096, "fake"

    def __init__(
        self,
        name: str = "fake",
        *,
        shape: tuple[int, int, int] | None = None,
        seconds_per_token: float = 0.0,
        most: int = 64,
        context: int | None = None,
        held: bool = False,
    ) -> None:
        self.template: Template = PLAIN
        self.context = context
        self.bos_id: int | None = 1
        self.name, self.shape, self.most, self.seconds_per_token = name, shape, most, seconds_per_token
        self.tokenizer: Tokenizer = BytesTokenizer()
        self.n_vocab = self.tokenizer.n_vocab
        self.store = FakeSessions()
        self.requests: list[Request] = []
        self.cancelled: set[str] = set()
        self.running: set[str] = set()
        self.n_tokens = 0
        self.is_draining = False
        self.gate = threading.Event()
        """A `held` model draws no second token before this is set, so that a test decides when its requests end."""
        if not held:
            self.gate.set()

    @property
    def sessions(self) -> SessionStore:
        return self.store

    def submit(self, request: Request, on_event: OnEvent) -> None:
        text = self.tokenizer.decode(request.prompt)
        if b"RAISE" in text:
            raise RuntimeError("a bug in the engine")
        if self.is_draining:
            raise Draining("draining")
        if len(self.running) >= self.most:
            raise QueueFull(len(self.running), 2.4)
        if request.sampling.constraint is not None and not request.sampling.constraint.grammar:
            raise UserError("the grammar is empty")
        if self.context is not None and len(request.prompt) > self.context and not request.truncate_prompt:
            raise TooLong(f"the prompt is longer than {self.context} tokens")
        self.requests.append(request)
        self.running.add(request.id)
        threading.Thread(target=self._run, args=(request, on_event), daemon=True).start()

    def cancel(self, id: str) -> None:
        self.cancelled.add(id)

    def stats(self) -> dict[str, float]:
        return {"running": len(self.running), "tokens_total": self.n_tokens, "prefix_hits": 3}

    def _run(self, request: Request, on_event: OnEvent) -> None:
        finished = None
        for event in self._events(request):
            if isinstance(event, Finished):
                finished = event
            else:
                on_event(event)
        assert finished is not None
        self.running.discard(request.id)
        on_event(finished)

    def _events(self, request: Request) -> Iterator[PrefillDone | TokensEvent | Finished]:
        sampling, prompt = request.sampling, list(request.prompt)
        n_truncated = 0 if self.context is None else max(0, len(prompt) - self.context)
        prompt = prompt[n_truncated:]
        logprobs = tuple(None if i == 0 else -0.5 for i in range(len(prompt))) if request.prompt_logprobs else None
        top = tuple(
            tuple(TokenLogprob(3 + k, -float("inf")) for k in range(sampling.top_logprobs))
            for _ in (prompt if request.prompt_logprobs and sampling.top_logprobs else ())
        )
        yield PrefillDone(
            n_tokens=len(prompt), n_cached=len(prompt) // 2, n_truncated=n_truncated, logprobs=logprobs, top=top
        )
        known = [*(request.state or []), *prompt] or [self.tokenizer.eos_id + 2]
        before = request.prompt if request.shows_prompt else ()
        text, drawn, reason, error = (
            TextAssembler(self.tokenizer.text_rules, sampling.stop, before=before),
            [],
            "length",
            None,
        )
        for j in range(sampling.max_tokens):
            time.sleep(self.seconds_per_token)
            while j and not self.gate.wait(0.005) and request.id not in self.cancelled and not _is_late(request):
                pass
            if request.id in self.cancelled:
                reason = "cancelled"
            elif _is_late(request):
                reason = "deadline"
            elif b"BOOM" in self.tokenizer.decode(prompt):
                reason, error = "error", "the batch failed"
            elif b"STUCK" in self.tokenizer.decode(prompt):
                reason, error = "stuck", "no token is left. Fix: another grammar."
            if reason != "length":
                break
            token = known[(sampling.seed + j) % len(known)]
            drawn.append(token)
            self.n_tokens += 1
            text.feed(token)
            output, offsets = text.take()
            choice = TokenLogprob(token, -float(sampling.seed + 1))
            top = (tuple(TokenLogprob(3 + k, -float("inf")) for k in range(sampling.top_logprobs)),)
            yield TokensEvent(tokens=(choice,), top=top if sampling.top_logprobs else (), text=output, offsets=offsets)
            if text.stopped is not None:
                reason = "stop"
                break
        rest = text.close()
        if rest:
            yield TokensEvent(tokens=(), top=(), text=rest, offsets=())
        yield Finished(
            reason=reason,
            stopped_by=None,
            n_prompt=len(prompt),
            n_tokens=len(drawn),
            state=FakeState([*(request.state or []), *prompt, *drawn]) if request.return_state else None,
            error=error,
        )


def _is_late(request: Request) -> bool:
    return request.deadline is not None and time.monotonic() > request.deadline


def ask(path: str, body: Any, model: TokenModel | None = None, **more: Any) -> httpx.Response:
    async def one(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body)

    return talk(one, model, **more)


def talk(
    what: Callable[[httpx.AsyncClient], Awaitable[Any]], *models: TokenModel | PriorModel | None, **more: Any
) -> Any:
    async def run() -> Any:
        given = [model for model in models if model is not None]
        app = make_app(given or [FakeModel()], **{"keys": (), "limits": Limits(), **more})
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with (
            asyncio.timeout(PATIENCE),  # httpx has none of its own without a socket
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            return await what(client)

    return asyncio.run(run())
