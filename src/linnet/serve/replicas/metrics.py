"""Merges the replicas' /metrics. Each sample gets a `replica` label, so that a sum over the label is the server's total."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from linnet.serve.replicas.fleet import Fleet

FRONT_METRIC = "linnet_http_requests"
"""Counted by the front, so that a call tried on two replicas counts once."""
SHARED = frozenset({"linnet_engine_sessions", "linnet_engine_session_bytes"})
"""Reported once, because all replicas share the same sessions."""


def merge_metrics(own: str, replicas: Mapping[int, str], fleet: Fleet) -> bytes:
    """Merge the front's metrics (`own`) and those of the replicas (by number) with those of the fleet."""
    families: dict[str, Metric] = {}
    for family in text_string_to_metric_families(own):
        families[family.name] = family
    for number, text in replicas.items():
        for family in text_string_to_metric_families(text):
            if not family.name.startswith(FRONT_METRIC):
                _add(families, family, number)
    for family in _fleet_metrics(fleet):
        families[family.name] = family
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)


def _add(families: dict[str, Metric], family: Metric, number: int) -> None:
    label = {} if family.name in SHARED else {"replica": str(number)}
    if not label and family.name in families:
        return
    known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    known.samples += [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]


def _fleet_metrics(fleet: Fleet) -> Iterable[Metric]:
    yield GaugeMetricFamily("linnet_replicas_ready", "Replicas that accept calls", value=len(fleet.ready))
    yield CounterMetricFamily(
        "linnet_replica_restarts", "Replicas that died and were restarted", value=fleet.n_restarts
    )
    running = GaugeMetricFamily("linnet_replica_calls", "Running calls of a replica", labels=["replica"])
    for replica in fleet.ready:
        running.add_metric([str(replica.number)], replica.n_running)
    yield running


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
