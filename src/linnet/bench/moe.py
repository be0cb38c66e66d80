"""`linnet bench moe`: the mixture of experts with float32 and int8 weights, and the peak memory of an import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from linnet.bench.run import check_seconds, measure_apart, sized
from linnet.bench.targets import GEMM_SIZE, MOE_PRESET, compare
from linnet.config import presets
from linnet.config.schema import RunConfig
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import invalid
from linnet.models.moe.config import MoEConfig

HELD: tuple[WeightDtype, ...] = ("float32", "int8")
SHORT_PARTS = 8
"""Ratio of the long prompt to the short one: 512 tokens to 64."""
IMPORTED = {"d_model": 1536, "n_layer": 2}
"""Sizes of the imported model: large enough that one tensor (100 MB) exceeds the noise in a process's memory."""


def run_moe(
    preset: str | RunConfig = MOE_PRESET,
    *,
    seconds: float = 10.0,
    gemm_size: int = GEMM_SIZE,
    imported: dict[str, Any] = IMPORTED,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    cfg = presets.get(preset) if isinstance(preset, str) else preset
    check_seconds(seconds)
    if not isinstance(cfg.model, MoEConfig):
        raise invalid("PRESET", cfg.preset, "a preset of the family moe", f"use {MOE_PRESET}")
    prompt = cfg.model.context // 2
    rows: list[dict[str, Any]] = []

    def measure(job: str, length: int, batch: int, weights: WeightDtype) -> dict[str, Any]:
        say(f"{job}, {length:,} tokens, batch {batch}, weights in {weights}")
        name = job if weights == "float32" else f"{job}-{weights}"
        result = measure_apart(name, sized(cfg, length, batch), seconds=seconds, gemm_size=gemm_size)
        result |= {"job": job, "weights": weights}
        rows.append(result | compare(result))
        return result

    for weights in HELD:
        for batch in (1, 8):
            measure("decode", prompt, batch, weights)
        long = measure("prefill", prompt, 1, weights)
        short = measure("prefill", prompt // SHORT_PARTS, 1, weights)
        rows[-1]["over_its_part"] = _cpu_seconds(short) / (_cpu_seconds(long) / SHORT_PARTS)
    measure("train", cfg.tokens.update_len, cfg.data.batch_size, "float32")
    say("memory while importing")
    model = dataclasses.replace(cfg.model, **imported)
    memory = measure_apart("import", dataclasses.replace(cfg, model=model), seconds=seconds, gemm_size=gemm_size)
    where = {name: memory[name] for name in ("date", "commit", "machine", "cores")}
    return {"job": "moe", "preset": cfg.preset, "rows": rows, "import": memory, **where}


def _cpu_seconds(result: dict[str, Any]) -> float:
    """Return the CPU time per prompt."""
    return result["sequence_len"] / result["tokens_per_cpu_second"]


def notes(result: dict[str, Any]) -> list[str]:
    """Return notes on figures that are not in the table."""
    found: list[str] = []
    for row in result["rows"]:
        if "over_its_part" in row:
            took, context = 1e3 * _cpu_seconds(row), row["sequence_len"]
            found.append(
                f"A prompt of {context} tokens in {row['weights']} takes {took:,.0f} CPU-ms, {row['over_its_part']:.2f} times "
                f"1/{SHORT_PARTS} of one of {context * SHORT_PARTS}."
            )
    memory = result["import"]
    verdict = "reached" if memory["reached"] else "not reached"
    found.append(
        f"Importing a checkpoint of {memory['checkpoint_bytes'] / 1e6:,.0f} MB, whose largest tensor has "
        f"{memory['largest_tensor_bytes'] / 1e6:,.0f} MB, held at most {memory['above_bytes'] / 1e6:,.0f} MB more than the program "
        f"before: {memory['tensors_held']:.2f} tensors (one, and room to read through, wanted: "
        f"{memory['limit_bytes'] / 1e6:,.0f} MB; {verdict})."
    )
    return found
