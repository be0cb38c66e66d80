"""Checkpoints move between meshes and numbers of processes, exactly; each process writes and reads its share."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import checkpoint_mesh as cm
import numpy as np
import pytest

from linnet.runs.checkpoint import checksum
from linnet.runs.checkpoint.manager import Checkpoints

ON_EIGHT = """
import shutil
import sys
from pathlib import Path
import jax
import checkpoint_mesh as cm
from linnet.runs.checkpoint import writer
from linnet.runs.checkpoint.manager import Checkpoints

folder = Path(sys.argv[1])
writer.CHUNK = 2**20  # So that even these small leaves have several.
eight, one = cm.on_mesh(data=2, fsdp=2, model=2), cm.on_mesh()
others = [one, cm.on_mesh(fsdp=4), cm.on_mesh(fsdp=2, model=2, expert=2), cm.on_mesh(data=4)]
with Checkpoints(folder, keep=20) as saver:
    saver.save(1, cm.state(1, eight), extra={})
    saver.save(2, cm.state(2, eight), extra={"seed": 2})
    for at, mesh in enumerate(others):
        there = saver.restore(cm.target(mesh), 2)
        placed = all(leaf.sharding == cm.target(mesh)[name].sharding for name, leaf in there.state.items())
        saver.save(10 + at, there.state, extra={}, wait=True)
        back = saver.restore(cm.target(eight), 10 + at)
        cm.say(there=cm.same(there.state, 2), back=cm.same(back.state, 2), placed=placed, extra=there.extra)
        shutil.move(folder / f"{10 + at:09d}", folder.parent / f"moved {at}")

    # What is written is what stood there when `save` returned, although the next steps overwrite it at once.
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    names, start = ("large", "kernel", "long"), cm.expected(0)
    held = {name: cm.state(0, eight)[name] for name in names}
    with Checkpoints(folder.parent / "hammered", keep=9) as hammered:
        for number in range(6):
            hammered.save(number, held, extra={})
            given, held = held, step(held)
            assert given["large"].is_deleted()
        hammered.wait()
        right = {name: start[name] for name in names}
        for number in range(6):
            found = hammered.restore({name: cm.target(one)[name] for name in names}, number).state
            cm.say(intact=all(bool((found[name] == right[name]).all()) for name in names))
            right = {name: leaf + 1 for name, leaf in right.items()}

    # A flipped byte is found on every mesh, and the step before is used.
    cm.flip_a_byte(folder / "000000002")
    for mesh in (eight, *others):
        found = saver.restore(cm.target(mesh))
        cm.say(used=found.step, same=cm.same(found.state, 1))
"""


def test_checkpoint_moves_between_meshes_of_one_process_exactly(tmp_path: Path) -> None:
    said = cm.alone(8, ON_EIGHT, str(tmp_path / "run"))
    assert said[:4] == [{"there": True, "back": True, "placed": True, "extra": {"seed": 2}}] * 4
    assert said[4:10] == [{"intact": True}] * 6
    assert said[10:] == [{"used": 1, "same": True}] * 5
    sums = [
        json.loads((folder / "manifest" / "manifest.json").read_text())["leaves"]
        for folder in (tmp_path / "run" / "000000002", tmp_path / "moved 0", tmp_path / "moved 1", tmp_path / "moved 3")
    ]
    assert all(each == sums[0] for each in sums), "the checksums depend on the mesh"
    assert "sum" in sums[0]["large"]


SAVE_ON_FOUR = """
import os, signal, sys, time
from pathlib import Path
import jax
import checkpoint_mesh as cm
from linnet.runs.checkpoint import checksum
from linnet.runs.checkpoint.manager import CheckpointError, Checkpoints

mesh = cm.on_mesh(fsdp=2, model=2)
with Checkpoints(Path(sys.argv[1]), keep=5) as saver:
    for step in (1, 2):
        saver.save(step, cm.state(step, mesh), extra={"seed": step})
    saver.save(2, cm.state(7, mesh), extra={}, wait=True)  # It is there already.
    saver.mark_best(1, 0.5)
    cm.say(steps=saver.steps(), same=cm.same(saver.restore(cm.target(mesh), "best").state, 1))

    def fail(*_):
        raise OSError(28, "No space left on device")

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    # Process 3 cannot write, process 0 cannot commit what all have written, process 3 dies.
    harms = ((3, checksum, "of_boxes", fail), (0, os, "fsync", fail), (3, checksum, "of_boxes", die))
    for step, (process, module, name, harm) in enumerate(harms, 3):
        right = getattr(module, name)
        setattr(module, name, harm if jax.process_index() == process else right)
        try:
            began = time.monotonic()
            saver.save(step, cm.state(step, mesh), extra={})
            saver.wait()
        except CheckpointError as error:
            cm.say(error=str(error), took=time.monotonic() - began)
        setattr(module, name, right)
    os._exit(0)  # The way out of a cluster that has lost a process is not what is tried here.
"""

RESTORE = """
import sys
from pathlib import Path
import jax
import tensorstore as ts
import checkpoint_mesh as cm
from linnet.runs.checkpoint.manager import Checkpoints

mesh = cm.on_mesh(model=jax.device_count())
with Checkpoints(Path(sys.argv[1]), keep=5) as reader:
    found = reader.restore(cm.target(mesh), set_aside=True)
    read = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")[0]["values"][0]["value"]
    cm.say(step=found.step, same=cm.same(found.state, found.step), extra=found.extra, read=read)
    if len(sys.argv) > 2:
        reader.save(3, cm.state(3, mesh), extra={})
