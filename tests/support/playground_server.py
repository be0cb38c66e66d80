"""A server on a loopback port for the playground's tests: a model that sings one verse byte by byte, and one that draws."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

import uvicorn
from fake_model import FakeModel
from waiting import PATIENCE

from linnet.core.special_tokens import FIRST_BYTE
from linnet.models.detokenize import TextAssembler
from linnet.serve.http.app import make_app
from linnet.serve.http.model import PriorModel, TokenModel
from linnet.serve.request import Finished, FinishReason, PrefillDone, Request, TokenLogprob, TokensEvent

VERSE = "The linnet sings: über dem Tal, 春の鳥 🐦, and then is still.\n"
OTHERS = b"et7aoi1shrdlu"
"""Digits too: as names in an object JavaScript puts them first."""


N_GATED_TOKENS = 5
"""Tokens that the singing model sings while its gate is closed; a test that has seen them opens the gate, or stops it."""


class SingingModel(FakeModel):
    """Continues the verse from where the context ends, counted in tokens: a state that was lost or doubled shows at once."""

    state_bytes = 3 << 20

    def _events(self, request: Request) -> Iterator[PrefillDone | TokensEvent | Finished]:
        sampling, verse = request.sampling, VERSE.encode()
        n_before = (request.state or [0])[0] + len(request.prompt)
        text = TextAssembler(self.tokenizer.text_rules, sampling.stop)
        n, reason, error = 0, "length", None
        yield PrefillDone(n_tokens=len(request.prompt), n_cached=0, logprobs=None)
        while n < sampling.max_tokens and text.stopped is None:
            while n >= N_GATED_TOKENS and not self.gate.wait(0.005) and request.id not in self.cancelled:
                pass
            if request.id in self.cancelled:
                reason = "cancelled"
                break
            if n == 3 and b"BOOM" in self.tokenizer.decode(request.prompt):
                reason, error = "error", "the batch failed"
                break
            byte = verse[(n_before + n) % len(verse)]
            p = 0.35 + 0.6 * math.cos(1.7 * (n_before + n)) ** 2
            others = [other for other in OTHERS if other != byte]
            drawn = TokenLogprob(byte + FIRST_BYTE, math.log(p))
            top = [drawn] + [
                TokenLogprob(other + FIRST_BYTE, math.log((1 - p) / 2 ** (k + 1))) for k, other in enumerate(others)
            ]
            top = sorted(top, key=lambda choice: -choice.logprob)[: sampling.top_logprobs]
            text.feed(byte + FIRST_BYTE)
            n += 1
            output, offsets = text.take()
            yield TokensEvent(tokens=(drawn,), top=(tuple(top),), text=output, offsets=offsets)
        yield TokensEvent(tokens=(), top=(), text=text.close(), offsets=())
        ending: FinishReason = "stop" if text.stopped else reason
        yield Finished(
            reason=ending,
            stopped_by=text.stopped,
            n_prompt=len(request.prompt),
            n_tokens=n,
            state=[n_before + n] if request.return_state else None,
            error=error,
        )


class DrawingModel(FakeModel):
    """A slope of colours, from black to whatever 255 gives."""

    state_bytes = 1 << 20
    pace: threading.Semaphore | None = None
    """If set, each row after the first is drawn only when the reader has released this for the row before."""

    def _events(self, request: Request) -> Iterator[PrefillDone | TokensEvent | Finished]:
        assert self.shape is not None
        n_all = request.sampling.max_tokens
        yield PrefillDone(n_tokens=0, n_cached=0, logprobs=None)
        row = self.shape[1] * self.shape[2]
        for first in range(0, n_all, row):
            if first and self.pace is not None:
                assert self.pace.acquire(timeout=PATIENCE)
            ids = [FIRST_BYTE + 255 * (first + i) // n_all for i in range(row)]
            yield TokensEvent(tokens=tuple(TokenLogprob(id, -1.0) for id in ids), top=(), text="", offsets=())
        yield Finished(reason="length", stopped_by=None, n_prompt=0, n_tokens=n_all, state=None, error=None)


@contextlib.contextmanager
def serving(*models: TokenModel | PriorModel, keys: tuple[str, ...] = ()) -> Iterator[str]:
    """The address of a server with these models."""
    app = make_app(models, keys=keys)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
