"""`python -m benchmarks.import_memory`: importing a Grok-1 checkpoint keeps one tensor in memory."""

from __future__ import annotations

import dataclasses

from bench_results import result

from benchmarks.import_memory import memory_table
from benchmarks.worker import measure_in_subprocess
from linnet.bench import table
from linnet.config import presets
from linnet.models.moe.config import MoEConfig

MEMORY = {
    "checkpoint_bytes": 660e6, "largest_tensor_bytes": 100e6, "above_bytes": 111e6, "limit_bytes": 117e6, "tensors_in_memory": 1.11,
    "seconds": 4.0, "reached": True,
}  # fmt: skip


def test_table_shows_the_tensors_in_memory() -> None:
    page = table.to_markdown(memory_table(result(job="import", preset="bench-moe", **MEMORY)))
    assert "| 660 | 100 | 111 | 117 | 1.11 | yes |" in page


def test_importing_keeps_one_tensor_in_memory() -> None:
    cfg = presets.get("bench-moe")
    assert isinstance(cfg.model, MoEConfig)
    model = dataclasses.replace(cfg.model, d_model=512, n_layer=2, n_vocab=512, widening=12.0)
    got = measure_in_subprocess("import", dataclasses.replace(cfg, model=model), seconds=1.0)
    assert got["largest_tensor_bytes"] == 8 * 512 * model.d_ffn
    assert got["checkpoint_bytes"] > 6 * got["largest_tensor_bytes"]
    assert got["reached"], f"{got['above_bytes']:,} bytes for a tensor of {got['largest_tensor_bytes']:,}"
