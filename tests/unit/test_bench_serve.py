"""`linnet bench serve`: how its figures are taken, what they are held to, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import subprocess
import types
from typing import Any

import pytest
from http_fake import FakeModel
from playground_server import serving as fake_server
from test_bench import TINY, result

from linnet.bench import serve, serve_http, serve_jobs, table, turns
from linnet.bench.clients import Clients, cpu_seconds, spread
from linnet.bench.measure import Gemm, Span
from linnet.bench.run import sized
from linnet.bench.server import Server
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError

ENGINE = {
    "tokens_per_second": 1500.0, "tokens_per_cpu_second": 800.0, "share_of_raw": 0.93, "share_of_raw_cpu": 0.91,
}  # fmt: skip
HTTP = {
    "clients": 64, "http_tokens_per_second": 1300.0, "http_share_of_raw": 0.78, "http_share_of_raw_cpu": 0.85,
    "client_cpu_ms_per_token": 0.05, "prompt": 512, "first_token_seconds": 0.110, "prefill_seconds": 0.100,
    "over_prefill_seconds": 0.010, "ready_seconds": 6.0, "cold_ready_seconds": 31.0, "session_bytes": 2_000_000,
    "save_seconds": 0.020, "restore_seconds": 0.060, "prefix": 2048, "prefix_cold_seconds": 0.5, "prefix_hit_seconds": 0.04,
    "prefix_hit_share": 0.08,
}  # fmt: skip
PAUSE = {
    "prompt": 32_768, "chunk_seconds": 0.03, "admission_seconds": 20.0, "idle_median_seconds": 0.04, "idle_p95_seconds": 0.05,
    "idle_longest_seconds": 0.06, "p95_seconds": 0.1, "longest_seconds": 0.11, "pause_seconds": 0.07, "pause_in_chunks": 2.3,
    "p95_over_idle": 2.0,
}  # fmt: skip
CONTEXT = {
    "context": 65_536, "tokens_per_second": 700.0, "tokens_per_cpu_second": 650.0, "share_of_near": 0.9,
    "share_of_near_cpu": 0.97, "state_bytes": 9, "near_state_bytes": 9,
}  # fmt: skip
FIGURES = {"serve-engine": ENGINE, "serve-http": HTTP, "serve-pause": PAUSE, "serve-context": CONTEXT}


def figures(**changes: Any) -> dict[str, dict[str, Any]]:
    """Results as workers give them, some of one job's changed."""
    return {job: {**result(), **one, **changes.get(job.partition("-")[2], {})} for job, one in FIGURES.items()}


def verdicts(**changes: Any) -> list[bool]:
    return [row["reached"] for row in serve.summarise("bench-s", figures(**changes))["rows"]]


class TestRows:
    def test_each_is_held_to_its_own_target(self) -> None:
        #           engine, http, first token, restart, save, restore, prefix hit, pause, p95, context
        assert verdicts() == [True, False, True, True, True, False, True, False, True, True]

    @pytest.mark.parametrize(
        ("job", "field", "worse", "row"),
        [
            ("engine", "share_of_raw", 0.89, 0),
            ("http", "over_prefill_seconds", 0.016, 2),
            ("http", "ready_seconds", 10.1, 3),
            ("http", "save_seconds", 0.051, 4),
            ("http", "prefix_hit_share", 0.11, 6),
            ("pause", "p95_over_idle", 3.1, 8),
            ("context", "share_of_near_cpu", 0.94, 9),
            ("context", "near_state_bytes", 8, 9),
        ],
    )
    def test_a_worse_figure_misses_it(self, job: str, field: str, worse: float, row: int) -> None:
        usual, got = verdicts(), verdicts(**{job: {field: worse}})
        assert got[row] is False
        assert got[:row] + got[row + 1 :] == usual[:row] + usual[row + 1 :]

    def test_are_told_in_a_table(self) -> None:
        page = table.markdown_serve(serve.summarise("bench-s", figures()))
        assert (
            "| engine, 8 slots, of raw decode | 93.0% | at least 90.0% | yes | 1,500 tokens / s; by CPU time 91.0% |"
            in page
        )
        assert "over that of as long a time without | 2.30 chunks | at most 2.00 chunks | no |" in page
        assert "| restore a session | 60.0 ms | at most 50.0 ms | no | 2.00 MB |" in page
        assert "85.0 (engine)" in page


