"""Nothing that was saved is lost by damage, a kill or a full disk, and no wrong value ever comes back."""

from __future__ import annotations

import gc
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
import pytest
from checkpoint_state import TARGET, bits, make_state, two_saved

from linnet.core.errors import UserError
from linnet.runs.checkpoint import manager as checkpoint
from linnet.runs.checkpoint.manager import CheckpointError, Checkpoints


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Checkpoints]:
    with two_saved(tmp_path / "checkpoints") as saver:
        yield saver


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def test_every_kind_of_corruption_is_detected_or_harmless(
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
        for corrupt in harms:
            output = len(caplog.records)
            corrupt(step / name)
            restored = saved.restore(TARGET)
            assert bits(restored.state) == right[restored.step], f"wrong values after damage to {name}"
            if restored.step == 1:
                fell_back.add(name.parts[-2] if name.parts[-2:-1] else name.name)
                words = "".join(record.getMessage() for record in caplog.records[output:])
                assert "step 2 is damaged" in words
                assert "Step 1 is used instead" in words
            shutil.rmtree(step)
            shutil.copytree(spare, step)
    assert {"manifest", "state", "d"} <= fell_back
    gc.collect()
    assert {record.name for record in caplog.records} <= {"linnet"}, "Orbax's abandoned tasks were heard"


def test_corruption_to_array_data_is_found_by_the_checksum(
    saved: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    needle = np.asarray(make_state(2).layers[0].kernel).tobytes()
    holder = next(path for path in files(saved.folder / "000000002") if needle in path.read_bytes())
    flip(holder, holder.read_bytes().index(needle) + 3)
    assert saved.restore(TARGET).step == 1
    assert "layers/0/kernel does not match its checksum" in caplog.text


def test_corrupt_step_requested_by_number_is_rejected(saved: Checkpoints) -> None:
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


def test_unreadable_checkpoints_are_not_renamed(saved: Checkpoints) -> None:
    for step in ("000000001", "000000002"):
        shutil.rmtree(saved.folder / step / "state")
    with pytest.raises(UserError, match=r"No checkpoint .* can be read \(step 2: .*; step 1: .*Fix: "):
        saved.restore(TARGET, set_aside=True)
    assert saved.steps() == [1, 2]


def test_unreadable_best_file_is_reported_and_not_fatal(saved: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    saved.mark_best(1, 1.0)
    (saved.folder / "best.json").write_text('{"1": ')
    assert saved.best() is None
    assert "best.json cannot be read" in caplog.text


def test_full_disk_is_detected_in_advance(saved: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
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


def fill(path: Path) -> None:
    disk = os.statvfs(path.parent)
    path.write_bytes(bytes(disk.f_bavail * disk.f_bsize))


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
    fill(small_disk / "filler")
    with pytest.raises(CheckpointError, match=r"step 2"):
        saver.save(2, state, extra={}, wait=True)
    fill(small_disk / "more")  # what the failed save had open was freed a moment later
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
from linnet.runs.checkpoint.manager import Checkpoints
saver = Checkpoints(Path(sys.argv[1]), keep=2)
for step in range((saver.latest() or 0) + 1, 100_000):
    saver.save(step, {f"w{i}": jnp.full((64, 1024), float(step)) for i in range(8)}, extra={})
    print(step, flush=True)
"""


def test_kill_in_mid_save_never_leaves_a_wrong_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = {f"w{i}": jax.ShapeDtypeStruct((64, 1024), jnp.float32) for i in range(8)}
    committed, interrupted = 0, False
    for attempt in range(40):
        if attempt >= 3 and interrupted:
            break  # more kills only where none of the first three came in the middle of a save
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as child:
            try:
                assert child.stdout is not None
                lines = [child.stdout.readline() for _ in range(3)]
                time.sleep((0.0, 0.006, 0.015)[attempt % 3])
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
