"""Fine-tuning on a mesh: the same losses as on one device, for all weights and for adapters, and a run that moves between meshes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiler_flags import simulated

PROGRAM = """
import dataclasses, json, sys
from pathlib import Path
import tiny
from finetuned_runs import parent_run, tuned
from linnet.runs.folder import RunFolder
from linnet.train.loop import train
from linnet.runs.metrics import read_metrics

folder, family, mesh, changes = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
source = tiny.corpus(folder)
wide = {"model.d_model": 32, "model.d_k": 16, "data.batch_size": 8}
parent = parent_run(folder, source, family, **wide, **({"model.n_kv_head": 2} if family == "moe" else {}))
cfg = tuned(parent, source, **changes, **{"train.log_every": 1})
if "lora.targets" in changes:
    cfg = dataclasses.replace(cfg, lora=dataclasses.replace(cfg.lora, targets=tuple(changes["lora.targets"])))
found = {}
for name in ("", mesh):
    run = RunFolder(folder / (name or "alone"))
    train(dataclasses.replace(cfg, mesh=name), run, quiet=True, stop_at=4)
    train(cfg, run, quiet=True)  # the rest on one device
    found[name] = [r["loss"] for r in read_metrics(run.path) if r["kind"] in ("train", "eval")]
print(json.dumps([found[""], found[mesh]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh", "changes"),
    [
        ("moe", "fsdp=2,model=2,expert=2", {"lora.rank": 4, "lora.targets": ["w_q", "experts"]}),
        pytest.param("vq", "data=2,fsdp=2,model=2", {"lora.rank": 4}, marks=pytest.mark.trial),
        pytest.param("vq", "data=2,fsdp=2,model=2", {}, marks=pytest.mark.trial),
        pytest.param("moe", "fsdp=2,expert=2", {}, marks=pytest.mark.trial),
    ],
    ids=lambda x: x if isinstance(x, str) else "adapters" if x else "all weights",
)
def test_mesh_gives_the_same_losses(family: str, mesh: str, changes: dict[str, object], tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[1] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = simulated(8, quickly=True) | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), family, mesh, json.dumps(changes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, cut = json.loads(done.stdout.splitlines()[-1])
    assert len(alone) == 9  # six updates, evaluations at 0, 3 and 6
    assert cut == pytest.approx(alone, rel=1e-5)
