"""Shared context of the routes: the models, the limits, and submission to the engines."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from linnet.core.errors import invalid
from linnet.serve.http.errors import ApiError, draining
from linnet.serve.http.lifecycle import Lifecycle
from linnet.serve.http.limits import Limits
from linnet.serve.http.metrics import Metrics
from linnet.serve.http.model import PriorModel, Served, TokenModel, is_prior
from linnet.serve.http.results import MAX_MERGED, Bridge, ResultStream, merge
from linnet.serve.prior.request import Denoised, SampleEvent, SampleRequest
from linnet.serve.request import Event, Request

Kind = TypeVar("Kind", bound=Served)


@dataclasses.dataclass(kw_only=True)
class Service:
    all_models: Sequence[TokenModel | PriorModel]
    limits: Limits
    metrics: Metrics
    lifecycle: Lifecycle
    clock: Callable[[], float] = time.monotonic
    """The engine's clock."""
    models: Mapping[str, TokenModel] = dataclasses.field(init=False)
    """Token models by name."""
    priors: Mapping[str, PriorModel] = dataclasses.field(init=False)
    _bridge: tuple[asyncio.AbstractEventLoop, Bridge] | None = None

    def __post_init__(self) -> None:
        self.priors = {model.name: model for model in self.all_models if is_prior(model)}
        self.models = {model.name: model for model in self.all_models if not is_prior(model)}

    def model(self, name: str | None) -> TokenModel:
        needs, fix = "a token model (this is a prior: it generates embeddings)", "use POST /v1/priors/sample"
        return self._select(self.models, self.priors, name, needs, fix)

    def prior(self, name: str | None) -> PriorModel:
        needs, fix = "a prior (this is a token model)", "use /v1/completions, or name a model whose family is prior"
        return self._select(self.priors, self.models, name, needs, fix)

    def any_model(self, name: str) -> TokenModel | PriorModel:
        for model in self.all_models:
            if model.name == name:
                return model
        names = ", ".join(model.name for model in self.all_models)
        message = f"there is no model {name[:200]!r}. Fix: use one of {names}."
        raise ApiError(404, message, param="model", code="model_not_found")

    def _select(
        self, mine: Mapping[str, Kind], others: Mapping[str, Served], name: str | None, needs: str, fix: str
    ) -> Kind:
        """Return the model of that name; without a name, the first of its kind."""
        if name is None and mine:
            return next(iter(mine.values()))
        name = next(iter(others)) if name is None else name
        if name in mine:
            return mine[name]
        self.any_model(name)
        raise invalid("model", name, needs, fix)

    @property
    def max_state_bytes(self) -> int:
        """Maximum size of a serialized state: twice a slot's state, because its layout may differ."""
        return 2 * max((model.state_bytes for model in self.models.values()), default=0)

    async def submit(self, model: TokenModel, requests: Sequence[Request]) -> ResultStream[Request, Event]:
        """Submit the requests of a call. The caller must close the returned stream."""
        results = ResultStream(
            model,
            requests,
            self._loop_bridge(),
            make_observer=lambda: self.metrics.observe_tokens(model.name).observe,
            merge=partial(merge, max_tokens=MAX_MERGED),
            is_slow=lambda request: request.sampling.constraint is not None,  # submitting it compiles the grammar
        )
        await self._begin(results)
        return results

    async def submit_samples(
        self, model: PriorModel, requests: Sequence[SampleRequest]
    ) -> ResultStream[SampleRequest, SampleEvent]:
        """Submit the requests of a call. The caller must close the returned stream."""
        results = ResultStream(
            model,
            requests,
            self._loop_bridge(),
            make_observer=lambda: self.metrics.observe_sample(model.name).observe,
            merge=_latest,
        )
        await self._begin(results)
        return results

    async def _begin(self, results: ResultStream[Any, Any]) -> None:
        if self.lifecycle.is_draining:
            raise draining()
        await results.submit()
        self.lifecycle.responses.add(results)

    def _loop_bridge(self) -> Bridge:
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge[0] is not loop:
            self._bridge = (loop, Bridge())
        return self._bridge[1]


def _latest(events: Sequence[SampleEvent]) -> list[SampleEvent]:
    """Keep only the latest progress event."""
    progress = [i for i, one in enumerate(events) if isinstance(one, Denoised)]
    return [one for i, one in enumerate(events) if not isinstance(one, Denoised) or i == progress[-1]]