class TestRequests:
    def test_what_cannot_be_served_is_refused_before_any_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("work began"))
        with pytest.raises(UserError, match=r"pg19 \(32000 ids\).*reads bytes.*use bench-s"):
            serve.run_serve("pg19")
        with pytest.raises(UserError, match="--seconds is -1"):
            serve.run_serve("bench-s", seconds=-1)

    def test_texts_beyond_a_bounded_context_are_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[str, int]] = []

        def fake(job: str, cfg: RunConfig, **_: Any) -> dict[str, Any]:
            asked.append((job, cfg.data.sequence_len))
            return figures()[job]

        monkeypatch.setattr(serve, "measure_apart", fake)
        said: list[str] = []
        got = serve.run_serve("moe-cpu", say=said.append)
        assert asked == [("serve-engine", 256), ("serve-http", 256)]
        assert len(got["rows"]) == 7
        assert sum("left out, for model.context is 512" in words for words in said) == 2
        asked.clear()
        assert len(serve.run_serve("bench-s")["rows"]) == 10
        assert asked == [(job, 1024) for job in serve.JOBS]


class TestTurns:
    def test_the_ratio_is_the_median_of_turns_and_not_of_all(self) -> None:
        """The machine is half as fast in the second turn, for both."""
        speed = itertools.cycle([1.0, 1.0, 0.5, 0.5, 2.0, 2.0])

        def at(rate: float) -> Any:
            def run(seconds: float) -> turns.Rate:
                now = next(speed)
                return turns.Rate(tokens_per_second=rate * now, tokens_per_cpu_second=rate * now / 2)

            return run

        own, ratio = turns.interleave(at(90.0), at(100.0), each=1.0, n=3, gemm=Gemm(8))
        assert (own.tokens_per_second, own.tokens_per_cpu_second) == (90.0, 45.0)
        assert ratio.tokens_per_second == pytest.approx(0.9)
        assert ratio.tokens_per_cpu_second == pytest.approx(0.9)

    def test_a_count_is_taken_after_a_delivery_and_not_in_the_midst_of_it(self) -> None:
        counts = itertools.chain([5, 5, 8, 16, 24], itertools.repeat(32))
        assert turns.sample_point(lambda: next(counts)).tokens == 32

    def test_a_rate_is_of_what_came_between(self) -> None:
        first = turns.Edge(tokens=100, seconds=1.0, cpu_seconds=2.0)
        last = turns.Edge(tokens=400, seconds=3.0, cpu_seconds=5.0)
        assert turns.between(first, last) == turns.rate(300, Span(2.0, 3.0))
        assert turns.between(first, last).tokens_per_second == 150.0


def test_gaps_are_each_streams_own_and_an_open_one_counts() -> None:
    assert serve_jobs.gaps([[0.0, 1.0, 2.0, 4.0, 9.0], [1.5, 3.5]], 1.5, 5.0) == [1.0, 2.0, 1.0, 2.0, 1.5]


class TestInProcess:
    """The jobs themselves, on a model so small that the figures mean nothing."""

    @pytest.mark.trial
    def test_the_engine_beside_raw_decoding(self) -> None:
        got = serve_jobs.throughput(sized(TINY, 16, 1), seconds=0.6, gemm_size=32)
        assert got["tokens_per_second"] > 0
        assert 0 < got["share_of_raw"] < 2
        assert 0 < got["share_of_raw_cpu"] < 2

    def test_others_while_a_long_prompt_is_read(self) -> None:
        got = serve_jobs.pause(sized(TINY, 16, 1), seconds=0.5, gemm_size=32, prompt=1024)
        assert got["longest_seconds"] >= got["p95_seconds"] > 0
        assert got["pause_seconds"] <= got["longest_seconds"]
        assert got["admission_seconds"] > got["chunk_seconds"] > 0

    def test_a_long_context_keeps_the_state_of_a_short_one(self) -> None:
        got = serve_jobs.context(sized(TINY, 16, 1), seconds=0.2, gemm_size=32, lengths=(64, 16))
        assert got["state_bytes"] == got["near_state_bytes"] > 0
        assert got["share_of_near_cpu"] > 0


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
        lengths = [spread(20, i) for i in range(clients.n_asked)]
        assert sum(sorted(lengths)[: got["answers"]]) <= clients.n_tokens <= sum(lengths)
        assert 0 < got["tokens"] <= clients.n_tokens
        assert got["server_cpu_seconds"] > 0

    def test_clients_do_not_count_a_refusal(self) -> None:
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
def test_a_real_server_from_cold_start_to_streams() -> None:
    got = serve_http.over_http(sized(TINY, 16, 1), seconds=1.0, gemm_size=32, clients=4, answer=16)
    assert got["ready_seconds"] > 0
    assert got["http_share_of_raw"] > 0
    assert got["prefix_hit_seconds"] > 0
    assert got["session_bytes"] > 0
