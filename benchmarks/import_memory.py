"""Peak memory of importing a Grok-1 checkpoint, above that of the program before. The target is a single copy of one tensor."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.command import Output, run_command
from benchmarks.worker import measure_in_subprocess
from linnet.bench.measure import own_peak_bytes
from linnet.bench.table import ResultTable
from linnet.bench.targets import MOE_PRESET
from linnet.config import codec, presets
from linnet.config.schema import RunConfig
from linnet.convert.grok.checkpoint import checkpoint_files, read_checkpoint
from linnet.convert.grok.importer import GrokSource, import_grok
from linnet.models.moe.config import MoEConfig
from linnet.runs.environment import give_back_memory, rss_bytes
from linnet.runs.stored_array import CHUNK


def import_memory(cfg: RunConfig) -> dict[str, Any]:
    assert isinstance(cfg.model, MoEConfig)
    with tempfile.TemporaryDirectory(prefix="linnet-bench-") as folder:
        checkpoint = Path(folder) / "ckpt-0"
        largest = _write(cfg, checkpoint)
        files = checkpoint_files(checkpoint)
        give_back_memory()
        before, began = rss_bytes(), time.perf_counter()
        found = GrokSource(
            cfg=cfg.model, settings=None, tensors=read_checkpoint(checkpoint, cfg.model), files=files, transposed=False
        )
        import_grok(found, cfg, Path(folder) / "run", "float32", finish=lambda _: None, log=lambda _: None)
        took, above = time.perf_counter() - began, own_peak_bytes() - before
        size = sum(file.stat().st_size for file in files)
    limit = largest + 2 * CHUNK
    return {
        "checkpoint_bytes": size,
        "largest_tensor_bytes": largest,
        "above_bytes": above,
        "limit_bytes": limit,
        "tensors_in_memory": above / largest,
        "seconds": took,
        "reached": above <= limit,
    }


def _write(cfg: RunConfig, checkpoint: Path) -> int:
    settings = codec.to_json(cfg)
    settings.pop("version")
    command = [sys.executable, "-m", "benchmarks.grok_checkpoint", json.dumps(settings), str(checkpoint)]
    folder = Path(__file__).parents[1]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout)


def imported_config() -> RunConfig:
    """Return a model so large that one tensor (100 MB) exceeds the noise in a process's memory."""
    cfg = presets.get(MOE_PRESET)
    assert isinstance(cfg.model, MoEConfig)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, d_model=1536, n_layer=2))


def memory_table(result: dict[str, Any]) -> ResultTable:
    columns = ("checkpoint MB", "largest tensor MB", "peak above start MB", "limit MB", "tensors in memory", "reached")
    sizes = [
        f"{result[name] / 1e6:,.0f}"
        for name in ("checkpoint_bytes", "largest_tensor_bytes", "above_bytes", "limit_bytes")
    ]
    row = [*sizes, f"{result['tensors_in_memory']:.2f}", "yes" if result["reached"] else "no"]
    return ResultTable(result, columns, [row], ["The limit is one tensor and two read buffers."])


def main(flags: Output) -> tuple[dict[str, Any], ResultTable]:
    result = measure_in_subprocess("import", imported_config(), seconds=1.0)
    return result, memory_table(result)


if __name__ == "__main__":
    run_command(Output, "import_memory", main)
