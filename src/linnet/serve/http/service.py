"""What all routes share: the models, the limits, the way to the engine, and which sessions are in use."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from linnet.serve.http.answers import Answers, Bridge
from linnet.serve.http.lifecycle import Lifecycle
from linnet.serve.http.limits import Limits
from linnet.serve.http.metrics import Metrics
from linnet.serve.http.model import Model
from linnet.serve.http.problem import ApiError, draining
from linnet.serve.request import Request


@dataclasses.dataclass(kw_only=True)
class Service:
    models: Mapping[str, Model]
    limits: Limits
    metrics: Metrics
    lifecycle: Lifecycle
    clock: Callable[[], float] = time.monotonic
    """The engine's."""
    _in_use: set[str] = dataclasses.field(default_factory=set)
    _bridge: tuple[asyncio.AbstractEventLoop, Bridge] | None = None

    def model(self, name: str | None) -> Model:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            message = f"there is no model {name[:200]!r}. Fix: use one of {', '.join(self.models)}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.models[name]

    @property
    def most_state_bytes(self) -> int:
        """Of a state as a file: what a slot holds, perhaps laid out otherwise."""
        return 2 * max(model.state_bytes for model in self.models.values())

    async def submit(self, model: Model, requests: Sequence[Request]) -> Answers:
        """The caller must close what it gets."""
        if self.lifecycle.is_draining:
            raise draining()
        answers = Answers(model, requests, self._bridge_here(), self.metrics)
        await answers.submit()
        self.lifecycle.answers.add(answers)
        return answers

    def hold(self, session: str) -> None:
        """One call at a time may go on from a session: two would leave it where neither ended."""
        self.must_be_free(session)
        self._in_use.add(session)

    def release(self, session: str) -> None:
        self._in_use.discard(session)

    def must_be_free(self, session: str) -> None:
        if session in self._in_use:
            message = f"session {session!r} is in use by another call. Fix: wait for its end, or fork the session."
            raise ApiError(409, message, param="session", code="session_in_use")

    def _bridge_here(self) -> Bridge:
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge[0] is not loop:
            self._bridge = (loop, Bridge())
        return self._bridge[1]
