"""Peak memory of importing a Grok-1 checkpoint, above that of the program before. The target is a single copy of one tensor."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from linnet.bench.measure import own_peak_bytes
from linnet.config import codec as configs
from linnet.config.schema import RunConfig
from linnet.convert.grok.checkpoint import checkpoint_files, read_checkpoint
from linnet.convert.grok.importing import Found, import_grok
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
        found = Found(
            cfg=cfg.model, settings=None, tensors=read_checkpoint(checkpoint, cfg.model), files=files, turned=False
        )
        import_grok(found, cfg, Path(folder) / "run", "float32", finish=lambda _: None, say=lambda _: None)
        took, above = time.perf_counter() - began, own_peak_bytes() - before
        size = sum(file.stat().st_size for file in files)
    limit = largest + 2 * CHUNK
    return {
        "checkpoint_bytes": size,
        "largest_tensor_bytes": largest,
        "above_bytes": above,
        "limit_bytes": limit,
        "tensors_held": above / largest,
        "seconds": took,
        "reached": above <= limit,
    }


def _write(cfg: RunConfig, checkpoint: Path) -> int:
    settings = configs.to_json(cfg)
    settings.pop("version")
    command = [sys.executable, "-m", "linnet.bench.grok_files", json.dumps(settings), str(checkpoint)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
