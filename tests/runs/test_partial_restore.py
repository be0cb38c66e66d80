"""Opening weights reads the weights only: the optimizer state, the carry and the other set of weights stay on the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny
from checkpoint_state import TARGET, bits, make_state, two_saved
from run_comparison import assert_same_bits

from linnet.core.errors import UserError
from linnet.core.pytree import named_leaves, replace
from linnet.models import registry
from linnet.optim.optimizer import optimizer
from linnet.runs.checkpoint import reader
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.load import open_run, open_state, write_run
from linnet.runs.state import evaluated_weights, fresh_state, model_weights

PART = replace(TARGET, opt_state=None, carry=None, key=None, key_data=None, step=None)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Checkpoints]:
    with two_saved(tmp_path / "checkpoints") as saver:
        yield saver


def forge(saved: Checkpoints, name: str) -> None:
    """Gives one leaf of step 2 another checksum, in a manifest that is sound by itself."""
    path = saved.folder / "000000002" / "manifest" / "manifest.json"
    body = json.loads(path.read_text())
    body.pop("crc32")
    body["leaves"][name]["sum"] ^= 1
    path.write_text(json.dumps(body | {"crc32": reader.body_checksum(body)}))


def test_part_of_a_state_is_read_exactly(saved: Checkpoints) -> None:
    restored = saved.restore(PART, 2, partial=True)
    full = bits(make_state(2))
    assert bits(restored.state) == {name: value for name, value in full.items() if name.startswith("layers/")}
    assert (restored.step, restored.extra) == (2, {"seed": 2})
    assert bits(saved.restore(PART, partial=True).state) == bits(restored.state)


def test_without_partial_a_part_is_another_model(saved: Checkpoints) -> None:
    with pytest.raises(UserError, match="not known to this run: carry"):
        saved.restore(PART, 2)


def test_only_restored_arrays_are_verified(saved: Checkpoints) -> None:
    opt = next(name for name in bits(make_state(2)) if name.startswith("opt_state/") and "kernel" in name)
    forge(saved, opt)
    assert bits(saved.restore(PART, 2, partial=True).state)
    with pytest.raises(UserError, match="does not match its checksum"):
        saved.restore(TARGET, 2)
    forge(saved, "layers/0/kernel")
    with pytest.raises(UserError, match="layers/0/kernel does not match its checksum"):
        saved.restore(PART, 2, partial=True)
    assert saved.restore(PART, partial=True).step == 1  # the latest that is not damaged


def test_part_of_another_model_is_rejected(saved: Checkpoints) -> None:
    smaller = replace(PART, layers=PART.layers[:1])
    with pytest.raises(UserError, match="not known to this run: layers/1/kernel"):
        saved.restore(smaller, 2, partial=True)
    larger = replace(PART, layers=(*PART.layers, PART.layers[0]))
    with pytest.raises(UserError, match="missing in it: layers/2/kernel"):
        saved.restore(larger, 2, partial=True)
    struct = jax.ShapeDtypeStruct((64, 47), PART.layers[0].kernel.dtype)
    other = replace(PART, layers=(replace(PART.layers[0], kernel=struct), PART.layers[1]))
    with pytest.raises(UserError, match="of another kind: layers/0/kernel"):
        saved.restore(other, 2, partial=True)


@pytest.mark.parametrize("ema", [0.9, None])
def test_loading_a_run_reads_one_set_of_weights(
    ema: float | None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny.config(source, **{"train.ema_decay": ema})
    family = registry.get("vq")
    state = fresh_state(family, cfg, optimizer(cfg.optim, family.param_specs(cfg.model)))
    write_run(tmp_path, cfg, state.params, state.buffers)
    read: list[str] = []
    real = reader._read_arrays

    def watched(path: Path, target: Any) -> Any:
        read.extend(name for name, _ in named_leaves(target))
        return real(path, target)

    monkeypatch.setattr(reader, "_read_arrays", watched)
    run = open_run(tmp_path)
    assert {name.partition("/")[0] for name in read} == {"ema" if ema else "params", "buffers"}
    full = open_state(tmp_path, "latest")[1]
    assert_same_bits((run.params, run.buffers), model_weights(full))
    both = open_state(tmp_path, "latest", part=evaluated_weights)[1]
    assert_same_bits((both.params, both.ema, both.buffers), (full.params, full.ema, full.buffers))
    assert both.opt_state is None


MEASURE = """
import sys
from pathlib import Path
import jax, orbax.checkpoint
from linnet.runs.load import open_run, open_state
jax.numpy.zeros(1).block_until_ready()
def peak():  # of this program: ru_maxrss would count what its parent held when it was forked
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
kept = open_run(Path(sys.argv[1])) if sys.argv[2] == "weights" else open_state(Path(sys.argv[1]), "latest")
print(peak() - before)
"""


@pytest.mark.trial
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_opening_weights(source: Path, tmp_path: Path) -> None:
    """In processes of their own: a peak never falls."""
    cfg = tiny.config(source)
    model = replace(cfg.model, d_model=512, d_k=128, d_v=1024, n_layer=4)
    cfg = replace(cfg, model=model)
    family = registry.get("vq")
    state = fresh_state(family, cfg, optimizer(cfg.optim, family.param_specs(model)))
    write_run(tmp_path, cfg, state.params, state.buffers)
    n_bytes = sum(leaf.nbytes for _, leaf in named_leaves(state.params))
    assert n_bytes > 80e6

    def peak(what: str) -> int:
        command = [sys.executable, "-c", MEASURE, str(tmp_path), what]
        return 1024 * int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert peak("weights") < 2.5 * n_bytes < 4 * n_bytes < peak("state")
