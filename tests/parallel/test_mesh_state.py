"""Where a run's state lies on a mesh, without running anything: each device its part, from the first moment on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from compiler_flags import simulated

PLACES = """
import dataclasses, json
import jax
from linnet.config import presets
from linnet.parallel import sharding
from linnet.models import registry
from linnet.core.pytree import named_leaves
from linnet.optim.optimizer import optimizer
from linnet.runs.state import abstract_state, make_state

mesh = sharding.open_mesh("fsdp=4,model=2")
found = {}
for name in ("adamw", "lion", "adafactor", "muon"):
    cfg = presets.get("bench-s")
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, name=name))
    family = registry.get(cfg.family)
    rule = optimizer(cfg.optim, family.param_specs(cfg.model))
    state = abstract_state(family, cfg, rule, mesh)
    large = [(n, x) for n, x in named_leaves(state) if x.size > 10_000]
    whole = [n for n, x in large if x.sharding.is_fully_replicated and not n.startswith("buffers")]
    found[name] = {"large": len(large), "whole": whole}
    if name == "adamw":
        with jax.set_mesh(mesh):
            compiled = make_state(family, cfg, rule, mesh).lower().compile()
        memory = compiled.memory_analysis()
        found["bytes"] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        found["held"] = sharding.bytes_per_device(state)
        found["made"] = memory.output_size_in_bytes + memory.temp_size_in_bytes
        found["collectives"] = [c for c in ("all-gather", "all-reduce", "all-to-all") if c + "(" in compiled.as_text()]
print(json.dumps(found))
"""


def on_eight_devices(program: str, *args: str) -> Any:
    command = [sys.executable, "-c", program, *args]
    environment = simulated(8, quickly=True)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_no_device_ever_stores_more_than_its_shard() -> None:
    found = on_eight_devices(PLACES)
    for name in ("adamw", "lion", "adafactor", "muon"):
        assert found[name]["large"] >= 5
        assert not found[name]["whole"], f"{name} keeps whole: {found[name]['whole']}"
    assert found["held"] < found["bytes"] / 3, "weights and their moments are cut by both axes, the codebooks by none"
    assert found["made"] < found["bytes"] / 2, "nobody draws all of it to keep a part"
    assert not found["collectives"], "each device draws its own part"


GIVEN = """
import dataclasses, json, sys
from pathlib import Path
import jax, numpy as np
from linnet.config import presets
from linnet.core import params as weights
from linnet.core import rng
from linnet.parallel import sharding
from linnet.models import registry
from linnet.core.pytree import named_leaves
from linnet.runs import weights as stored_weights
from linnet.optim.optimizer import optimizer
from linnet.train.parent import init_from_weights
from linnet.runs.state import abstract_state

cfg, run = presets.get("quickstart"), Path(sys.argv[1]) / "run"
family = registry.get(cfg.family)
specs = family.param_specs(cfg.model)
drawn = weights.init(specs, rng.root(3))
stored_weights.write_stored_run(run, cfg, stored_weights.model_leaves(drawn), lambda _: None, lambda _: None)

mesh = sharding.open_mesh("fsdp=4,model=2")
rule = optimizer(cfg.optim, specs)
state = init_from_weights(family, cfg, rule, mesh, run)
placed = [x.sharding for x in jax.tree.leaves(state.params)]
wanted = abstract_state(family, cfg, rule, mesh)
alike = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), state, wanted)
same = jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), state.params, drawn)
print(json.dumps({
    "same": all(jax.tree.leaves(same)),
    "elsewhere": [name for name, ok in named_leaves(alike) if not ok],
    "cut": sum(not one.is_fully_replicated for one in placed),
}))
"""


def test_weights_from_a_file_are_sharded_one_by_one_bit_for_bit(tmp_path: Path) -> None:
    found = on_eight_devices(GIVEN, str(tmp_path))
    assert found["same"]
    assert not found["elsewhere"]
    assert found["cut"] >= 5