"""


def total(seed: int = 0) -> int:
    return sum(leaf.nbytes for leaf in cm.expected(seed).values())


def written(state: Path) -> list[int]:
    """Bytes by process."""
    return [
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for folder in sorted(state.glob("ocdbt.process_*"))
    ]


@pytest.mark.slow
def test_four_processes_save_their_shards_and_two_or_one_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    four = cm.cluster(4, SAVE_ON_FOUR, str(run))
    assert [code for code, _, _ in four] == [0, 0, 0, -9], four
    for _, said, _ in four:
        assert said[0] == {"steps": [1, 2], "same": True}
        for failure in said[1:3]:
            assert "No space left on device" in failure["error"] or "too full" in failure["error"]
            assert "intact: [1, 2]" in failure["error"]
            assert failure["took"] < 120, "it did not wait for a time limit"
    for _, said, _ in four[:3]:
        assert "another process of this run has ended" in said[3]["error"]
        assert said[3]["took"] < 120
    assert sorted(entry.name for entry in run.iterdir() if "tmp" not in entry.name) == [
        "000000001",
        "000000002",
        "best.json",
    ]
    by_process = written(run / "000000002" / "state")
    assert len(by_process) == 4
    assert max(by_process) < 0.3 * total(), "a process wrote more than its share"
    assert sum(by_process) < 1.05 * total(), "a piece was written twice"

    two = cm.cluster(2, RESTORE, str(run), "and save")
    for code, said, complaints in two:
        assert code == 0, complaints
        assert [said[0][name] for name in ("step", "same", "extra")] == [2, True, {"seed": 2}]
        assert said[0]["read"] < 0.6 * total(), "a process read more than its share"
    assert sorted(entry.name for entry in run.iterdir()) == ["000000001", "000000002", "000000003", "best.json"]

    cm.flip_a_byte(run / "000000003")
    two = cm.cluster(2, RESTORE, str(run))
    for code, said, complaints in two:
        assert code == 0, complaints
        assert (said[0]["step"], said[0]["same"]) == (2, True)
    assert "large does not match its checksum" in two[0][2]
    assert "damaged" not in two[1][2], "each process tells the same"
    assert (run / "damaged-000000003").is_dir()
    (said,) = cm.alone(1, RESTORE, str(run))
    assert (said["step"], said["same"]) == (2, True)


def box(array: np.ndarray, *splits: slice) -> checksum.Box:
    return tuple(cut.start for cut in splits), np.asarray(array[splits])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (5,), (70_001,), (3, 5), (6, 7, 9), (2, 3, 70_000)])
def test_checksum_is_the_sum_of_its_pieces_however_cut(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(len(shape))
    array = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]
    full = checksum.of_boxes([((0,) * len(shape), array)])
    for _ in range(4):
        boxes: list[Any] = [()]
        for size in shape:
            at = sorted({0, size, *rng.integers(0, size + 1, 2).tolist()})
            boxes = [(*splits, slice(a, b)) for splits in boxes for a, b in itertools.pairwise(at)]
        assert checksum.of_boxes([box(array, *splits) for splits in boxes]) == full


def test_checksum_detects_every_flipped_bit_and_swapped_blocks() -> None:
    rng = np.random.default_rng(0)
    array = rng.integers(0, 2**32, (12, 40), np.uint32)
    seen = {checksum.of_box((0, 0), array)}
    for bit in range(32):
        for place in np.ndindex(array.shape):
            array[place] ^= np.uint32(1 << bit)
            seen.add(checksum.of_box((0, 0), array))
            array[place] ^= np.uint32(1 << bit)
    assert len(seen) == 1 + 32 * array.size
    corrupted = [array.copy() for _ in range(6)]
    corrupted[0][[0, 1]] = corrupted[0][[1, 0]]
    corrupted[1][:, [0, 1]] = corrupted[1][:, [1, 0]]
    corrupted[2][:6], corrupted[2][6:] = array[6:], array[:6]
    corrupted[3][0, :2] ^= np.uint32(1 << 31)  # Two signs.
    corrupted[4][:] ^= np.uint32(1 << 31)
    corrupted[5][3] = 0
    found = {checksum.of_box((0, 0), each) for each in corrupted}
    assert len(found) == 6
    assert not found & seen


def test_old_checkpoint_format_is_read_and_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its manifest has a CRC of each whole leaf."""
    import jax
    import jax.numpy as jnp

    from linnet.runs.checkpoint import reader

    state = {"w": jnp.arange(12.0).reshape(3, 4), "empty": jnp.zeros((0, 2)), "n": jnp.int32(3)}
    target = jax.eval_shape(lambda: state)
    with Checkpoints(tmp_path, keep=3) as saver:
        for step in (1, 2):
            saver.save(step, state, extra={}, wait=True)
    for step in (1, 2):
        file = tmp_path / f"{step:09d}" / "manifest" / "manifest.json"
        body = json.loads(file.read_text())
        del body["crc32"]
        for name, row in body["leaves"].items():
            del row["sum"]
            row["crc32"] = reader._crc32(name, np.asarray(state[name])) ^ (step == 2 and name == "w")
        file.write_text(json.dumps(body | {"crc32": reader.body_checksum(body)}))
    found = Checkpoints(tmp_path, keep=3).restore(target)
    assert found.step == 1
    assert np.array_equal(found.state["w"], state["w"])
    assert "w does not match its checksum" in caplog.text
