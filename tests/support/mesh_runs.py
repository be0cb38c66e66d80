"""Whole runs on meshes of simulated devices, trained by the loop itself: what must come out the same on all of them.

`python -m mesh_runs FOLDER '[["vq", "data=2"], ..]'` trains each in FOLDER/CASE MESH, in one process with 8 devices.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from compiler_flags import simulated

DEVICES = 8
STEPS = 6
# Widths of 32: at 16 by 16 the compiler's vectoriser takes minutes over one of moe's kernels.
WIDE = {"model.d_model": 32, "model.d_k": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vq": ("vq", {**WIDE, "train.ema_decay": 0.9}),
    "one head": ("vq", {**WIDE, "model.n_head": 1, "model.d_v": 32, "train.accumulate": 2}),
    "vq experts": ("vq", {**WIDE, "model.n_expert": 4}),
    "moe": ("moe", {**WIDE, "model.n_kv_head": 2}),
    "prior": ("prior", {}),
}
ALL = {
    "vq": ["data=2", "data=4", "data=8", "fsdp=2", "fsdp=8", "model=2", "data=2,fsdp=2", "data=2,fsdp=2,model=2"],
    "one head": ["data=2", "fsdp=2", "model=2", "model=4", "model=8", "data=2,model=2", "fsdp=2,model=4"],
    "vq experts": ["expert=2", "expert=4", "model=2,expert=4", "data=2,model=2,expert=2"],
    "moe": ["data=8", "fsdp=4", "model=2", "expert=2", "expert=4", "data=2,expert=4", "fsdp=2,model=2,expert=2"],
    "prior": ["data=2", "data=8", "fsdp=4", "model=2", "data=2,fsdp=2,model=2"],
}
"""Every axis alone on 2, 4 or 8 devices, and together."""


def config(case: str, mesh: str, source: Path) -> Any:
    """The run of a case, small but with all that a run does: evaluation, a sample, checkpoints."""
    import tiny

    family, changes = CASES[case]
    if family == "prior":
        return _prior(mesh)
    cfg = tiny.config(source, family, **changes, **{"data.batch_size": 16})  # pyright: ignore[reportArgumentType]
    return _short(dataclasses.replace(cfg, mesh=mesh))


def _short(cfg: Any) -> Any:
    optim = dataclasses.replace(cfg.optim, steps=STEPS, warmup_steps=2)
    train = dataclasses.replace(
        cfg.train, log_every=1, eval_every=STEPS // 2, checkpoint_every=STEPS // 2, sample_tokens=8, eval_sequences=4
    )
    return dataclasses.replace(cfg, optim=optim, train=train)


def _prior(mesh: str) -> Any:
    from linnet.config.schema import EMOJI_PAIRS, OptimConfig, PairsConfig, RunConfig, TrainConfig
    from linnet.models.prior.config import PriorConfig

    model = PriorConfig(dim=256, text_dim=256, depth=2, n_head=4, d_head=16, ff_mult=1, timesteps=20)
    data = PairsConfig(source=EMOJI_PAIRS, batch_size=16)
    train = TrainConfig(ema_decay=0.9, eval_timesteps=(4,), checkpoint_minutes=0)
    optim = OptimConfig(lr=1e-3, clip=1.0)
    return _short(RunConfig(preset="tiny", family="prior", model=model, data=data, optim=optim, train=train, mesh=mesh))


def run_folder(folder: Path, case: str, mesh: str) -> Path:
    return folder / f"{case} {mesh or 'alone'}"


def train_all(folder: Path, wanted: list[tuple[str, str]], timeout: float) -> None:
    """In a process of its own: the number of devices is fixed when JAX starts."""
    here = Path(__file__).parent
    paths = [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = simulated(DEVICES, quickly=True) | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "mesh_runs", str(folder), json.dumps(wanted)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def losses(run: Path) -> dict[int, float]:
    """Of training, by step; every step once."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]
    assert len(found) == len(dict(found)), "a step was logged twice"
    return dict(found)


def evaluations(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "eval"}


def samples(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "samples").iterdir())}


def weights(run: Path) -> dict[str, np.ndarray]:
    """All that the last checkpoint holds."""
    from linnet.core.pytree import named_leaves
    from linnet.runs.load import open_state

    _, state, _ = open_state(run, "latest")
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state)}


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> tuple[float, str]:
    """Of any leaf, relative to the largest value in it."""
    assert a.keys() == b.keys()

    def difference(name: str) -> float:
        left, right = a[name].astype(np.float64), b[name].astype(np.float64)
        return float(np.max(np.abs(left - right), initial=0.0) / max(np.max(np.abs(left), initial=0.0), 1e-30))

    return max((difference(name), name) for name in a)


def main() -> None:
    folder = Path(sys.argv[1])
    from linnet.runs.folder import RunFolder
    from linnet.train.loop import train

    for case, mesh in json.loads(sys.argv[2]):
        cfg = config(case, mesh, folder / "corpus.txt")
        train(cfg, RunFolder(run_folder(folder, case, mesh)), quiet=True)


if __name__ == "__main__":
    main()
