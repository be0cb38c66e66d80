"""`group_wd_params=False` of DALLE2-pytorch decays vectors too: `linnet verify` reads it, trainer checkpoints keep it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from linnet.config.schema import OptimConfig
from linnet.convert.dalle2.export import parameter_groups
from linnet.core.params import map_specs
from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import param_specs
from linnet.optim.optimizer import optimizer
from linnet.verify import verify_file

GOLDEN = Path(__file__).parents[1] / "goldens" / "prior" / "trainer_noclip_nowarm.npz"


def first_update(*, decayed: bool, said: bool) -> dict[str, Any]:
    """The first update alone. AdamW subtracts lr * wd * p apart from all else, so that decay of vectors can be written by hand."""
    with np.load(GOLDEN) as file:
        arrays = dict(file.items())
    meta = json.loads(str(arrays["meta"]))
    lr, wd = meta["config"]["lr"], meta["config"]["wd"]
    meta["config"]["group_wd_params"] = not said
    made: dict[str, Any] = {"meta": np.array(json.dumps(meta))}
    for name, value in arrays.items():
        if name.startswith("in/"):
            made[name] = value[:1]
        elif name.startswith("params/"):
            made[name] = value
        elif name.startswith("out/step1/model/"):
            start = arrays[f"params/{name.removeprefix('out/step1/model/')}"]
            vector = decayed and value.ndim == 1 and value.dtype == np.float32
            made[name] = value - np.float32(lr * wd) * start if vector else value
    return made | {"out/lr_used": arrays["out/lr_used"][:1]}


@pytest.mark.parametrize(("decayed", "said"), [(True, True), (True, False), (False, True)])
def test_verify_reads_the_switch(tmp_path: Path, decayed: bool, said: bool) -> None:
    path = tmp_path / "trainer.npz"
    np.savez(path, **first_update(decayed=decayed, said=said))
    found = verify_file(path)
    assert len(found.checks) > 10
    wrong = [check.name for check in found.checks if not check.passed]
    assert bool(wrong) == (decayed != said), wrong


def test_optimizer_decays_the_selected_parameters() -> None:
    specs = param_specs(VQConfig(n_vocab=8, d_model=4, d_k=2, d_v=2, n_code=2, n_layer=1, e_preln=True, pe_abs=True))
    params = map_specs(lambda spec: jax.numpy.ones(spec.shape), specs)
    still = jax.tree.map(jax.numpy.zeros_like, params)
    for vectors in (False, True):
        rule = optimizer(OptimConfig(decay=0.25, decay_vectors=vectors), specs)
        updates, _ = jax.jit(rule.update)(still, rule.init(params), params)
        assert float(updates.embed[0, 0]) == float(updates.position_scale) == -0.25
        assert float(updates.out_gain[0]) == float(updates.units.u[0, 0]) == (-0.25 if vectors else 0.0)


def test_one_group_where_all_decay() -> None:
    names = {"net.a.weight": np.zeros((2, 2)), "net.a.bias": np.zeros(2)}
    assert parameter_groups(names, separate_vectors=False) == [["net.a.weight", "net.a.bias"]]
    assert parameter_groups(names, separate_vectors=True) == [["net.a.weight"], ["net.a.bias"]]
