"""`linnet bench prior`: which jobs, held to what, and how their figures are shown; the jobs themselves on a tiny model."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np
import pytest
from bench_results import result

from linnet.bench import prior, prior_jobs, run, table, targets
from linnet.config import presets
from linnet.config.schema import PairsConfig, RunConfig
from linnet.core.errors import UserError
from linnet.models.prior.config import PriorConfig
from linnet.nn.linear import linear

TINY = dataclasses.replace(
    presets.get(prior.PRIOR_PRESET),
    preset="tiny-prior",
    model=PriorConfig(dim=16, depth=2, n_head=2, d_head=8, text_encodings=True, max_text_len=3),
    data=PairsConfig(batch_size=2),
)


def measured(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, int, int]], dict[str, Any]]:
    """Every job makes 8 samples a CPU-second."""
    requested: list[tuple[str, int, int]] = []

    def fake(job: str, cfg: RunConfig, **_: Any) -> dict[str, Any]:
        length, batch = cfg.prior.max_text_len, cfg.data.batch_size
        assert cfg.prior.text_encodings == (length > 0)
        requested.append((job, length, batch))
        rates = {"tokens_per_cpu_second": 8.0, "gemm_gflops_per_cpu_second": 85.0}
        return result(job=job, preset=cfg.preset, sequence_len=length, batch=batch, **rates)

    monkeypatch.setattr(prior, "measure_in_subprocess", fake)
    return requested, prior.run_prior()


def test_every_target_of_the_prior_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    requested, got = measured(monkeypatch)
    wanted = {(f"prior-{t.job}", t.sequence_len, t.batch) for t in targets.PRIOR_TARGETS}
    assert wanted <= set(requested)
    assert len(set(requested)) == len(requested)
    assert [row.get("target") for row in got["rows"]][:6] == [130, 9, 7, 25, 4, None]
    assert [row.get("reached") for row in got["rows"]][:6] == [False, False, True, False, True, None]


def test_table_reports_samples_and_their_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    page = table.to_markdown(prior.prior_table(measured(monkeypatch)[1]))
    assert "| sample, DDIM, 64 steps, 77 encodings, batch 16 | 8 | 4, 4 |" in page
    assert "| train, no encodings, batch 64 | 8 | 130, 130 |" in page
    assert "16 and 64 steps of DDIM, batch 64: 125.0 and 125.0 CPU-ms per sample, 1.00 times as much." in page


def test_preset_of_tokens_is_rejected() -> None:
    with pytest.raises(UserError, match=r"PRESET is 'bench-s'.*family prior.*use bench-prior"):
        prior.run_prior("bench-s")


def test_measured_model_is_that_of_the_targets() -> None:
    model = presets.get(prior.PRIOR_PRESET).prior
    assert (model.dim, model.depth, model.n_head, model.d_head) == (512, 6, 8, 64)


@pytest.mark.trial
def test_job_of_training_updates_the_weights() -> None:
    train = prior_jobs.prior_job("prior-train", TINY)
    train.compile()
    for _ in range(2):
        train.run()
    state = inspect.getclosurevars(train.run).nonlocals["state"]
    assert (int(state.step), int(state.skipped), train.tokens) == (2, 0, 2)


def test_job_of_sampling_gives_embeddings() -> None:
    sample = prior_jobs.prior_job("prior-dpm-4", TINY)
    full = sample.compile()
    sample.run()
    given = inspect.getclosurevars(sample.run).nonlocals["given"]
    found, _ = full(*given)
    assert found.shape == (2, 16)
    assert np.isfinite(found).all()
    assert sample.extra(1.0) == {"steps": 4}


def test_sample_costs_its_text_once_and_every_step_again() -> None:
    jobs = [prior_jobs.prior_job(f"prior-ddim-{n}", TINY) for n in (4, 8, 16)]
    flops, steps = [job.flops_per_token for job in jobs], [job.extra(1.0)["steps"] for job in jobs]
    each = (flops[1] - flops[0]) / (steps[1] - steps[0])
    text = flops[0] - steps[0] * each
    assert flops[2] == text + steps[2] * each
    # 4 tokens through the first layer, each looking at 5 places, and their keys and values in the last.
    assert text == 4 * (2 * 16 * (2 * 16 + 2 * 8 + 3 * 64) + 4 * 16 * 5) + 4 * 2 * 16 * 2 * 8


@pytest.mark.trial
def test_job_is_measured_in_a_process_of_its_own() -> None:
    got = run.measure_in_subprocess("prior-ddim-4", TINY, seconds=0.1, gemm_size=64)
    assert (got["sequence_len"], got["batch"], got["steps"]) == (3, 2, 3)  # the reference's DDIM takes one step less
    assert got["tokens_per_cpu_second"] > 0


def test_products_gradients_are_the_plain_products() -> None:
    x, w = jax.random.normal(jax.random.key(0), (2, 3, 8)), jax.random.normal(jax.random.key(1), (8, 4))
    plain = jax.grad(lambda x, w: (x @ w).sum() ** 2, (0, 1))(x, w)
    ours = jax.jit(jax.grad(lambda x, w: linear(x, w, transpose_inputs=True).sum() ** 2, (0, 1)))(x, w)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
