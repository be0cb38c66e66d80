"""`linnet bench serve`: how its figures are taken, what they are held to, and what is rejected."""

from __future__ import annotations

import itertools
import subprocess
from typing import Any

import pytest
from bench_results import TINY, result

from linnet.bench import paired, serve, serve_jobs, table
from linnet.bench.measure import Gemm, Span
from linnet.bench.run import with_shape
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError

ENGINE = {
    "tokens_per_second": 1500.0, "tokens_per_cpu_second": 800.0, "share_of_raw": 0.93, "share_of_raw_cpu": 0.91,
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
FIGURES = {"serve-engine": ENGINE, "serve-pause": PAUSE, "serve-context": CONTEXT}


def figures(**changes: Any) -> dict[str, dict[str, Any]]:
    """Results as workers give them, some of one job's changed."""
    return {job: {**result(), **one, **changes.get(job.partition("-")[2], {})} for job, one in FIGURES.items()}


def summary(**changes: Any) -> dict[str, Any]:
    results = figures(**changes)
    return serve.summarise("bench-s", results, serve.rows(results))


def verdicts(**changes: Any) -> list[bool]:
    return [row["reached"] for row in summary(**changes)["rows"]]


class TestRows:
    def test_each_value_is_compared_with_its_own_target(self) -> None:
        #           engine, pause, p95, context
        assert verdicts() == [True, False, True, True]

    @pytest.mark.parametrize(
        ("job", "field", "worse", "row"),
        [
            ("engine", "share_of_raw", 0.89, 0),
            ("pause", "p95_over_idle", 3.1, 2),
            ("context", "share_of_near_cpu", 0.94, 3),
            ("context", "near_state_bytes", 8, 3),
        ],
    )
    def test_worse_figure_misses_it(self, job: str, field: str, worse: float, row: int) -> None:
        usual, got = verdicts(), verdicts(**{job: {field: worse}})
        assert got[row] is False
        assert got[:row] + got[row + 1 :] == usual[:row] + usual[row + 1 :]

    def test_table_has_targets_and_details(self) -> None:
        page = table.to_markdown(serve.serve_table(summary()))
        engine = "| engine with 8 slots, relative to raw decoding | 93.0% | at least 90.0% | yes | 1,500 tokens / s; "
        assert f"{engine}by CPU time 91.0% |" in page
        assert "longest gap during a prefill of 32,768 tokens | 2.30 chunks | at most 2.00 chunks | no |" in page
        assert "85.0 (engine)" in page


class TestRequests:
    def test_unservable_runs_are_rejected_before_any_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("work began"))
        with pytest.raises(UserError, match=r"pg19 \(32000 ids\).*reads bytes.*use bench-s"):
            serve.run_serve("pg19")
        with pytest.raises(UserError, match="--seconds is -1"):
            serve.run_serve("bench-s", seconds=-1)

    def test_texts_beyond_a_bounded_context_are_skipped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        requested: list[tuple[str, int]] = []

        def fake(job: str, cfg: RunConfig, **_: Any) -> dict[str, Any]:
            requested.append((job, cfg.tokens.sequence_len))
            return figures()[job]

        monkeypatch.setattr(serve, "measure_in_subprocess", fake)
        output: list[str] = []
        got = serve.run_serve("moe-cpu", log=output.append)
        assert requested == [("serve-engine", 256)]
        assert len(got["rows"]) == 1
        assert sum("skipped, because model.context is 512" in line for line in output) == 2
        requested.clear()
        assert len(serve.run_serve("bench-s")["rows"]) == 4
        assert requested == [(job, 1024) for job in serve.JOBS]


class TestInterleaving:
    def test_ratio_is_the_median_of_turns_and_not_of_all(self) -> None:
        """The machine is half as fast in the second turn, for both."""
        speed = itertools.cycle([1.0, 1.0, 0.5, 0.5, 2.0, 2.0])

        def at(rate: float) -> Any:
            def run(seconds: float) -> paired.Rate:
                now = next(speed)
                return paired.Rate(tokens_per_second=rate * now, tokens_per_cpu_second=rate * now / 2)

            return run

        own, ratio = paired.interleave(at(90.0), at(100.0), each=1.0, n=3, gemm=Gemm(8))
        assert (own.tokens_per_second, own.tokens_per_cpu_second) == (90.0, 45.0)
        assert ratio.tokens_per_second == pytest.approx(0.9)
        assert ratio.tokens_per_cpu_second == pytest.approx(0.9)

    def test_count_is_taken_between_deliveries(self) -> None:
        counts = itertools.chain([5, 5, 8, 16, 24], itertools.repeat(32))
        assert paired.sample_point(lambda: next(counts)).tokens == 32

    def test_rate_covers_the_interval_between_reports(self) -> None:
        first = paired.SamplePoint(tokens=100, seconds=1.0, cpu_seconds=2.0)
        last = paired.SamplePoint(tokens=400, seconds=3.0, cpu_seconds=5.0)
        assert paired.rate_between(first, last) == paired.rate(300, Span(2.0, 3.0))
        assert paired.rate_between(first, last).tokens_per_second == 150.0


def test_gaps_are_each_streams_own_and_an_open_one_counts() -> None:
    assert serve_jobs.delivery_gaps([[0.0, 1.0, 2.0, 4.0, 9.0], [1.5, 3.5]], 1.5, 5.0) == [1.0, 2.0, 1.0, 2.0, 1.5]


class TestInProcess:
    """The jobs themselves, on a model so small that the figures mean nothing."""

    @pytest.mark.trial
    def test_engine_beside_raw_decoding(self) -> None:
        got = serve_jobs.throughput(with_shape(TINY, 16, 1), seconds=0.6, gemm_size=32)
        assert got["tokens_per_second"] > 0
        assert 0 < got["share_of_raw"] < 2
        assert 0 < got["share_of_raw_cpu"] < 2

    @pytest.mark.slow
    def test_other_requests_run_during_a_long_prefill(self) -> None:
        got = serve_jobs.pause(with_shape(TINY, 16, 1), seconds=0.5, gemm_size=32, prompt=1024)
        assert got["longest_seconds"] >= got["p95_seconds"] > 0
        assert got["pause_seconds"] <= got["longest_seconds"]
        assert got["admission_seconds"] > got["chunk_seconds"] > 0

    def test_long_context_keeps_the_state_of_a_short_one(self) -> None:
        got = serve_jobs.context(with_shape(TINY, 16, 1), seconds=0.2, gemm_size=32, lengths=(64, 16))
        assert got["state_bytes"] == got["near_state_bytes"] > 0
        assert got["share_of_near_cpu"] > 0
