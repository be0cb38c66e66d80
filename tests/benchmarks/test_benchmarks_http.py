"""`python -m benchmarks.serve_http`: its clients, its server, and the targets."""

from __future__ import annotations

import asyncio
import math
import os
import types
from typing import Any

import pytest
from bench_results import TINY, result
from fake_model import FakeModel
from playground_server import serving as fake_server

from benchmarks import serve_http
from benchmarks.http_clients import Clients, cpu_seconds
from benchmarks.http_server import Server
from linnet.bench import serve, table
from linnet.bench.load import vary_length
from linnet.bench.run import with_shape

MEASURED = {
    "clients": 64, "http_tokens_per_second": 1300.0, "http_share_of_raw": 0.78, "http_share_of_raw_cpu": 0.85,
    "client_cpu_ms_per_token": 0.05, "prompt": 512, "first_token_seconds": 0.110, "prefill_seconds": 0.100,
    "over_prefill_seconds": 0.010, "ready_seconds": 6.0, "cold_ready_seconds": 31.0, "session_bytes": 2_000_000,
    "save_seconds": 0.020, "restore_seconds": 0.060, "prefix": 2048, "prefix_cold_seconds": 0.5, "prefix_hit_seconds": 0.04,
    "prefix_hit_share": 0.08,
}  # fmt: skip


def rows(**changes: Any) -> list[serve.Row]:
    return serve_http.rows({**result(), **MEASURED, **changes})


def test_each_metric_is_compared_with_its_own_target() -> None:
    #                                         streams, first token, restart, save, restore, prefix hit
    assert [row.reached for row in rows()] == [False, True, True, True, False, True]


@pytest.mark.parametrize(
    ("field", "worse", "row"),
    [
        ("over_prefill_seconds", 0.016, 1),
        ("ready_seconds", 10.1, 2),
        ("save_seconds", 0.051, 3),
        ("prefix_hit_share", 0.11, 5),
    ],
)
def test_worse_value_misses_its_target(field: str, worse: float, row: int) -> None:
    usual, got = ([one.reached for one in rows(**changes)] for changes in ({}, {field: worse}))
    assert got[row] is False
    assert got[:row] + got[row + 1 :] == usual[:row] + usual[row + 1 :]


def test_table_has_targets_and_details() -> None:
    measured = {"serve-http": {**result(), **MEASURED}}
    page = table.to_markdown(serve.serve_table(serve.summarise("bench-s", measured, rows())))
    assert (
        "| HTTP with 64 streaming clients, relative to raw decoding | 78.0% | at least 80.0% | no | 1,300 tokens / s;"
        in page
    )
    assert "| restore a session | 60.0 ms | at most 50.0 ms | no | 2.00 MB |" in page


class TestOverHttp:
    """A server whose model has no arithmetic."""

    def server(self, address: str) -> Server:
        process: Any = types.SimpleNamespace(pid=-1)
        return Server(process, int(address.rpartition(":")[2]), 0.0)

    def test_clients_count_what_they_are_sent(self) -> None:
        with fake_server(FakeModel()) as address:
            clients = Clients(self.server(address).port, os.getpid(), 3, 20)
            got = asyncio.run(clients.measure(0.3))
        assert got["answers"] > 0
        lengths = [vary_length(20, i) for i in range(clients.n_requests)]
        assert sum(sorted(lengths)[: got["answers"]]) <= clients.n_tokens <= sum(lengths)
        assert 0 < got["tokens"] <= clients.n_tokens
        assert got["server_cpu_seconds"] > 0

    def test_clients_do_not_count_a_rejection(self) -> None:
        with fake_server(FakeModel()) as address:
            clients = Clients(self.server(address).port, os.getpid(), 2, 2**30)
            with pytest.raises(RuntimeError, match="400"):
                asyncio.run(clients.measure(5.0))

    def test_first_tokens_and_sessions(self) -> None:
        with fake_server(FakeModel()) as address:
            server = self.server(address)
            assert server.is_ready()
            assert 0 < server.first_token_seconds([3, 4, 5]) < 30
            got = serve_http.sessions(server, 3)
            assert got["session_bytes"] > 0
            assert min(got["save_seconds"], got["restore_seconds"]) > 0
        assert not server.is_ready()
        assert math.isnan(cpu_seconds(2**30))


@pytest.mark.trial
def test_real_server_from_cold_start_to_streams() -> None:
    got = serve_http.over_http(with_shape(TINY, 16, 1), seconds=1.0, gemm_size=32, clients=4, answer=16)
    assert got["ready_seconds"] > 0
    assert got["http_share_of_raw"] > 0
    assert got["prefix_hit_seconds"] > 0
    assert got["session_bytes"] > 0
