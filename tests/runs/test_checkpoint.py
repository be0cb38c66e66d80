"""Checkpoints: exact, the latest and the best kept, safe beside readers, and quiet."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_state import TARGET, bits, make_state, two_saved

from linnet.core.errors import UserError
from linnet.core.pytree import named_leaves
from linnet.runs.checkpoint import reader as snapshot
from linnet.runs.checkpoint.manager import Checkpoints


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Checkpoints]:
    with two_saved(tmp_path / "checkpoints") as saver:
        yield saver


def test_round_trip_is_exact_in_values_dtypes_and_structure(saved: Checkpoints, tmp_path: Path) -> None:
    moved = shutil.copytree(saved.folder, tmp_path / "moved")
    restored = Checkpoints(moved, keep=1).restore(TARGET)
    assert bits(restored.state) == bits(make_state(2))
    assert jax.tree.structure(restored.state) == jax.tree.structure(make_state(2))
    assert (restored.step, restored.extra) == (2, {"seed": 2})
    assert bits(saved.restore(TARGET, 1).state) == bits(make_state(1))
    again = jax.random.normal(restored.state.key[0], (3,))
    assert np.array_equal(again, jax.random.normal(make_state(2).key[0], (3,)))


def test_restore_follows_the_sharding_of_the_target(saved: Checkpoints) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), TARGET)
    restored = saved.restore(target).state
    assert restored.layers[0].kernel.sharding == sharding
    assert bits(restored) == bits(make_state(2))


def test_renamed_field_keeps_its_name_in_checkpoints(tmp_path: Path) -> None:
    state = {"consecutive_nonfinite": jnp.int32(3), "step": jnp.int32(7)}
    with Checkpoints(tmp_path, keep=1) as saver:
        saver.save(7, state, extra={}, wait=True)
        assert set(snapshot.checksums(saver.path(7))) == {"bad_run", "step"}
        assert bits(saver.restore(jax.eval_shape(lambda: state)).state) == bits(state)
        counter = {"consecutive_nonfinite": jax.ShapeDtypeStruct((), jnp.int32)}
        assert int(saver.restore(counter, partial=True).state["consecutive_nonfinite"]) == 3


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    saver = Checkpoints(tmp_path, keep=9)
    state = {f"w{i}": jnp.full((64, 1024), float(i)) for i in range(8)}
    expected, target = bits(state), jax.eval_shape(lambda: state)
    jax.block_until_ready(overwrite({name: jnp.copy(leaf) for name, leaf in state.items()}))
    saver.save(1, state, extra={})
    changed = jax.block_until_ready(overwrite(state))
    assert state["w0"].is_deleted()
    saver.close()
    assert bits(saver.restore(target).state) == expected != bits(changed)


def test_another_model_is_rejected_with_every_difference_named(saved: Checkpoints) -> None:
    target = {
        **{name: leaf for name, leaf in named_leaves(TARGET) if name != "key_data"},
        "step": jax.ShapeDtypeStruct((), jnp.float32),
        "layers/0/kernel": jax.ShapeDtypeStruct((4, 7), jnp.float32),
        "new": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    with pytest.raises(UserError) as rejection:
        saved.restore(target, set_aside=True)
    message = str(rejection.value)
    assert "missing in it: new;" in message
    assert "not known to this run: key_data;" in message
    assert "layers/0/kernel (float32[64, 48], not float32[4, 7])" in message
    assert "step (int32[], not float32[])" in message
    assert saved.steps() == [1, 2]


def test_keeps_the_latest_and_the_best(tmp_path: Path) -> None:
    saver = Checkpoints(tmp_path, keep=2)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 1.5}
    for step, loss in losses.items():
        saver.save(step, {"x": jnp.full((3,), step)}, extra={})
        saver.mark_best(step, loss)  # The save is still in flight.
    saver.close()
    assert saver.steps() == [2, 4, 5]
    later = Checkpoints(tmp_path, keep=2)
    assert (later.latest(), later.best()) == (5, 2)
    assert later.restore({"x": jax.ShapeDtypeStruct((3,), jnp.int32)}, "best").state["x"][0] == 2
    later.mark_best(5, 0.5)
    assert (later.steps(), later.best()) == ([4, 5], 5)
    assert {entry.name for entry in tmp_path.iterdir()} == {"000000004", "000000005", "best.json"}


def test_no_old_checkpoint_is_deleted_before_the_new_one_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Checkpoints(tmp_path, keep=1)
    seen: list[list[int]] = []
    prune = Checkpoints._prune
    monkeypatch.setattr(Checkpoints, "_prune", lambda self: (seen.append(self.steps()), prune(self)))
    for step in (1, 2, 3):
        saver.save(step, {"x": jnp.zeros(3)}, extra={}, wait=True)
    assert seen == [[1], [1, 2], [2, 3]]
    assert saver.steps() == [3]
    saver.close()


def test_existing_step_is_not_overwritten(saved: Checkpoints) -> None:
    saved.save(2, make_state(7), extra={}, wait=True)
    assert bits(saved.restore(TARGET).state) == bits(make_state(2))


def test_empty_folder_and_an_unknown_step_are_rejected(saved: Checkpoints, tmp_path: Path) -> None:
    for wanted in ("latest", "best", 3):
        with pytest.raises(UserError, match=r"There is no checkpoint in .*Fix: train the run first"):
            Checkpoints(tmp_path / "none", keep=1).restore(TARGET, wanted)
    with pytest.raises(UserError, match=r"step is 3.*use latest, or one of \[1, 2\]"):
        saved.restore(TARGET, 3)
    with pytest.raises(UserError, match=r"step is 'best'.*evaluated"):
        saved.restore(TARGET, "best")
    with pytest.raises(UserError, match=r"checkpoint.keep is 0"):
        Checkpoints(tmp_path, keep=0)


def test_reader_is_not_confused_by_a_checkpoint_deleted_meanwhile(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training commits step 3 and deletes step 2 just when another process begins to read step 2."""
    reader, read, calls = Checkpoints(saved.folder, keep=1), snapshot.read_checkpoint, []

    def delete_first(path: Path, target: Any, **how: Any) -> Any:
        if not calls:
            shutil.copytree(saved.folder / "000000002", saved.folder / "000000003")
            body = json.loads((path / "manifest" / "manifest.json").read_text()) | {"step": 3}
            del body["crc32"]
            body["crc32"] = snapshot.body_checksum(body)
            (saved.folder / "000000003" / "manifest" / "manifest.json").write_text(json.dumps(body))
            shutil.rmtree(path)
        calls.append(path)
        return read(path, target, **how)

    monkeypatch.setattr(snapshot, "read_checkpoint", delete_first)
    assert reader.restore(TARGET).step == 3
    assert "damaged" not in caplog.text


