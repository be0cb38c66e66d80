"""`linnet bench moe`: its jobs and their targets; decoding within a bounded context."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from bench_results import result

from linnet.bench import jobs, moe, run, table, targets
from linnet.config.schema import DataConfig, OptimConfig, RunConfig
from linnet.core.errors import UserError
from linnet.core.params import count
from linnet.core.pytree import n_bytes
from linnet.models.moe.config import MoEConfig

TINY = RunConfig(
    preset="tiny-moe",
    family="moe",
    model=MoEConfig(d_model=16, d_k=8, n_q_head=2, n_kv_head=1, n_layer=1, n_expert=4, n_choice=2, context=128),
    data=DataConfig(sequence_len=32, update_len=32, batch_size=2),
    optim=OptimConfig(name="lion", warmup_steps=0),
)


def measured(monkeypatch: pytest.MonkeyPatch, requested: list[tuple[str, int, int]]) -> dict[str, Any]:
    """512 tokens of a prompt take 0.5 CPU-seconds, 64 take 0.1."""

    def fake(job: str, cfg: RunConfig, **_: Any) -> dict[str, Any]:
        length, batch = cfg.tokens.sequence_len, cfg.data.batch_size
        requested.append((job, length, batch))
        rate = {512: 1024.0, 64: 640.0}[length]
        return result(job=job, preset=cfg.preset, sequence_len=length, batch=batch, tokens_per_cpu_second=rate)

    monkeypatch.setattr(moe, "measure_in_subprocess", fake)
    return moe.run_moe()


def test_both_kinds_of_weights_are_measured_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[str, int, int]] = []
    got = measured(monkeypatch, requested)
    one = [("decode", 512, 1), ("decode", 512, 8), ("prefill", 512, 1), ("prefill", 64, 1)]
    eight = [(f"{job}-int8", length, batch) for job, length, batch in one]
    assert requested == [*one, *eight, ("train", 512, 1)]
    assert [row["job"] for row in got["rows"]] == ["decode", "decode", "prefill", "prefill"] * 2 + ["train"]
    assert [row["weights"] for row in got["rows"]] == ["float32"] * 4 + ["int8"] * 4 + ["float32"]
    assert [row.get("target") for row in got["rows"]] == [40, 150, 900, 900] * 2 + [None]
    assert [row.get("reached") for row in got["rows"]] == [True, True, True, False] * 2 + [None]


def test_short_prompt_is_compared_with_its_part_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    got = measured(monkeypatch, [])
    assert [row["over_its_part"] for row in got["rows"] if "over_its_part" in row] == [pytest.approx(1.6)] * 2
    page = table.to_markdown(moe.moe_table(got))
    assert "| prefill, int8, T 64, batch 1, 2 cores | 640 | 900, 900 |" in page
    assert (
        "With int8 weights, a prompt of 64 tokens takes 100 CPU-ms, 1.60 times 1/8 of the time for 512 tokens." in page
    )


def test_targets_are_scaled_by_the_matrix_product() -> None:
    changes = {"preset": "bench-moe", "job": "decode", "batch": 8, "gemm_gflops_per_cpu_second": 42.5}
    got = targets.compare(result(tokens_per_cpu_second=80.0, **changes))
    assert (got["target"], got["target_scaled"], got["reached"]) == (150, 75.0, True)
    assert targets.compare(result(tokens_per_cpu_second=74.0, **changes))["reached"] is False


def test_another_family_is_rejected() -> None:
    with pytest.raises(UserError, match=r"PRESET is 'bench-s'.*family moe.*use bench-moe"):
        moe.run_moe("bench-s")


@pytest.mark.trial
def test_decoding_stays_within_the_context() -> None:
    assert run.job_config("decode", "bench-moe", None, None).tokens.sequence_len == 1024 - run.TICKS
    assert run.job_config("prefill", "bench-moe", None, None).tokens.sequence_len == 1024
    with pytest.raises(UserError, match=r"--sequence-len is 1000.*at most 960.*and 64 are written.*use 960"):
        run.job_config("decode", "bench-moe", 1000, None)
    job = jobs.decode(run.with_shape(TINY, 32, 2), "int8")
    job.compile()
    for _ in range(3):
        job.run()
    assert inspect.getclosurevars(job.run).nonlocals["state"].position.tolist() == [31 + run.TICKS] * 2


def test_weights_are_created_in_the_requested_dtype() -> None:
    params, _ = jobs.fresh_weights(TINY, "int8")
    assert params.layers.experts.gate.weight.dtype == "int8"
    assert params.layers.experts_in_gain.dtype == "float32"
    assert n_bytes(params) < 2 * count(jobs.registry.get("moe").param_specs(TINY.model))
