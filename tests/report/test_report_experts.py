"""The report of a mixture of experts: its section is there, says what was measured, stays light, and survives damage."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.config import codec, presets
from linnet.report.build import render


def line(step: int, n_layer: int = 3, n_expert: int = 8) -> dict[str, Any]:
    load = [[(1 + (e + layer) % 3) / (2 * n_expert) for e in range(n_expert)] for layer in range(n_layer)]
    return {
        "kind": "train", "step": step, "time": 1e9 + step, "loss": 2.0, "loss_balance": 1.1, "loss_router_z": 0.4,
        "experts": {
            "load": load, "balance": [0.9 - 0.01 * i for i in range(n_layer)], "busiest": [0.21] * n_layer,
            "idlest": [0.043] * n_layer, "confidence": [0.655] * n_layer,
        },
    }  # fmt: skip


def write(run: Path, preset: str, *records: dict[str, Any]) -> Path:
    codec.save(presets.get(preset), run / "config.json")
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return run


def reported(page: str) -> str:
    """All but the settings, which name everything."""
    return page.split("<h2>Config</h2>")[0]


def test_section_reports_load_balance_confidence_and_losses(tmp_path: Path) -> None:
    page = reported(render(write(tmp_path, "moe-cpu", *(line(s) for s in range(10, 210, 10)))))
    for words in (
        "<h2>Experts</h2>", "Here 2 of 8 are selected; a uniform load is 12.5% each.", "Layer 0: load", "Layer 2: load per expert",
        "expert 7, step 200: ", "Load of the least used expert", "Load of the most used expert",
        "Total probability of the selected experts",
        "Load-balancing loss", "Router z-loss", "Every layer at step 200", "65.5%", "4.3%",
    ):  # fmt: skip
        assert words in page, words
    assert "odebook" not in page
    assert "least balanced" not in page


def test_codebook_run_has_no_expert_section(tmp_path: Path) -> None:
    book = {"usage": [0.9, 0.8], "perplexity": [40.0, 50.0]}
    page = reported(render(write(tmp_path, "quickstart", {"kind": "train", "step": 5, "time": 1.0, "codebook": book})))
    assert "<h2>Codebooks</h2>" in page
    assert "unit 1, step 5: 80%" in page
    assert "xpert" not in page


def test_model_with_codebooks_and_experts_reports_both(tmp_path: Path) -> None:
    page = render(write(tmp_path, "quickstart", {**line(5), "codebook": {"usage": [0.5]}}))
    assert page.index("<h2>Codebooks</h2>") < page.index("<h2>Experts</h2>")


@pytest.mark.parametrize(("preset", "words"), [("moe-cpu", "expert"), ("quickstart", "codebook")])
def test_before_anything_is_measured_the_familys_own_section_says_so(preset: str, words: str, tmp_path: Path) -> None:
    page = reported(render(write(tmp_path, preset, {"kind": "event", "step": 0, "time": 0, "event": "start"})))
    assert page.count(" diagnostics recorded") == 1
    assert f"No {words} diagnostics recorded" in page


def test_many_layers_stay_light_and_the_least_even_are_drawn(tmp_path: Path) -> None:
    page = render(write(tmp_path, "moe-cpu", *(line(s, n_layer=64, n_expert=64) for s in range(1, 200, 2))))
    assert len(page.encode()) < 2_000_000
    assert "Heat maps show the 8 least balanced of 64 layers." in page
    assert "Layer 63: load per expert" in page
    assert "Layer 55: load per expert" not in page


DAMAGED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["load", "balance", "busiest", "idlest", "confidence", "x"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(NAMES, DAMAGED, max_size=5), max_size=3), DAMAGED)
def test_corrupt_figures_never_stop_a_report(figures: list[dict[str, Any]], loss: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = [{"kind": "train", "step": i, "loss_balance": loss, "experts": f} for i, f in enumerate(figures)]
        page = render(write(Path(folder), "moe-cpu", *lines, line(8)))
        assert "<h2>Experts</h2>" in page
        assert "NaN" not in page