def test_readers_leave_the_temporary_folder_of_a_running_save_alone(saved: Checkpoints) -> None:
    running = saved.folder / "000000003.orbax-checkpoint-tmp"
    running.mkdir()
    reader = Checkpoints(saved.folder, keep=1)
    assert reader.restore(TARGET).step == 2
    assert (reader.steps(), running.exists()) == ([1, 2], True)
    reader.restore(TARGET, set_aside=True)  # Now it is a trainer, which holds the run's lock.
    assert not running.exists()


SAVE_ONE = """
import sys
from pathlib import Path
import jax.numpy as jnp
from linnet.runs.checkpoint.manager import Checkpoints
state = {f"w{i}": jnp.ones((256, 1024)) for i in range(8)}
if sys.argv[2] == "with":
    with Checkpoints(Path(sys.argv[1]), keep=1) as saver:
        saver.save(1, state, extra={})
        raise SystemExit(3)
saver = Checkpoints(Path(sys.argv[1]), keep=1)
saver.save(1, state, extra={})
raise SystemExit(3)
"""


@pytest.mark.parametrize("way", ["with", "without"])
def test_process_exits_quickly_with_its_own_code(tmp_path: Path, way: str) -> None:
    """`with` commits what is in flight. Without it, the save may be lost, but the process must not hang."""
    child = subprocess.run([sys.executable, "-c", SAVE_ONE, str(tmp_path), way], timeout=30, capture_output=True)
    assert (child.returncode, child.stdout, child.stderr) == (3, b"", b"")
    assert way == "without" or Checkpoints(tmp_path, keep=1).steps() == [1]


def test_orbax_logging_is_silenced_and_no_other(saved: Checkpoints, capfd: pytest.CaptureFixture[str]) -> None:
    from absl import logging as absl_logging

    saved.save(3, make_state(3), extra={}, wait=True)
    assert capfd.readouterr() == ("", "")
    record = logging.LogRecord("absl", logging.WARNING, "/x/orbax/checkpoint/y.py", 1, "hidden", None, None)
    assert not absl_logging.get_absl_logger().filter(record)
    record = logging.LogRecord("absl", logging.WARNING, "/x/mine.py", 1, "shown", None, None)
    assert absl_logging.get_absl_logger().filter(record)
