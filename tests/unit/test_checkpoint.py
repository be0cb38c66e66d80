"""Checkpoints: exact, atomic, proven by checksums; nothing that was saved is lost by damage, a kill or a full disk."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from linnet.errors import UserError
from linnet.pytree import named_leaves, pytree
from linnet.train import checkpoint, snapshot
from linnet.train.checkpoint import CheckpointError, Checkpoints


@pytree
class Layer:
    kernel: Array
    scale: Array
    bias: Array | None


@pytree
class State:
    step: Array
    layers: tuple[Layer, ...]
    opt_state: Any
    carry: dict[str, Array]
    key: Array
    key_data: Array


def make_state(seed: int) -> State:
    """What a trainer holds, with the values that inexact ways would lose: NaN payloads, -0.0, tiny and huge ones."""
    rng = np.random.default_rng(seed)
    odd = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32).view(np.float32)
    brain = jnp.asarray(rng.standard_normal((3, 5)), jnp.bfloat16).at[0, 0].set(-0.0).at[0, 1].set(jnp.nan)
    layers: Any = tuple(
        Layer(kernel=jnp.asarray(rng.standard_normal((64, 48)), jnp.float32), scale=brain, bias=None) for _ in range(2)
    )
    key = jax.random.key(seed)
    return State(
        step=jnp.int32(seed),
        layers=layers,
        opt_state=optax.adamw(1e-3).init(layers),
        carry={"odd": jnp.asarray(odd), "empty": jnp.zeros((0, 3)), "count": jnp.uint32(2**32 - 1)},
        key=jax.random.split(key, 2),
        key_data=jax.random.key_data(key),
    )


TARGET = jax.eval_shape(lambda: make_state(0))


def bits(tree: Any) -> dict[str, bytes]:
    def content(leaf: Any) -> bytes:
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return f"{leaf.dtype}{leaf.shape}".encode() + np.asarray(leaf).tobytes()

    return {name: content(leaf) for name, leaf in named_leaves(tree)}


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Checkpoints]:
    """Steps 1 and 2, committed."""
    saver = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (1, 2):
        saver.save(step, make_state(step), extra={"seed": step})
    saver.wait()
    yield saver
    saver.close()


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


def test_another_model_is_refused_with_every_difference_named(saved: Checkpoints) -> None:
    target = {
        **{name: leaf for name, leaf in named_leaves(TARGET) if name != "key_data"},
        "step": jax.ShapeDtypeStruct((), jnp.float32),
        "layers/0/kernel": jax.ShapeDtypeStruct((4, 7), jnp.float32),
        "new": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    with pytest.raises(UserError) as refused:
        saved.restore(target, set_aside=True)
    message = str(refused.value)
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


def test_no_old_checkpoint_goes_before_the_new_one_is_committed(
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


def test_a_step_saved_already_stays_as_it_is(saved: Checkpoints) -> None:
    saved.save(2, make_state(7), extra={}, wait=True)
    assert bits(saved.restore(TARGET).state) == bits(make_state(2))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def test_every_kind_of_damage_is_found_or_harmless(
    saved: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each file in turn is removed, emptied, cut, and flipped at several places: no wrong value ever comes back."""
    step, spare = saved.folder / "000000002", tmp_path / "spare"
    shutil.copytree(step, spare)
    right = {1: bits(make_state(1)), 2: bits(make_state(2))}
    fell_back: set[str] = set()
    rng = np.random.default_rng(0)
    for name in (path.relative_to(spare) for path in files(spare)):
        size = (spare / name).stat().st_size
        harms: list[Any] = [
            lambda path: path.unlink(),
            lambda path, size=size: os.truncate(path, size // 2),
            lambda path, size=size: os.truncate(path, max(0, size - 1)),
            *(lambda path, at=at: flip(path, at) for at in sorted({0, size - 1, *rng.integers(0, size, 2).tolist()})),
        ]
        for harm in harms:
            said = len(caplog.records)
            harm(step / name)
            restored = saved.restore(TARGET)
            assert bits(restored.state) == right[restored.step], f"wrong values after damage to {name}"
            if restored.step == 1:
                fell_back.add(name.parts[-2] if name.parts[-2:-1] else name.name)
                words = "".join(record.getMessage() for record in caplog.records[said:])
                assert "step 2 is damaged" in words
                assert "Step 1 is used instead" in words
            shutil.rmtree(step)
            shutil.copytree(spare, step)
    assert {"manifest", "state", "d"} <= fell_back
    gc.collect()
    assert {record.name for record in caplog.records} <= {"linnet"}, "Orbax's abandoned tasks were heard"


def test_damage_to_array_data_is_found_by_the_checksum(saved: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    needle = np.asarray(make_state(2).layers[0].kernel).tobytes()
    holder = next(path for path in files(saved.folder / "000000002") if needle in path.read_bytes())
    flip(holder, holder.read_bytes().index(needle) + 3)
    assert saved.restore(TARGET).step == 1
    assert "layers/0/kernel does not match its checksum" in caplog.text


def test_a_damaged_step_asked_for_by_name_is_refused(saved: Checkpoints) -> None:
    saved.mark_best(2, 1.0)
    (saved.folder / "000000002" / "manifest" / "manifest.json").unlink()
    for wanted in (2, "best"):
        with pytest.raises(UserError, match=r"step 2 .* is damaged \(manifest.json is missing\).*Fix: use latest"):
            saved.restore(TARGET, wanted)
    assert saved.steps() == [1, 2]


def test_set_aside_renames_and_frees_the_step(saved: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    saved.mark_best(1, 2.0)
    saved.mark_best(2, 1.0)
    for name in ("damaged-000000002", "damaged-000000002-2"):
        (saved.folder / "000000002" / "manifest" / "manifest.json").write_text("{}")
        assert saved.restore(TARGET, set_aside=True).step == 1
        assert f"set aside as {name}" in caplog.text
        assert (saved.folder / name).is_dir()
        assert (saved.steps(), saved.best()) == ([1], 1)
        saved.save(2, make_state(2), extra={}, wait=True)
        assert bits(saved.restore(TARGET).state) == bits(make_state(2))


def test_when_nothing_can_be_read_nothing_is_renamed(saved: Checkpoints) -> None:
    for step in ("000000001", "000000002"):
        shutil.rmtree(saved.folder / step / "state")
    with pytest.raises(UserError, match=r"No checkpoint .* can be read \(step 2: .*; step 1: .*Fix: "):
        saved.restore(TARGET, set_aside=True)
    assert saved.steps() == [1, 2]


def test_an_empty_folder_and_an_unknown_step_are_refused(saved: Checkpoints, tmp_path: Path) -> None:
    for wanted in ("latest", "best", 3):
        with pytest.raises(UserError, match=r"There is no checkpoint in .*Fix: train the run first"):
            Checkpoints(tmp_path / "none", keep=1).restore(TARGET, wanted)
    with pytest.raises(UserError, match=r"step is 3.*use latest, or one of \[1, 2\]"):
        saved.restore(TARGET, 3)
    with pytest.raises(UserError, match=r"step is 'best'.*evaluated"):
        saved.restore(TARGET, "best")
    with pytest.raises(UserError, match=r"checkpoint.keep is 0"):
        Checkpoints(tmp_path, keep=0)


def test_a_reader_is_not_confused_by_a_checkpoint_deleted_meanwhile(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training commits step 3 and deletes step 2 just when another process begins to read step 2."""
    reader, read, calls = Checkpoints(saved.folder, keep=1), snapshot.read, []

    def delete_first(path: Path, target: Any) -> Any:
        if not calls:
            shutil.copytree(saved.folder / "000000002", saved.folder / "000000003")
            body = json.loads((path / "manifest" / "manifest.json").read_text()) | {"step": 3}
            del body["crc32"]
            body["crc32"] = snapshot._body_checksum(body)
            (saved.folder / "000000003" / "manifest" / "manifest.json").write_text(json.dumps(body))
            shutil.rmtree(path)
        calls.append(path)
        return read(path, target)

    monkeypatch.setattr(snapshot, "read", delete_first)
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


def test_an_unreadable_best_file_is_told_and_not_fatal(saved: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    saved.mark_best(1, 1.0)
    (saved.folder / "best.json").write_text('{"1": ')
    assert saved.best() is None
    assert "best.json cannot be read" in caplog.text


def test_full_disk_is_foreseen(saved: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_free_bytes", lambda folder: 10)
    with pytest.raises(CheckpointError, match=r"too full for the checkpoint of step 3.*0\.0 MB free.*\[1, 2\].*Fix: "):
        saved.save(3, make_state(3), extra={})
    assert bits(saved.restore(TARGET).state) == bits(make_state(2))
    monkeypatch.undo()
    saved.save(3, make_state(3), extra={}, wait=True)
    assert saved.steps() == [1, 2, 3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_full_disk_in_the_middle_of_a_save_loses_nothing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state = {f"w{i}": jnp.asarray(np.random.default_rng(i).random((64, 1024), np.float32)) for i in range(10)}
    target = jax.eval_shape(lambda: state)
    saver = Checkpoints(small_disk / "checkpoints", keep=1)
    saver.save(1, state, extra={}, wait=True)
    monkeypatch.setattr(checkpoint, "_free_bytes", lambda folder: 10**9)
    for _ in range(2):
        saver.save(2, state, extra={})
        with pytest.raises(CheckpointError, match=r"disk is too full.*step 2.*2\.9 MB are needed.*intact: \[1\]"):
            saver.wait()
    assert [entry.name for entry in saver.folder.iterdir()] == ["000000001"]
    assert bits(saver.restore(target).state) == bits(state)
    (small_disk / "filler").write_bytes(bytes((os.statvfs(small_disk).f_bavail) * os.statvfs(small_disk).f_bsize))
    with pytest.raises(CheckpointError, match=r"step 2"):
        saver.save(2, state, extra={}, wait=True)
    with pytest.raises(CheckpointError, match=r"best.json cannot be written"):
        saver.mark_best(1, 1.0)
    (small_disk / "filler").unlink()
    smaller = {"w0": state["w0"]}
    saver.save(3, smaller, extra={}, wait=True)
    saver.close()
    assert bits(saver.restore(jax.eval_shape(lambda: smaller)).state) == bits(smaller)
    assert capfd.readouterr() == ("", "")


SAVE_FOREVER = """
import sys
from pathlib import Path
import jax.numpy as jnp
from linnet.train.checkpoint import Checkpoints
saver = Checkpoints(Path(sys.argv[1]), keep=2)
for step in range((saver.latest() or 0) + 1, 100_000):
    saver.save(step, {f"w{i}": jnp.full((64, 1024), float(step)) for i in range(8)}, extra={})
    print(step, flush=True)
"""


def test_kill_in_mid_save_never_leaves_a_wrong_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = {f"w{i}": jax.ShapeDtypeStruct((64, 1024), jnp.float32) for i in range(8)}
    committed, interrupted = 0, False
    for pause in (0.0, 0.006, 0.015):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as child:
            try:
                assert child.stdout is not None
                lines = [child.stdout.readline() for _ in range(3)]
                time.sleep(pause)
            finally:
                os.kill(child.pid, signal.SIGKILL)
        interrupted |= any("tmp" in entry.name for entry in tmp_path.iterdir())
        restored = Checkpoints(tmp_path, keep=2).restore(target)
        assert restored.step >= int(lines[-1]) - 1 > committed, "a committed step is lost"
        assert {float(leaf[0, 0]) for leaf in restored.state.values()} == {restored.step}
        committed = restored.step
    assert interrupted, "no kill came in the middle of a save: the test proves nothing"
    assert "damaged" not in caplog.text
    writer = Checkpoints(tmp_path, keep=2)
    writer.save(committed + 1, {"x": jnp.zeros(2)}, extra={})
    writer.close()
    assert all(entry.name.isdecimal() for entry in tmp_path.iterdir())


SAVE_ONE = """
import sys
from pathlib import Path
import jax.numpy as jnp
from linnet.train.checkpoint import Checkpoints
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
def test_a_process_ends_soon_and_with_its_own_code(tmp_path: Path, way: str) -> None:
    """`with` commits what is in flight. Without it, the save may be lost, but the process must not hang."""
    child = subprocess.run([sys.executable, "-c", SAVE_ONE, str(tmp_path), way], timeout=30, capture_output=True)
    assert (child.returncode, child.stdout, child.stderr) == (3, b"", b"")
    assert way == "without" or Checkpoints(tmp_path, keep=1).steps() == [1]


def test_orbax_says_nothing_and_others_still_may(saved: Checkpoints, capfd: pytest.CaptureFixture[str]) -> None:
    from absl import logging as absl_logging

    saved.save(3, make_state(3), extra={}, wait=True)
    assert capfd.readouterr() == ("", "")
    record = logging.LogRecord("absl", logging.WARNING, "/x/orbax/checkpoint/y.py", 1, "hidden", None, None)
    assert not absl_logging.get_absl_logger().filter(record)
    record = logging.LogRecord("absl", logging.WARNING, "/x/mine.py", 1, "shown", None, None)
    assert absl_logging.get_absl_logger().filter(record)
