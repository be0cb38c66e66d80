"""`linnet bench`: what is measured and how, what is rejected, and how results are shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_results import TINY, result, text_of, tiny_task

from linnet.bench import measure, run, table, targets, worker
from linnet.bench.measure import Benchmark, Span, TooLarge
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError

FIGURES = {
    "job", "preset", "sequence_len", "batch", "tokens_per_second", "tokens_per_cpu_second", "compile_cpu_seconds",
    "compile_seconds", "peak_rss_bytes", "flops_per_token", "gemm_gflops_per_cpu_second", "gemm_gflops_per_second", "mfu",
    "cores", "repetitions", "date", "commit", "machine",
}  # fmt: skip


class TestRefusals:
    @pytest.fixture(autouse=True)
    def no_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("work began"))

    @pytest.mark.parametrize(
        ("job", "options", "message"),
        [
            ("trian", {}, "the job is 'trian'.*train, eval, prefill, decode"),
            ("train", {"preset": "bench-xl"}, "no preset 'bench-xl'.*bench-s"),
            ("train", {"sequence_len": 2000}, r"--sequence-len is 2000.*multiple of model.block_len \(128\).*use 2048"),
            ("decode", {"sequence_len": 0}, "--sequence-len is 0.*use 128"),
            ("decode", {"batch": 0}, "--batch is 0.*at least 1"),
            ("train", {"seconds": 0.0}, "--seconds is 0.0.*above 0"),
            ("train", {"cores": 10_000}, "--cores is 10000.*between 1 and"),
            ("train", {"cores": 1, "compare_cores": True}, "--compare-cores.*leave --cores out"),
        ],
    )
    def test_mistake_is_rejected_with_its_fix(self, job: str, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            run.run_bench(job, **options)


def test_preset_is_measured_on_the_embedded_corpus_at_its_own_size() -> None:
    cfg = run.job_config("train", "enwik8", None, None)
    assert (cfg.data.source, cfg.tokens.sequence_len, cfg.data.batch_size) == ("python-stdlib", 2048, 128)
    assert cfg.data.updates_per_sequence == 1
    cfg = run.job_config("decode", "bench-s", None, None)
    assert (cfg.tokens.sequence_len, cfg.data.batch_size) == (run.CONTEXT, 1)


class Script:
    """Stands for `time_call`: runs what it is given, remembers the order, and returns scripted times."""

    def __init__(self, run_seconds: list[float]) -> None:
        self.run_seconds, self.order = list(run_seconds), []

    def __call__(self, thing: Any) -> Span:
        before = len(self.order)
        thing()
        if len(self.order) == before:  # neither compile nor run: the matrix product
            self.order.append("gemm")
            return Span(0.5, 1.0)
        if self.order[-1] == "compile":
            return Span(3.0, 4.0)
        seconds = self.run_seconds.pop(0)
        return Span(seconds, 2 * seconds)

    def job(self) -> Benchmark:
        def compile_() -> Any:
            self.order.append("compile")

            class Compiled:
                def memory_analysis(self) -> None:
                    return None

            return Compiled()

        return Benchmark(
            tokens=100,
            flops_per_token=1e3,
            compile=compile_,
            run=lambda: self.order.append("run"),
            extra=lambda seconds: {"more": seconds},
        )


class TestMeasure:
    def figures(
        self, monkeypatch: pytest.MonkeyPatch, times: list[float], **options: Any
    ) -> tuple[dict[str, Any], list[str]]:
        script = Script(times)
        monkeypatch.setattr(measure, "time_call", script)
        return measure.measure(script.job(), gemm_size=100, **options), script.order

    def test_medians_after_a_warm_up_with_the_matrix_product_in_between(self, monkeypatch: pytest.MonkeyPatch) -> None:
        figures, order = self.figures(monkeypatch, [9.0, 1.0, 2.0, 4.0, 3.0, 2.0], seconds=1.0)
        assert order == ["compile", "gemm", "run", *["gemm", "run"] * 5, "gemm"]
        assert figures["repetitions"] == 5
        assert figures["tokens_per_second"] == 100 / 2.0
        assert figures["tokens_per_cpu_second"] == 100 / 4.0
        assert (figures["compile_seconds"], figures["compile_cpu_seconds"]) == (3.0, 4.0)
        assert figures["gemm_gflops_per_second"] == pytest.approx(2 * 100**3 / 0.5 / 1e9)
        assert figures["gemm_gflops_per_cpu_second"] == pytest.approx(2 * 100**3 / 1.0 / 1e9)
        assert figures["mfu"] == pytest.approx(1e3 * 50 / (2 * 100**3 / 0.5))
        assert figures["more"] == 2.0

    def test_retries_until_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        figures, _ = self.figures(monkeypatch, [1.0] * 9, seconds=8.0)
        assert figures["repetitions"] == 8

    def test_short_job_is_run_several_times_in_a_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        figures, order = self.figures(monkeypatch, [0.1, *[0.3] * 5], seconds=1.0)
        assert order[4:8] == ["run", "run", "run", "gemm"]
        assert figures["tokens_per_second"] == pytest.approx(100 / 0.1)

    def test_one_long_repetition_suffices_on_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        figures, order = self.figures(monkeypatch, [60.0], seconds=5.0, long_once=True)
        assert order == ["compile", "gemm", "run", "gemm"]
        assert (figures["repetitions"], figures["seconds_per_run"]) == (1, 60.0)

    def test_program_that_does_not_fit_is_not_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Memory:
            temp_size_in_bytes, argument_size_in_bytes, output_size_in_bytes = 700, 100, 100

        class Compiled:
            def memory_analysis(self) -> Memory:
                return Memory()

        job = Benchmark(tokens=1, flops_per_token=1, compile=Compiled, run=lambda: pytest.fail("started"))
        monkeypatch.setattr(measure, "memory_bytes", lambda: 1000)
        with pytest.raises(TooLarge, match="80%"):
            measure.measure(job, seconds=1.0, gemm_size=8)

    def test_peak_memory_is_not_inherited(self) -> None:
        stored = np.ones(600_000_000 // 8)
        code = "from linnet.bench.measure import own_peak_bytes; print(own_peak_bytes())"
        peak = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        assert 20e6 < peak < 500e6, (
            f"a process that did nothing held {peak:,} bytes ({stored.nbytes:,} are its parent's)"
        )


def test_train_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    got = run.run_bench("train", TINY, seconds=0.1, cores=1, gemm_size=64)
    assert got.keys() >= FIGURES
    assert json.loads(json.dumps(got)) == got
    assert (got["job"], got["preset"], got["sequence_len"], got["batch"], got["cores"]) == ("train", "tiny", 16, 2, 1)
    assert got["repetitions"] >= 5
    assert got["compile_cpu_seconds"] > 0.05
    assert got["tokens_per_second"] > 0
    assert "target" not in got
    assert not list(tmp_path.iterdir()), "compile time must be measured cold, and leave nothing behind"
    assert "tokens / CPU-second" in text_of(table.metrics_table(got))


def test_failed_measurement_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(code: int) -> Any:
        return lambda *a, **k: subprocess.CompletedProcess(a, code, stdout="", stderr="Traceback: it broke")

    monkeypatch.setattr(subprocess, "run", fake(-9))
    with pytest.raises(UserError, match=r"train of tiny at sequence length 16, batch 2 was killed by signal 9.*memory"):
        run.run_bench("train", TINY)
    monkeypatch.setattr(subprocess, "run", fake(1))
    with pytest.raises(RuntimeError, match="it broke"):
        run.run_bench("train", TINY)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["eval", "prefill", "decode"])
def test_other_jobs_run(job: str) -> None:
    got = worker.run_task(tiny_task(job), worker.run_job)
    assert got["tokens_per_cpu_second"] > 0
    if job == "prefill":
        assert got["time_to_first_token"] == pytest.approx(got["seconds_per_run"] / 2)
    if job == "decode":
        assert got["context"] == 16
        columns = TINY.vq.n_code + TINY.vq.mem_len + 1
        assert got["state_bytes"] >= TINY.vq.n_unit * columns * TINY.vq.d_v * 4


class TestTargets:
    def test_are_scaled_by_the_matrix_product(self) -> None:
        got = targets.compare(result(gemm_gflops_per_cpu_second=42.5))
        assert (got["target"], got["target_scaled"]) == (1400, 700)
        assert got["target_ratio"] == pytest.approx(1000 / 700)
        assert got["reached"] is True

    def test_limit_counts_as_well(self) -> None:
        got = targets.compare(result(tokens_per_cpu_second=9999.0, peak_rss_bytes=1_100_000_000))
        assert got["limits"]["peak_rss_bytes"]["reached"] is False
        assert got["reached"] is False

    def test_only_their_own_shapes(self) -> None:
        assert targets.compare(result(sequence_len=4096)) == {}
        assert targets.compare(result(preset="quickstart")) == {}
        assert targets.compare(result(job="decode", batch=8, sequence_len=1024))["target"] == 1300


def test_comparing_cores_measures_again_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int | None] = []

    def fake(job: str, cfg: RunConfig, *, cores: int | None, **_: Any) -> dict[str, Any]:
        requested.append(cores)
        return result(cores=cores or 2, tokens_per_second=1000.0 if cores == 1 else 1800.0)

    monkeypatch.setattr(run, "measure_in_subprocess", fake)
    monkeypatch.setattr(run, "cores_usable", lambda: 2)
    got = run.run_bench("train", compare_cores=True)
    assert requested == [None, 1]
    assert got["speedup_over_one_core"] == 1.8
    assert "1.80x" in text_of(table.metrics_table(got))
    assert "1.80 times as fast as one" in table.to_markdown(table.throughput_table([got]))


def test_complete_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(job: str, cfg: RunConfig, **_: Any) -> dict[str, Any]:
        return result(job=job, sequence_len=cfg.tokens.sequence_len, batch=cfg.data.batch_size)

    monkeypatch.setattr(run, "measure_in_subprocess", fake)
    rows = run.run_table()
    assert [(r["job"], r["sequence_len"], r["batch"]) for r in rows] == [
        ("train", 2048, 2),
        ("train", 8192, 1),
        ("eval", 2048, 2),
        ("decode", 1024, 1),
        ("decode", 1024, 8),
    ]
    assert all("target" in r for r in rows)


def test_markdown_has_a_row_a_result() -> None:
    plain, aimed = result(job="prefill"), result()
    aimed |= targets.compare(aimed)
    page = table.to_markdown(table.throughput_table([plain, aimed]))
    assert "| prefill, T 2,048, batch 2, 2 cores | 1,000 | - | 2,000 | 12.0 | 0.90 | 50% | 85.0 | - |" in page
    assert "| 1,400, 1,400 |" in page
    assert "measured 2030-01-02 03:04 UTC" in page
