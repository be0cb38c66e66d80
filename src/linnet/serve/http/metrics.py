"""Prometheus metrics: latencies and token counts measured here, and the engine's own statistics, collected at each scrape."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from linnet.serve.http.model import Served
from linnet.serve.prior.request import Sampled, SampleEvent
from linnet.serve.request import Event, Finished, PrefillDone, TokensEvent

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
COUNTER_SUFFIXES = ("_total", "_hits", "_misses")
"""Suffixes of engine statistics that are counters; the others are gauges."""
HELP = {
    "slots": "Slots",
    "waiting": "Requests in the queue",
    "reading": "Requests in prefill",
    "running": "Requests in slots",
    "parked": "Preempted requests",
    "tokens_total": "Tokens generated",
    "prefix_hits": "Prompts with a prefix in the prefix cache",
    "prefix_misses": "Prompts without a prefix in the prefix cache",
    "prefix_bytes": "Size of the prefix cache in bytes",
    "state_bytes": "Size of one conversation in its slot in bytes",
    "sessions": "Sessions",
    "session_bytes": "Size of all session states in bytes",
    "steps_total": "Denoising steps",
    "samples_total": "Embeddings sampled",
}
"""Descriptions of the engine statistics."""


class Metrics:
    def __init__(self, models: Sequence[Served]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(models))
        self._http = Counter(
            "linnet_http_requests", "HTTP requests by route and status", ["route", "status"], registry=self._registry
        )
        self._first = self._seconds("linnet_time_to_first_token_seconds", "Time from the request to the first token")
        self._between = self._seconds(
            "linnet_time_between_tokens_seconds", "Time per output token, averaged over tokens delivered together"
        )
        self._prompt = self._tokens("linnet_prompt_tokens", "Prompt tokens")
        self._cached = self._tokens("linnet_prompt_tokens_cached", "Prompt tokens found in the prefix cache")
        self._produced = self._tokens("linnet_completion_tokens", "Generated tokens")
        self._sample = self._seconds("linnet_sample_seconds", "Time from the request to a prior's embedding")
        self._ended = Counter(
            "linnet_ended", "Finished requests by reason", ["model", "reason"], registry=self._registry
        )

    def count_response(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def observe_tokens(self, model: str) -> TokenObserver:
        return TokenObserver(self, model)

    def observe_sample(self, model: str) -> SampleObserver:
        return SampleObserver(self, model)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _seconds(self, name: str, description: str) -> Histogram:
        return Histogram(name, description, ["model"], buckets=SECONDS, registry=self._registry)

    def _tokens(self, name: str, description: str) -> Counter:
        return Counter(name, description, ["model"], registry=self._registry)


class TokenObserver:
    """Records the metrics of one token request."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model, self._ended = model, metrics._ended
        self._first, self._between = metrics._first.labels(model), metrics._between.labels(model)
        self._prompt, self._cached = metrics._prompt.labels(model), metrics._cached.labels(model)
        self._produced = metrics._produced.labels(model)
        self._last, self._has_token = time.monotonic(), False

    def observe(self, event: Event) -> None:
        match event:
            case PrefillDone():
                self._prompt.inc(event.n_tokens)
                self._cached.inc(event.n_cached)
            case TokensEvent():
                self._tokens(len(event.tokens))
            case Finished():
                self._ended.labels(self._model, event.reason).inc()

    def _tokens(self, n: int) -> None:
        now = time.monotonic()
        if n and self._has_token:
            self._between.observe((now - self._last) / n)
        elif n:
            self._first.observe(now - self._last)
            self._has_token = True
        self._last = now if n else self._last
        self._produced.inc(n)


class SampleObserver:
    """Records the metrics of one prior request."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model, self._ended, self._sample = model, metrics._ended, metrics._sample.labels(model)
        self._start = time.monotonic()

    def observe(self, event: SampleEvent) -> None:
        if isinstance(event, Sampled):
            self._ended.labels(self._model, event.reason).inc()
            if event.embedding is not None:
                self._sample.observe(time.monotonic() - self._start)


class _EngineCollector(Collector):
    def __init__(self, models: Sequence[Served]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model in self._models:
            for name, value in {**model.stats(), "state_bytes": model.state_bytes}.items():
                family = families.get(name)
                if family is None:
                    kind = CounterMetricFamily if name.endswith(COUNTER_SUFFIXES) else GaugeMetricFamily
                    family = families[name] = kind(f"linnet_engine_{name}", HELP[name], labels=["model"])
                assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
                family.add_metric([model.name], value)
        return families.values()
